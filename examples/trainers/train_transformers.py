"""Transformers' Trainer: a small language model on compressed gradients, with accumulation, checkpoints and resume.

torchrun --standalone --nproc-per-node 2 train_transformers.py
torchrun --standalone --nproc-per-node 2 train_transformers.py --steps 80 --resume checkpoints/checkpoint-40
"""

import argparse

import torch
from gradwire import ChunkedTopK, CompressState
from gradwire.trainers import TransformersCallback
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def data() -> list[dict[str, torch.Tensor]]:
    """Rows that count, each from a number and by a step of its own."""
    generator = torch.Generator().manual_seed(1)
    starts, steps = torch.randint(64, (2, 1024, 1), generator=generator)
    rows = (starts + steps % 4 * torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resume", help="a checkpoint, such as checkpoints/checkpoint-40")
    args = parser.parse_args()

    arguments = TrainingArguments(
        "checkpoints",
        max_steps=args.steps,
        save_steps=20,
        logging_steps=10,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    trainer = Trainer(model, arguments, train_dataset=data())
    state = CompressState(ChunkedTopK(), fallback=None)  # one machine needs no compression; nevertheless
    trainer.add_callback(TransformersCallback(trainer, state))
    trainer.train(resume_from_checkpoint=args.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    done = state.statistics()
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {state.step} steps")
        print(f"{done.bytes_sent} bytes sent where float32 has {done.dense_bytes}")


if __name__ == "__main__":
    main()
