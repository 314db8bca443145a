"""Steps in which all is dense and nothing is kept: an all-reduce of each bucket, and as little else as can be.

Backward leaves little of Python in the processor's caches, so what runs here once a bucket takes several times what it
takes alone. What a step of DDP's own does not do either is done once for a run of such steps, or not at all.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.group import Group
from .statistics import Statistics

#: How long to wait for what is under way when a backward pass has raised.
RAISED_TIMEOUT = timedelta(seconds=10)


class Sum(torch.futures.Future[Tensor]):
    """A sum that the backend makes in place; who waits for it sees to it that others need not."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__(devices=[buffer.device] if buffer.is_cuda else None)
        self.buffer, self.numel = buffer, buffer.numel()
        self.work: dist.Work

    def wait(self) -> Tensor:
        if not self.done():
            self.work.wait()
            self.set_result(self.buffer)
        return super().wait()


class DensePath:
    """A run of such steps.

    Args:
        group: that the gradients would take anyway.
        device: where they are.
        until: the number of the first step that may be something else.
        seen: whether anybody but DDP sees the futures, or none may keep its buffer. DDP looks at them when the pass has
            ended and the means are there, so that one which has its result already serves in every step.
        statistics: what is counted.

    Attributes:
        under_way: what is to be waited for, bucket by bucket.
        backward: the pass that waits for it when it ends, leaving nothing under way if it raises; None: no pass runs.
        steps: how many have been, alike on all ranks.
        spans: seconds from a pass's first bucket to all its means, on this rank.
    """

    def __init__(self, group: Group, device: torch.device, until: int, seen: bool, statistics: Statistics) -> None:
        self.until = until
        self._start, self._share = group.means(device)
        self._ranks, self._fresh, self._statistics = group.size, seen or device.type != "cpu", statistics
        self.under_way: list[Sum] = []
        self._last: list[Sum] = []
        self.backward: int | None = None
        self.steps, self.spans = 0, list[float]()
        self._began = 0.0

    def reduce(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """The mean, there after `end`, or when it has been waited for: no thread of the backend's calls into Python."""
        under_way, last, share = self.under_way, self._last, self._share
        place = len(under_way)
        if not place:
            self._began = time.perf_counter()
        if place < len(last) and last[place].buffer is buffer:
            future = last[place]
        else:
            future = Sum(buffer)
            if not self._fresh:
                future.set_result(buffer)
                last[place:] = [future]
        future.work = self._start([buffer if share is None else buffer.mul_(share)])
        under_way.append(future)
        return future

    def end(self) -> None:
        """All of a backward pass has been given to `reduce`: wait for the means, before DDP looks."""
        under_way, numel = self.under_way, 0
        try:
            for future in under_way:
                future.work.wait()
                numel += future.numel
                if self._fresh and not future.done():
                    future.set_result(future.buffer)
        except RuntimeError:
            self.under_way = []
            raise
        self.under_way = []  # not before: after what a signal's handler has raised the rest is waited for, too
        if under_way:
            self.spans.append(time.perf_counter() - self._began)
        statistics, ranks = self._statistics, self._ranks
        statistics.elements += numel
        statistics.dense_bytes += 4 * numel
        if ranks > 1:
            statistics.bytes_sent += 4 * numel
            statistics.bytes_received += 8 * numel * (ranks - 1) // ranks

    def drop(self) -> None:
        """Nobody wants the means of the step: wait until nothing is written to them, if other ranks let it end."""
        under_way, self.under_way = self.under_way, []
        for future in under_way:
            with suppress(RuntimeError):
                future.work.wait(RAISED_TIMEOUT)
