"""All-gather of the wires."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.sparse_codec import SparseCodec
from ..comm.group import Group
from ..comm.ports import Stages, WaitAll
from ..network.cost import Calibration, Estimate
from .base import BucketSpec, Exchange, ExchangeArgs


class Gather(Exchange):
    """All-gather of the wires, part by part (of a sparse codec, indices and values); each rank decodes their mean, in
    rank order. (P-1)·w bytes received."""

    name = "gather"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.sizes = codec.part_bytes(numel) if numel else (0,)
        if numel:
            self.workspaces.append(self.workspace(codec, numel))
        # One buffer for the whole wire, its parts one after the other, and the extra elements behind the last.
        self.row = self.bytes(sum(self.sizes) + 4 * extra)
        self.wire, tail = self.row.split([sum(self.sizes), 4 * extra])
        self.tail = tail.view(torch.float32)
        lengths = (*self.sizes[:-1], self.sizes[-1] + 4 * extra)
        self.received = [group.gather_output(self.world_size, length, device=device) for length in lengths]
        self.wires = [rows[:, :size] for rows, size in zip(self.received, self.sizes, strict=True)]
        for part, into in zip(self.row.split(lengths), self.received, strict=True):
            self.persistent_gather(into, part)

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return True

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        numel, ranks, speed = what.numel, what.world_size, what.speed
        moves = [(network.all_gather, (ranks - 1) * what.codec.wire_bytes(numel))]
        return network.estimate(cls.name, moves, speed.encode * numel, (speed.decode * ranks + speed.mean) * numel)

    @property
    def bytes_sent(self) -> int:
        return self.row.numel() if self.world_size > 1 else 0

    @property
    def bytes_received(self) -> int:
        return (self.world_size - 1) * self.row.numel()

    def reduce(self, x: ExchangeArgs) -> Stages:
        if self.numel:
            x.feedback.encode(self.codec, x.grad, self.wire, x.draw, self.workspaces[1])
        if self.extra:
            self.tail.copy_(x.extra)
        yield WaitAll([port.start() for port in self.ports])
        if self.numel:
            self.codec.decode_mean(self.wires, x.out, self.workspaces[1])
        if self.extra:
            self._decode_extra(self.received[-1][:, self.sizes[-1] :], x.extra)

    def union_of(self, out: Tensor) -> Tensor | None:
        return torch.count_nonzero(out) if isinstance(self.codec, SparseCodec) else None
