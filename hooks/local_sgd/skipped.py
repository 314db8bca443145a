"""Optimizer steps that a GradScaler skips, and that hooks of the optimizer do not see."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch


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
