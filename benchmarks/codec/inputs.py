"""Gradients for benchmarks of codecs: made of noise, made to be awkward, or captured from a model that learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..learning.demo import task_of

#: Training steps whose gradients are captured, counted from 0. Not the first: the model's blocks begin with an output
#: projection of zeros, and until that has learned something, what lies before it has no gradient.
CAPTURED_STEPS = (9, 19, 29, 39)


def gaussian(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator)


def laplace(numel: int, generator: torch.Generator) -> Tensor:
    """Heavier tails, as gradients have: an exponential magnitude with a random sign."""
    magnitudes = torch.empty(numel).exponential_(generator=generator)
    return magnitudes.copysign_(torch.rand(numel, generator=generator) - 0.5)


def constant(numel: int, generator: torch.Generator) -> Tensor:
    return torch.full((numel,), 0.1)


def ties(numel: int, generator: torch.Generator) -> Tensor:
    """Five values only, so that nearly every comparison of magnitudes is a tie."""
    return torch.randint(-2, 3, (numel,), generator=generator).float()


MADE: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "constant": constant,
    "ties": ties,
}
INPUTS = (*MADE, "captured")


@cache
def capture(seed: int = 0) -> Tensor:
    """Gradients of the demo's language model, float32 [steps, parameters], as its optimizer sees them: clipping has
    changed their scale alone. Takes some seconds. `CAPTURED_STEPS` says which steps; parameters are in order.
    """
    torch.manual_seed(seed)
    task = task_of(ranks=1)
    model = task.model()
    optimizer, data = task.new_optimizer(model), task.batches(seed, 0, 1)
    gradients: list[Tensor] = []

    def keep(*_: object) -> None:
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))

    optimizer.register_step_pre_hook(keep)
    for step in range(CAPTURED_STEPS[-1] + 1):
        task.train_step(model, optimizer, step, next(data))
        if step not in CAPTURED_STEPS:
            gradients.pop()
    return torch.stack(gradients)


def gradient(name: str, numel: int, seed: int = 0) -> Tensor:
    """A float32 gradient of `numel` elements. Captured ones repeat where they are too short,
    and lend their middle where they are too long: they begin with the embedding of bytes, many of which never occur."""
    if name == "captured":
        recorded = capture()
        row = recorded[seed % len(recorded)]
        start = max(0, len(row) - numel) // 2
        return row.repeat(-(-numel // len(row)))[start : start + numel].clone()
    return MADE[name](numel, torch.Generator().manual_seed(seed))


def sequence(name: str, numel: int, count: int) -> list[Tensor]:
    """`count` gradients that change a little from one to the next, as they do in training."""
    base = gradient(name, numel)
    return [base + 0.3 * gradient(name, numel, 1 + i) for i in range(count)]
