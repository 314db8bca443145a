"""The exchanges of entries where the host must not wait for the device, as over NCCL.

What travels has a size that the host knows beforehand, and how much of it is used is known on the device alone. Where
more is to travel than fits, the rest waits in the residual: a later step sends it. Without a residual there is room for
all that can come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.backends import entries_for
from ...compress.backends.places import used_places
from ...compress.codec import Codec, SparseCodec
from ...compress.feedback.base import Kept
from ...compress.formats.entries import index_bytes
from ..comm.group import Group
from ..comm.pipeline import Stages
from ..comm.readback import Reading
from ..network.cost import Calibration, Estimate
from .base import Bucketful, Exchange, Operands
from .entry_base import Selected


class Padded(Exchange):
    """The codec selects, and its entries travel in rows of fixed size.

    Attributes:
        count, indices, values: what the codec has selected here: how many, int32 [1], and as many of int32 and float32
            [k], ascending; zeros behind them.
        row: what goes to all ranks.
        room: for how many entries, of what varies: in each row to an owner, or in the union.
    """

    row: Tensor
    room: int

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        if not isinstance(codec, SparseCodec):
            raise TypeError(f"{codec} does not select entries, which {type(self).__name__} exchanges")
        self.select, self.dtype, self.kernels = codec.plain, codec.value_dtype, entries_for(device)
        self.k = codec.k(numel) if numel else 0
        self.wire = self.bytes(self.select.wire_bytes(numel) if numel else 0)
        self.count, self.indices = self.wire.view(torch.int32)[: 1 + self.k].split([min(1, numel), self.k])
        self.values = self.wire.view(torch.float32)[1 + self.k :]
        if numel:
            self.workspaces.append(self.select.workspace(numel, device))
        #: Entries skipped, and means that were not finite.
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, SparseCodec)

    @property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.indices, self.values

    def counts(self) -> list[Tensor]:
        return [self.counted]


class PaddedUnion(Padded):
    """`Union`, of which so many elements take part as were in the last step's, and an eighth more: those of lower
    index. (P-1)·k·i + 9·u·(P-1)/P bytes received; without a residual u is the most that there can be.

    How large the last union was the host reads when the next step begins: nothing of this step is waited for.
    """

    name = "union"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        ranks = self.world_size
        self.most = self.room = min(numel, ranks * self.k)
        self.union_size = 0
        self.reading: Reading | None = None
        self.total, self.pieces = (
            torch.zeros(self.most + extra + more, dtype=torch.float32, device=device) for more in (0, ranks)
        )
        self.row = self.bytes(index_bytes(numel, self.k) if numel else 0)
        if numel:
            self.rows = group.gathered(ranks, len(self.row), device=device)
            self.lists = torch.zeros(ranks, self.k, dtype=torch.int32, device=device)
            self.used = torch.zeros(ranks, dtype=torch.int32, device=device)
            self.union = self.kernels.union(numel, self.most, device)
            self.to_all = self.gather_port(self.rows, self.row)

    @classmethod
    def estimate(cls, network: Calibration, what: Bucketful) -> Estimate:
        shape = Selected.shape(what)
        capacity = min(what.numel, what.world_size * shape.k)
        if what.feedback:
            capacity = min(capacity, _with_room(shape.union))
        return network.selected(network.padded_union(shape, capacity), what.speed, what.numel)

    @property
    def payload_bytes(self) -> int:
        if self.world_size == 1:
            return 0
        return len(self.row) + 4 * (self.room + self.extra)

    @property
    def transfer_bytes(self) -> int:
        others, summed = self.world_size - 1, 4 * (self.room + self.extra)
        return others * len(self.row) + 2 * summed * others // self.world_size

    def union_of(self, out: Tensor) -> Tensor | None:
        return self.union.size[0].long() if self.numel else None

    def reduce(self, x: Operands) -> Stages:
        if not self.numel:
            yield from self.group.sum(x.extra, self.pieces)
            x.extra.mul_(1.0 / self.world_size)
            self.counted[1] += (~x.extra.isfinite()).sum()
            return
        self._make_room(x.feedback)
        x.feedback.encode(self.select, x.grad, self.wire, x.draw, self.workspaces[1])
        self.kernels.pack_indices(self.indices, self.count, 0, self.numel, self.row)
        yield self.to_all.start()
        self.kernels.unpack_indices(self.rows, 0, self.numel, self.used, self.lists)
        self.union([self.lists.view(-1)])
        self.reading = Reading(self.union.size[None], self.reading.memory if self.reading else None)
        total = self.total[: self.room + self.extra]
        with x.feedback.open() as residual:
            self.union.take(self.entries, residual, self.room, x.extra, total, x.out)
            if x.feedback.follows_entries:
                size, union = self.union.size.clamp(max=self.room), self.union.indices[: self.room]
                x.feedback.strategy.also_sent(x.feedback, union, total[: self.room], size)
                x.feedback.not_sent(used_places(self.indices, self.count)[0], self.union.later)
        yield from self.group.sum(total, self.pieces)
        self.union.deliver(total, self.world_size, x.out, x.extra, (self.used, self.k), self.counted)

    def _make_room(self, feedback: Kept) -> None:
        if self.reading is not None:
            self.union_size = self.reading.read()[0][0]
        known = self.reading is not None and feedback.keeps
        self.room = min(self.most, max(self.k, _with_room(self.union_size))) if known else self.most

    def counts(self) -> list[Tensor]:
        return [self.counted, self.union.status] if self.numel else [self.counted]


def _with_room(size: int) -> int:
    return size + -(-size // 8)
