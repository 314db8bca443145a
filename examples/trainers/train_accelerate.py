"""Accelerate: a loop of one's own on compressed gradients, with clipping, accumulation, checkpoints and resume.

torchrun --standalone --nproc-per-node 2 train_accelerate.py
torchrun --standalone --nproc-per-node 2 train_accelerate.py --epochs 4 --resume checkpoints/epoch-1
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from gradwire import CompressState, TopK
from gradwire.trainers import register_with_accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def data() -> TensorDataset:
    """Points, and which of ten random directions each lies nearest to."""
    generator = torch.Generator().manual_seed(1)
    points, directions = torch.randn(2048, 64, generator=generator), torch.randn(64, 10, generator=generator)
    return TensorDataset(points, (points @ directions).argmax(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", help="a folder that save_state has written, such as checkpoints/epoch-1")
    parser.add_argument("--density", type=float, default=0.02, help="the part of each gradient that is sent")
    args = parser.parse_args()

    set_seed(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = CompressState(TopK(density=args.density), fallback=None)  # one machine needs no compression; nevertheless
    register_with_accelerator(accelerator, model, state)

    first = 0
    if args.resume is not None:
        accelerator.load_state(args.resume)
        first = int(args.resume.rstrip("/").split("-")[-1]) + 1
    for epoch in range(first, args.epochs):
        total = torch.zeros(())
        for points, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(loader)
        accelerator.save_state(f"checkpoints/epoch-{epoch}")
        mean = accelerator.reduce(total, "mean")
        accelerator.print(f"loss {float(mean):.3f} after {state.step} steps")
    done = state.statistics()
    accelerator.print(f"{done.bytes_sent} bytes sent where float32 has {done.dense_bytes}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
