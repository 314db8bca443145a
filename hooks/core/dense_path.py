"""Steps in which every bucket is dense and nothing is kept: an all-reduce of each bucket.

After backward, Python runs on cold caches: code for each bucket costs several times its standalone time. Work that
does not change is therefore done once for a run of such steps.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ..auto.controller import Controller
from ..comm.between_steps import Reentered
from ..comm.group import Group
from ..timeouts import RAISED_TIMEOUT
from .statistics import Statistics


class Sum(torch.futures.Future[Tensor]):
    """The backend's sum, in place. The first wait completes the future, and later ones return at once."""

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
        group: the group in which DDP would reduce the gradients.
        device: the gradients' device.
        until: the number of the first step that may be reduced otherwise.
        futures_observed: anybody but DDP gets the futures, or none may keep its buffer. DDP reads them after the end of
            the pass, when the means are there, so that one completed future serves in every step.
        statistics: the counts to add to.
        controller: has the time of each step, from its first bucket to all its means.

    Attributes:
        under_way: sums in flight, bucket by bucket.
        number: of the step that the sums under way belong to.
        backward: the pass that waits for the sums at its end, and for their writes if it raises; None: no pass runs.
        steps: number of steps so far, alike on all ranks.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        until: int,
        futures_observed: bool,
        statistics: Statistics,
        controller: Controller,
    ) -> None:
        self.until, self._controller = until, controller
        self._start, self._share = group.means(device)
        self._ranks, self._fresh, self._statistics = group.size, futures_observed or device.type != "cpu", statistics
        self.under_way: list[Sum] = []
        self._last: list[Sum] = []
        self.number, self.backward = 0, None  # type: int, int | None
        self.steps = self._timed = 0

    def reduce(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """A future of the mean, complete after `end` or after `wait`: no backend thread calls into Python."""
        under_way, last, share = self.under_way, self._last, self._share
        place = len(under_way)
        if not place:
            self._controller.begin_timing()
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
        """Wait for the means of a backward pass, before DDP reads them."""
        under_way, numel = self.under_way, 0
        try:
            for future in under_way:
                future.work.wait()
                numel += future.numel
                if self._fresh and not future.done():
                    future.set_result(future.buffer)
        except RuntimeError as error:
            if not isinstance(error, Reentered):
                self.under_way = []
            raise
        self.under_way = []  # not before: if a signal handler raises, a second call waits for the rest
        if self.steps > self._timed:
            self._timed = self.steps
            self._controller.end_timing(self.steps - 1)
        statistics, ranks = self._statistics, self._ranks
        statistics.elements += numel
        statistics.dense_bytes += 4 * numel
        if ranks > 1:
            statistics.bytes_sent += 4 * numel
            statistics.bytes_received += 8 * numel * (ranks - 1) // ranks

    def drop(self) -> None:
        """Give up the means of the step: wait until the backend no longer writes to them, within `RAISED_TIMEOUT`."""
        under_way, self.under_way = self.under_way, []
        for future in under_way:
            with suppress(RuntimeError):
                future.work.wait(RAISED_TIMEOUT)
