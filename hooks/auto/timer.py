"""The time that steps take, on the host or on a GPU."""

from __future__ import annotations

import time
from collections import deque
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class StepTimer(Generic[T]):
    """Seconds of steps from one place of theirs to another. On a GPU both are places of its streams, and a time is
    known once the GPU has passed them, some steps later: nobody waits for that.

    Args:
        device: where steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._began = 0.0
        self._known: list[tuple[T, float]] = []
        self._start: torch.cuda.Event | None = None
        self._passing: deque[tuple[T, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """A step begins here; on a GPU, after what its current stream holds now."""
        if self._gpu:
            self._start = self._start or self._event()
            self._start.record()
        else:
            self._began = time.perf_counter()

    def end(self, step: T) -> None:
        """The step that has begun last ends here."""
        if not self._gpu:
            self._known.append((step, time.perf_counter() - self._began))
        elif self._start is not None:
            start, self._start = self._start, None
            end = self._event()
            end.record()
            self._passing.append((step, start, end))

    def read(self) -> list[tuple[T, float]]:
        """Steps and their seconds that have become known since the last call, in their order."""
        while self._passing and self._passing[0][2].query():
            step, start, end = self._passing.popleft()
            self._known.append((step, start.elapsed_time(end) / 1e3))
            self._spare += [start, end]
        known, self._known = self._known, []
        return known

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
