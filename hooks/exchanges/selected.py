"""What the exchanges of entries share."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ...compress.codec import Codec, SparseCodec
from ...compress.entries import plain_entries
from ...compress.feedback import Kept
from ..auto.cost import Shape, expected_union
from ..comm.entries import Carrier, Entries, fill
from ..comm.group import Group
from ..comm.pipeline import Stages
from .base import Bucketful, Exchange, Operands, all_finite


class Selected(Exchange):
    """The codec selects, and its entries travel one by one, not as a wire."""

    host_reads = True

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        if not isinstance(codec, SparseCodec):
            raise TypeError(f"{codec} does not select entries, which {type(self).__name__} exchanges")
        self.select = codec.plain
        self.carrier = Carrier(max(1, numel), codec.value_dtype, device, group)
        self.k = codec.k(numel) if numel else 0
        self.wire = self.bytes(self.select.wire_bytes(numel) if numel else 0)
        if numel:
            self.workspaces.append(self.select.workspace(numel, device))
        self.moved = (0, 0)
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        #: Entries in the union of the ranks', in the last step; 0 before it is known.
        self.union_size = 0

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, SparseCodec)

    @staticmethod
    def shape(what: Bucketful) -> Shape:
        """What an estimate needs to know."""
        codec = what.codec
        assert isinstance(codec, SparseCodec)  # `carries` saw to it
        k = codec.k(what.numel)
        union = what.union or expected_union(what.numel, k, what.world_size)
        return Shape(what.numel, k, what.world_size, min(max(union, k), what.numel), codec.value_dtype)

    @property
    def payload_bytes(self) -> int:
        return self.carrier.sent - self.moved[0]

    @property
    def transfer_bytes(self) -> int:
        return self.carrier.received - self.moved[1]

    def reduce(self, x: Operands) -> Stages:
        carrier = self.carrier
        self.moved = carrier.sent, carrier.received
        if self.numel:
            x.feedback.encode(self.select, x.grad, self.wire, x.draw, self.workspaces[1])
            entries = Entries(*plain_entries(self.wire, self.k))
            result = yield from self.bring_together(entries, x.extra, x.feedback)
            fill(x.out, result)
            self.counted[0] = carrier.skipped
            self.counted[1] += (~result.values.isfinite()).sum()
        elif self.extra:
            yield from carrier.all_reduce(x.extra)
        if self.extra:
            x.extra.mul_(1.0 / self.world_size)
            self.counted[1] += ~all_finite(x.extra)

    @abstractmethod
    def bring_together(self, entries: Entries, extra: Tensor, feedback: Kept) -> Stages:
        """Bring this rank's entries together with the others', to means, which the stages return; sum `extra`."""

    def union_of(self, out: Tensor) -> Tensor | None:
        return torch.tensor(self.union_size, device="cpu")

    def counts(self) -> list[Tensor]:
        return [self.counted]
