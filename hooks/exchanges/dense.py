"""No compression."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.codec import Codec
from ..comm.group import Group
from ..comm.pipeline import Stages
from ..network.cost import Calibration, Estimate, Shape
from .base import BucketSpec, Exchange, ExchangeArgs, all_finite


class Dense(Exchange):
    """float32 all-reduce; the codec only waits. In place where the gradient is float32 and nothing travels beside it.
    8·N·(P-1)/P bytes received.

    Attributes:
        settled: whether the last mean was finite, so that no rank can have kept anything back. Not known on GPUs, as
            the host would have to wait for them.
    """

    name = "dense"
    collective = True

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.memory: Tensor | None = None  # where the sum cannot be made in place
        self.pieces: Tensor | None = None
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self.not_finite = self.counted[1]
        self.settled = False

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return True

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        return network.dense(Shape(what.numel, 0, what.world_size, 0))

    @property
    def bytes_sent(self) -> int:
        return 4 * (self.numel + self.extra) if self.world_size > 1 else 0

    @property
    def bytes_received(self) -> int:
        return 2 * 4 * (self.numel + self.extra) * (self.world_size - 1) // self.world_size

    def reduce(self, x: ExchangeArgs) -> Stages:
        total = x.grad
        if x.grad.dtype != torch.float32 or self.extra:
            if self.memory is None:
                self.memory = torch.zeros(self.numel + self.extra, dtype=torch.float32, device=self.device)
            total = self.memory
            total[: self.numel].copy_(x.grad)
            total[self.numel :].copy_(x.extra)
        if self.group.shared:
            yield from self.group.sum(total, self._room())
            total.mul_(1.0 / self.world_size)
        else:
            yield self.group.mean(total)  # as `DensePath.reduce` does: to the same bits
        finite = all_finite(total)
        self.not_finite.add_(~finite)
        if not total.is_cuda:
            self.settled = bool(finite)
        if total is not x.out:
            x.out.copy_(total[: self.numel])
            x.extra.copy_(total[self.numel :])

    def _room(self) -> Tensor:
        """For a sum by messages."""
        if self.pieces is None:
            size = self.numel + self.extra + self.world_size
            self.pieces = torch.zeros(size, dtype=torch.float32, device=self.device)
        return self.pieces

    def counts(self) -> list[Tensor]:
        return [self.counted]
