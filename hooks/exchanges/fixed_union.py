"""`union` in messages of fixed size, for which the host does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.backends.places import used_places
from ...compress.codec import Codec
from ...compress.feedback.base import FeedbackState
from ...compress.formats.entries import index_bytes
from ..comm.group import Group
from ..comm.ports import Stages
from ..comm.readback import Readback
from ..network.cost import Calibration, Estimate
from .base import BucketSpec, ExchangeArgs
from .entry_base import entries_of, with_selection
from .fixed_base import FixedSizeExchange


class FixedSizeUnion(FixedSizeExchange):
    """`Union` with a capacity of the last step's union and an eighth more; the lower indices take part.
    (P-1)·k·i + 9·u·(P-1)/P bytes received; without a residual u is the largest possible union.

    The host reads the size of the last union when the next step begins, so it waits for nothing of this step.
    """

    name = "union"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        ranks = self.world_size
        self.most = self.capacity = min(numel, ranks * self.k)
        self.union_size = 0
        self.reading: Readback | None = None
        self.total, self.pieces = (
            torch.zeros(self.most + extra + more, dtype=torch.float32, device=device) for more in (0, ranks)
        )
        self.row = self.bytes(index_bytes(numel, self.k) if numel else 0)
        if numel:
            self.rows = group.gather_output(ranks, len(self.row), device=device)
            self.lists = torch.zeros(ranks, self.k, dtype=torch.int32, device=device)
            self.used = torch.zeros(ranks, dtype=torch.int32, device=device)
            self.union = self.kernels.union(numel, self.most, device)
            self.to_all = self.persistent_gather(self.rows, self.row)

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        shape, ranks, work = entries_of(what), what.world_size, network.work
        k, capacity = shape.k, min(what.numel, ranks * shape.k)
        if what.feedback:
            capacity = min(capacity, _with_room(shape.union))
        moves = [
            (network.all_gather, (ranks - 1) * index_bytes(what.numel, k)),
            (network.all_reduce, 8 * capacity * (ranks - 1) / ranks),
        ]
        decode = (work.unpack + work.merge) * ranks * k + work.merge * (capacity + k) + work.scatter * 3 * capacity
        return with_selection(network.estimate(cls.name, moves, work.pack * k, decode), network, what)

    @property
    def bytes_sent(self) -> int:
        if self.world_size == 1:
            return 0
        return len(self.row) + 4 * (self.capacity + self.extra)

    @property
    def bytes_received(self) -> int:
        others, summed = self.world_size - 1, 4 * (self.capacity + self.extra)
        return others * len(self.row) + 2 * summed * others // self.world_size

    def union_of(self, out: Tensor) -> Tensor | None:
        return self.union.size[0].long() if self.numel else None

    def reduce(self, x: ExchangeArgs) -> Stages:
        if not self.numel:
            yield from self.group.sum(x.extra, self.pieces)
            x.extra.mul_(1.0 / self.world_size)
            self.counted[1] += (~x.extra.isfinite()).sum()
            return
        self._set_capacity(x.feedback)
        x.feedback.encode(self.select, x.grad, self.wire, x.draw, self.workspaces[1])
        self.kernels.pack_indices(self.indices, self.count, 0, self.numel, self.row)
        yield self.to_all.start()
        self.kernels.unpack_indices(self.rows, 0, self.numel, self.used, self.lists)
        self.union([self.lists.view(-1)])
        self.reading = Readback(self.union.size[None], self.reading.memory if self.reading else None)
        total = self.total[: self.capacity + self.extra]
        with x.feedback.open() as residual:
            self.union.take(self.entries, residual, self.capacity, x.extra, total, x.out)
            if x.feedback.follows_entries:
                size, union = self.union.size.clamp(max=self.capacity), self.union.indices[: self.capacity]
                x.feedback.strategy.on_extra_sent(x.feedback, union, total[: self.capacity], size)
                x.feedback.on_unsent(used_places(self.indices, self.count)[0], self.union.later)
        yield from self.group.sum(total, self.pieces)
        self.union.deliver(total, self.world_size, x.out, x.extra, (self.used, self.k), self.counted)

    def _set_capacity(self, feedback: FeedbackState) -> None:
        if self.reading is not None:
            self.union_size = self.reading.read()[0][0]
        known = self.reading is not None and feedback.keeps
        self.capacity = min(self.most, max(self.k, _with_room(self.union_size))) if known else self.most

    def counts(self) -> list[Tensor]:
        return [self.counted, self.union.status] if self.numel else [self.counted]


def _with_room(size: int) -> int:
    return size + -(-size // 8)
