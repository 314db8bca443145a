"""No compression."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...compress.backends import all_finite
from ...compress.codec import Codec
from ..comm.group import Group
from ..comm.ports import Stages
from ..network.cost import GLOO_COLLECTIVES, Calibration, Estimate
from .base import BucketSpec, Exchange, ExchangeArgs
from .non_zero_blocks import elements_of_blocks


def all_reduce_estimate(network: Calibration, numel: int, world_size: int) -> Estimate:
    """The cost of an all-reduce of float32 elements, and of the passes over them."""
    moves = [(network.all_reduce, 8 * numel * (world_size - 1) / world_size)]
    whole = network.estimate("dense", moves, 0.0, network.work.dense * numel)
    return replace(whole, at_once=min(network.at_once, GLOO_COLLECTIVES))


class Dense(Exchange):
    """float32 all-reduce; the codec is not used. In place if the gradient is float32 and there are no extra elements.
    8·N·(P-1)/P bytes received.

    Attributes:
        settled: the last mean was finite, so that no rank keeps a residual. Unknown on GPUs, for which the host would
            have to wait.
    """

    name = "dense"
    collective = True

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.memory: Tensor | None = None  # for sums that cannot be made in place
        self.pieces: Tensor | None = None
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self.not_finite = self.counted[1]
        self.settled = False

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return True

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        return all_reduce_estimate(network, what.numel, what.world_size)

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
            yield from self.group.sum(total, self._buffer())
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

    def _buffer(self) -> Tensor:
        """Memory for a sum by messages."""
        if self.pieces is None:
            size = self.numel + self.extra + self.world_size
            self.pieces = torch.zeros(size, dtype=torch.float32, device=self.device)
        return self.pieces

    def union_of(self, out: Tensor) -> Tensor | None:
        return elements_of_blocks(out) if self.codec.lossless else None

    def counts(self) -> list[Tensor]:
        return [self.counted]
