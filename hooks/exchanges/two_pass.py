"""All-to-all of slices of the wire; owners encode their slice of the mean, and all-gather it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.codec import BlockCodec, Codec
from ...compress.feedback.residual import NOTHING
from ...compress.formats.layout import OwnedSlice
from ..comm.group import Group
from ..comm.ports import Stages
from ..network.cost import Calibration, Estimate
from .base import BucketSpec, Exchange, ExchangeArgs


class TwoPass(Exchange):
    """All-to-all of slices of the wire, mean, encode again, all-gather: DoubleSqueeze (Tang et al., ICML 2019) with all
    ranks as servers. 2·w·(P-1)/P bytes received."""

    name, needs, least_ranks = "two_pass", "a block codec", 3

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        block = codec.block_size
        assert block is not None  # `carries` saw to it
        blocks = -(-numel // block)
        self.slice = -(-blocks // self.world_size) * block
        self.slice_bytes = codec.wire_bytes(self.slice) if numel else 0
        self.back = codec.second_pass()
        self.back_bytes = self.back.wire_bytes(self.slice) if numel else 0
        self.start, self.own = self._range(self.rank)
        own = self.own
        sent = self.bytes(self.world_size * self.slice_bytes)  # whole slices: padded behind the last record
        self.slices = self.bytes(self.world_size * self.slice_bytes).view(self.world_size, self.slice_bytes)
        self.row = self.bytes(self.back_bytes + 4 * extra)
        self.received = group.gather_output(self.world_size, self.row.numel(), device=device)
        self.to_owners = self.persistent_swap(self.slices, sent)
        self.to_all = self.persistent_gather(self.received, self.row)
        # Views of them, without the padding: this rank's wire, its slice from every rank, and of all ranks' means.
        self.wire = sent[: codec.wire_bytes(numel) if numel else 0]
        self.arrived = (self.slices[:, : codec.wire_bytes(own) if own else 0],)
        self.sent = self.row[: self.back.wire_bytes(own) if own else 0]
        self.wires = self._wires()
        for code in (codec,) if self.back is codec else (codec, self.back):
            self.workspaces += [self.workspace(code, size) for size in (numel, own) if size]
        self.decoding, self.encoding = self.workspaces[-2 if own else -1], self.workspaces[-1]

    def _range(self, rank: int) -> tuple[int, int]:
        start = min(rank * self.slice, self.numel)
        return start, min(self.slice, self.numel - start)

    def _wires(self) -> list[tuple[int, int, Tensor]]:
        """The parts decoded at the end: first element, length and wire."""
        whole_records = self.slice % (self.back.block_size or 1) == 0
        if self.numel and not self.extra and whole_records:  # slices lie end to end: a wire of the whole bucket
            return [(0, self.numel, self.received.view(1, -1)[:, : self.back.wire_bytes(self.numel)])]
        ranges = [(rank, *self._range(rank)) for rank in range(self.world_size)]
        return [
            (start, length, self.received[rank : rank + 1, : self.back.wire_bytes(length)])
            for rank, start, length in ranges
            if length
        ]

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, BlockCodec)

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        numel, ranks, speed = what.numel, what.world_size, what.speed
        there, back = ((ranks - 1) * c.wire_bytes(-(-numel // ranks)) for c in (what.codec, what.codec.second_pass()))
        own, moves = numel / ranks, [(network.all_to_all, there), (network.all_gather, back)]
        decode = speed.decode * 2 * numel + speed.mean * (own + numel)
        return network.estimate(cls.name, moves, speed.encode * (numel + own), decode)

    @property
    def owned_slices(self) -> list[OwnedSlice]:
        return [(self.start, self.own, self.world_size)] if self.own else []

    @property
    def bytes_sent(self) -> int:
        if self.world_size == 1:
            return 0
        return (self.world_size - 1) * self.slice_bytes + self.row.numel()

    @property
    def bytes_received(self) -> int:
        return (self.world_size - 1) * (self.slice_bytes + self.row.numel())

    def reduce(self, x: ExchangeArgs) -> Stages:
        if self.extra:
            self.row[self.back_bytes :].view(torch.float32).copy_(x.extra)
        if self.numel:
            x.feedback.encode(self.codec, x.grad, self.wire, x.draw, self.workspaces[1])
            yield self.to_owners.start()
        if self.own:
            feedback = x.owned[0] if x.owned else NOTHING
            with self.group.scratch.open(self.own, self.device) as mean:
                self.codec.decode_mean(self.arrived, mean, self.workspaces[2])
                feedback.encode(self.back, mean, self.sent, x.owner_draw, self.encoding)
        yield self.to_all.start()
        for start, length, wire in self.wires:
            self.back.decode_mean((wire,), x.out[start : start + length], self.decoding)
        if self.extra:
            self._decode_extra(self.received[:, self.back_bytes :], x.extra)
