"""Slices of the wire to their owners, who encode the mean once more for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress.codec import BlockCodec, Codec
from ...compress.feedback import NOTHING, Kept
from ...compress.layout import OwnedSlice
from ..auto.cost import Calibration, Estimate
from ..comm.group import Group
from ..comm.pipeline import Stages
from .base import Bucketful, Exchange


class TwoPass(Exchange):
    """All-to-all of slices of the wire, mean, encode again, all-gather: DoubleSqueeze (Tang et al., ICML 2019) with all
    ranks as servers. 2·w·(P-1)/P bytes received."""

    name = "two_pass"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        block = codec.block_size
        assert block is not None  # `carries` saw to it
        blocks = -(-numel // block)
        self.slice = -(-blocks // self.world_size) * block
        self.slice_bytes = codec.wire_bytes(self.slice) if numel else 0
        self.start, own = self._range(self.rank)
        self.wire = self.bytes(self.world_size * self.slice_bytes)  # whole slices: padded behind the last record
        self.slices = self.bytes(self.world_size * self.slice_bytes).view(self.world_size, self.slice_bytes)
        self.mean = torch.zeros(own, dtype=torch.float32, device=device)
        self.row = self.bytes(self.slice_bytes + 4 * extra)
        self.received = group.gathered(self.world_size, self.row.numel(), device=device)
        self.to_owners = self.swap_port(self.slices, self.wire)
        self.to_all = self.gather_port(self.received, self.row)
        if numel:
            self.workspaces.append(codec.workspace(numel, device))
        if own:
            self.workspaces.append(codec.workspace(own, device))

    def _range(self, rank: int) -> tuple[int, int]:
        start = min(rank * self.slice, self.numel)
        return start, min(self.slice, self.numel - start)

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, BlockCodec)

    @classmethod
    def estimate(cls, network: Calibration, what: Bucketful) -> Estimate:
        return network.two_pass(what.codec, what.speed, what.numel, what.world_size)

    @property
    def owned_slices(self) -> list[OwnedSlice]:
        return [(self.start, self.mean.numel(), self.world_size)] if self.mean.numel() else []

    @property
    def payload_bytes(self) -> int:
        if self.world_size == 1:
            return 0
        return self.wire.numel() // self.world_size * (self.world_size - 1) + self.row.numel()

    @property
    def transfer_bytes(self) -> int:
        return (self.world_size - 1) * (self.slice_bytes + self.row.numel())

    def reduce(
        self,
        grad: Tensor,
        out: Tensor,
        extra: Tensor,
        feedback: Kept,
        owned: Sequence[Kept],
        draw: Tensor,
        owner_draw: Tensor,
    ) -> Stages:
        self.row[self.slice_bytes :].view(torch.float32).copy_(extra)
        if self.numel:
            wire = self.wire[: self.codec.wire_bytes(self.numel)]
            feedback.encode(self.codec, grad, wire, draw, self.workspaces[1])
            yield self.to_owners.start()
        if own := self.mean.numel():
            size = self.codec.wire_bytes(own)
            self.codec.decode_mean((self.slices[:, :size],), self.mean, self.workspaces[2])
            own_feedback = owned[0] if owned else NOTHING
            own_feedback.encode(self.codec, self.mean, self.row[:size], owner_draw, self.workspaces[2])
        yield self.to_all.start()
        if not self.numel:
            pass
        elif not self.extra:  # the slices lie end to end: a wire of the whole bucket
            wire = self.received.view(1, -1)[:, : self.codec.wire_bytes(self.numel)]
            self.codec.decode_mean((wire,), out, self.workspaces[1])
        else:
            for rank in range(self.world_size):
                start, length = self._range(rank)
                if length:
                    wire = self.received[rank : rank + 1, : self.codec.wire_bytes(length)]
                    self.codec.decode_mean((wire,), out[start : start + length], self.workspaces[1])
        self._decode_extra(self.received[:, self.slice_bytes :], extra)
