"""The optimizers of `gradwire.optim` on ranks of one process: all ranks at once, on flat parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress import Identity
from ...compress.codecs.sign_vote import vote
from ...optim.adam import divisor
from ...optim.lion import no_opinion, nobody
from .arms import LearningArm
from .ranks import InProcessRanks

#: The share of the steps in which 1-bit Adam is plain Adam.
WARM_UP = 0.2
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.99), 1e-8, 0.01


class OptimizerMethod:
    """The optimizer of one run, for all ranks.

    Args:
        way: of which `method` is "adam" or "lion".
        ranks: exchange by that way.
        size: how many they are.
        steps: of the run.
        clip: largest norm of a rank's own gradient.
    """

    def __init__(self, way: LearningArm, ranks: InProcessRanks, size: int, steps: int, clip: float) -> None:
        self.way, self.ranks, self.size, self.clip, self.step = way, ranks, size, clip, 0
        self.warmup_steps = round(WARM_UP * steps) if way.method == "adam" else 0
        self.momenta = torch.zeros(size if way.method == "lion" else 1, ranks.numel)
        self.variance, self.moving = torch.zeros(ranks.numel), torch.zeros(ranks.numel, dtype=torch.bool)
        self.divisor = torch.zeros(ranks.numel)
        if self.warmup_steps:
            ranks.use(Identity(), "dense")

    def move(self, values: Tensor, flats: Sequence[Tensor], rate: float) -> None:
        """One step of flat parameters, of the ranks' flat gradients, which are used up."""
        for flat in flats:
            flat.mul_(min(1.0, self.clip / max(float(flat.norm()), 1e-30)))
        direction, moving = self._adam(flats) if self.way.method == "adam" else self._lion(flats)
        values.sub_(direction + WEIGHT_DECAY * torch.where(moving, values, 0.0), alpha=rate)
        self.step += 1

    def _adam(self, flats: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        (momentum,), variance, (first, second) = self.momenta, self.variance, BETAS
        if self.step < self.warmup_steps:
            mean = self.ranks.reduce(flats)
            momentum.mul_(first).add_(mean, alpha=1.0 - first)
            variance.mul_(second).addcmul_(mean, mean, value=1.0 - second)
            divisor(variance, EPS, self.divisor)
        else:
            if self.step == self.warmup_steps > 0:
                self.ranks.use(self.way.codec, self.way.exchange)
            decayed = momentum * first
            for flat in flats:
                torch.add(decayed, flat, alpha=1.0 - first, out=flat)
            momentum.copy_(self.ranks.reduce(flats))
        return momentum / self.divisor, variance != 0

    def _lion(self, flats: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        first, second = BETAS
        for rank, (flat, momentum) in enumerate(zip(flats, self.momenta, strict=True)):
            gradient = flat.clone()
            torch.add(momentum * first, flat, alpha=1.0 - first, out=flat)
            vote(flat).masked_fill_(flat == 0, no_opinion(rank, self.step, self.size))
            momentum.mul_(second).add_(gradient, alpha=1.0 - second)
        mean = self.ranks.reduce(flats)
        self.moving |= mean != nobody(self.step, self.size, self.way.exchange == "two_pass")
        return mean * self.moving, self.moving
