"""Steps of training, counted by those of its optimizers, and by those that a GradScaler skips, which their hooks do not
see."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class StepCounter:
    """Counts a step of training once each of its optimizers has made its own, or a scaler has skipped that.

    Args:
        optimizers: those that make a step together.
        counted: called after each step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], counted: Callable[[], None]) -> None:
        self._made, self._steps, self._counted = [0] * len(optimizers), 0, counted
        self._handles: list[Any] = []
        for index, optimizer in enumerate(optimizers):
            made, passed = partial(self._made.__getitem__, index), partial(self._passed, index)
            self._handles.append(optimizer.register_step_post_hook(passed))
            self._handles.append(Skips(optimizer, made, passed))

    def _passed(self, index: int, *_: object) -> None:
        self._made[index] += 1
        if min(self._made) > self._steps:
            self._steps += 1
            self._counted()

    def remove(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()


class Skips:
    """Observer of steps that a scaler skips, until `remove`.

    Args:
        optimizer: the optimizer of these steps.
        made: returns the number of its steps.
        skipped: called right after a scaler's `step` that did not call the optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, made: Callable[[], int], skipped: Callable[[], None]) -> None:
        self.optimizer, self.made, self.skipped = optimizer, made, skipped
        _watch()
        _open.add(self)

    def remove(self) -> None:
        """Stop observing."""
        _open.discard(self)


_open: weakref.WeakSet[Skips] = weakref.WeakSet()


@functools.cache
def _watch() -> None:
    """Wrap `GradScaler.step`, for all scalers: a scaler has no hooks, and may be made later on."""
    step = torch.amp.GradScaler.step

    @functools.wraps(step)
    def watched(
        scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        seen = [(skips, skips.made()) for skips in _open if skips.optimizer is optimizer]
        result = step(scaler, optimizer, *args, **kwargs)
        for skips, before in seen:
            if skips.made() == before:
                skips.skipped()
        return result

    torch.amp.GradScaler.step = watched  # type: ignore[assignment, method-assign]
