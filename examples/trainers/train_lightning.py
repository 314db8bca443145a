"""Lightning: a small classifier on compressed gradients, with clipping, accumulation, checkpoints and resume.

torchrun --standalone --nproc-per-node 2 train_lightning.py
torchrun --standalone --nproc-per-node 2 train_lightning.py --epochs 4 --resume checkpoints/last.ckpt
"""

import argparse
import os

import torch
from gradwire import CompressState, TopK
from gradwire.trainers import LightningCallback
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    """Which of ten random directions a point lies nearest to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        points, labels = batch
        loss = nn.functional.cross_entropy(self.layers(points), labels)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    points, directions = torch.randn(2048, 64, generator=generator), torch.randn(64, 10, generator=generator)
    return TensorDataset(points, (points @ directions).argmax(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", help="a checkpoint, such as checkpoints/last.ckpt")
    parser.add_argument("--density", type=float, default=0.02, help="the part of each gradient that is sent")
    args = parser.parse_args()

    seed_everything(1, verbose=False)
    state = CompressState(TopK(density=args.density), fallback=None)  # one machine needs no compression; nevertheless
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        strategy="ddp",
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[LightningCallback(state), ModelCheckpoint("checkpoints", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(data(), batch_size=16, shuffle=True), ckpt_path=args.resume)
    done = state.statistics()
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['loss']):.3f} after {state.step} steps")
        print(f"{done.bytes_sent} bytes sent where float32 has {done.dense_bytes}")


if __name__ == "__main__":
    main()
