"""The mean of matrices as low-rank factors (PowerSGD)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.backends.power_sgd import PowerSGDKernels
from ...compress.codec import Codec
from ...compress.codecs.power_sgd import PowerSGD
from ...compress.feedback.residual import NOTHING
from ..comm.group import Group
from ..comm.ports import Stages
from ..network.cost import Calibration, Estimate
from .base import IDENTITY, BucketSpec, Exchange, ExchangeArgs
from .gather import Gather
from .two_pass import TwoPass


class Factors(Exchange):
    """PowerSGD (Vogels et al., NeurIPS 2019): with M_i = gradient + residual of rank i,

        P = orthonormal columns of mean(M_i·S);  Q_i = M_iᵀ·P;  mean = P·mean(Q_i)ᵀ;  residual = M_i - P·Q_iᵀ

    and S = mean(Q_i) of the step before, with columns of length 1. S is drawn at first, for a new bucket, and after a
    checkpoint, which does not hold it.
    Both means are of float32 numbers in rank order, above two ranks by owners: 8·f·(P-1)/P bytes received for f
    numbers. M_i lies in the gradient's memory meanwhile. The paper's residual is M_i less the mean: the residuals here
    differ from it, and their mean does not.
    """

    name, needs = "factors", "a low-rank codec"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.numbers = torch.zeros(codec.wire_bytes(numel) // 4 if numel else 0, dtype=torch.float32, device=device)
        first = len(self.numbers)
        if numel:
            self.workspaces = [self.workspace(IDENTITY, numel), self.workspace(codec, numel)]
            kernels = codec.kernels(device)
            assert isinstance(codec, PowerSGD)  # `carries` saw to it
            assert isinstance(kernels, PowerSGDKernels)
            self.kernels = kernels
            self.matrices = kernels.matrices(codec, numel, device, self.workspaces[1])
            first -= self.matrices.right
        self.sums, self.right = self.numbers[:first], self.numbers[first:]
        mean = TwoPass if group.size > 2 else Gather
        sizes = (first, extra), (len(self.right), 0)
        self.means = [mean(IDENTITY, *size, device, self._own_group(str(i))) for i, size in enumerate(sizes)]
        self.ports = [port for exchange in self.means for port in exchange.ports]
        #: S; None: not drawn yet.
        self.start: Tensor | None = None
        self._buffer: Tensor | None = None

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, PowerSGD)

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        numel, ranks, speed = what.numel, what.world_size, what.speed
        half = what.codec.wire_bytes(numel) / 2  # of either mean, about
        moves = [(network.all_gather, (ranks - 1) * half)]
        if ranks > 2:
            moves = [
                (network.all_to_all, half * (ranks - 1) / ranks),
                (network.all_gather, (ranks - 1) * (half / ranks)),
            ]
        return network.estimate(cls.name, 2 * moves, speed.encode * numel, (speed.decode + speed.mean) * numel)

    @property
    def bytes_sent(self) -> int:
        return sum(exchange.bytes_sent for exchange in self.means)

    @property
    def bytes_received(self) -> int:
        return sum(exchange.bytes_received for exchange in self.means)

    def reduce(self, x: ExchangeArgs) -> Stages:
        if not self.numel:
            yield from self.means[0].reduce(self._of(self.sums, x.extra, x))
            return
        kernels, matrices, total = self.kernels, self.matrices, self._total(x)
        whole, left, right = matrices.split(self.numbers)
        # `total` becomes gradient plus residual, and the residual 0.
        x.feedback.encode(IDENTITY, x.grad, total.view(torch.uint8), x.draw, self.workspaces[0])
        if self.start is None:
            self.start = torch.empty(matrices.right, dtype=torch.float32, device=self.device)
            kernels.draw(matrices, x.draw, self.start)
        kernels.take(matrices, total, whole)
        kernels.left(matrices, total, self.start, left)
        yield from self.means[0].reduce(self._of(self.sums, x.extra, x))
        if matrices.right:
            kernels.orthonormalise(matrices, left)
            kernels.right(matrices, total, left, right)
            stages = self.means[1].reduce(self._of(right, right[:0], x))
            in_flight = next(stages)
            with x.feedback.open() as residual:
                if residual is not None:
                    kernels.leave(matrices, left, right, total, residual)
            yield in_flight
            yield from stages
            kernels.settle(matrices, left, right)
            kernels.follow(matrices, right, self.start)
        kernels.add(matrices, self.numbers, total, 1.0, True, self.workspaces[1].status)
        if total is not x.out:
            x.out.copy_(total)

    def counts(self) -> list[Tensor]:
        return [*super().counts(), *(count for exchange in self.means for count in exchange.counts())]

    def _total(self, x: ExchangeArgs) -> Tensor:
        """Memory for gradient plus residual."""
        if x.out.dtype == torch.float32:
            return x.out
        if self._buffer is None:
            self._buffer = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        return self._buffer

    @staticmethod
    def _of(numbers: Tensor, extra: Tensor, x: ExchangeArgs) -> ExchangeArgs:
        """Arguments that replace numbers by their mean."""
        return ExchangeArgs(numbers, numbers, extra, NOTHING, (), x.draw, x.owner_draw)
