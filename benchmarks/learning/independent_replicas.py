"""`LocalUpdates` on ranks of one process: each trains a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...compress import Residual
from ...hooks.local_sgd.outer_sgd import GlobalParameters, OuterSGD
from ...hooks.local_sgd.step_lengths import StepLengths
from ..common.language_model import update
from .ranks import InProcessRanks
from .tasks import Batch


@dataclass(frozen=True)
class RoundSchedule:
    """When replicas exchange: after `every` steps. The mean arrives `delay` steps later. With `carry` what was trained
    meanwhile is kept, with `unsent` what has not been sent; with `lengthened` steps are longer. Arguments of
    `LocalUpdates`."""

    every: int
    delay: int = 0
    carry: bool = False
    unsent: bool = False
    lengthened: bool = False

    def __str__(self) -> str:
        late = f", delay {self.delay}" if self.delay else ""
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        kept = (", carried" if self.carry else "") + (", unsent kept" if self.unsent else "")
        return steps + late + kept + (", steps lengthened" if self.lengthened else "")


class IndependentReplicas:
    """The models and optimizers of all ranks, and the parameters that they agree on.

    Args:
        rounds: when they exchange.
        ranks: exchange the differences of parameters in their order in the model.
        model: what all start from.
        optimizers_of: makes those of a model.
        backward: adds the gradients of a batch to those of a model.
        clip: largest norm of a rank's own gradients.
    """

    def __init__(
        self,
        rounds: RoundSchedule,
        ranks: InProcessRanks,
        model: nn.Module,
        optimizers_of: Callable[[nn.Module], Sequence[torch.optim.Optimizer]],
        backward: Callable[[nn.Module, Batch], None],
        clip: float,
    ) -> None:
        self.rounds, self.ranks, self.backward, self.clip = rounds, ranks, backward, clip
        self.models = [copy.deepcopy(model) for _ in ranks.memories]
        self.optimizers = [optimizers_of(one) for one in self.models]
        outer = OuterSGD()
        self.shared = [
            GlobalParameters(0, dict(one.named_parameters()), frozenset(), ranks.strategy or Residual(), outer)
            for one in self.models
        ]
        every = zip(self.models, self.optimizers, strict=True) if rounds.lengthened else ()
        self.lengths = [StepLengths(optimizers, dict(one.named_parameters()), 0) for one, optimizers in every]
        for one in self.lengths:
            one.watch()
        self.samples = None
        if self.lengths:
            samples, how = self.lengths[0].bucket, (ranks.codec, ranks.exchange, None)
            self.samples = InProcessRanks(len(self.models), samples.slots, *how, excluded=samples.names)
        self.steps, self.agree = 0, True
        self._means: list[torch.Tensor] = []
        self._due: int | None = None  # after so many steps they arrive

    def step(self, data: Sequence[Iterator[Batch]], rate: float) -> int:
        """One step of every rank, with each one's next batch. Returns the bytes that a rank received."""
        for model, batches, optimizers in zip(self.models, data, self.optimizers, strict=True):
            self.backward(model, next(batches))
            update(optimizers, rate, self.clip)
        self.steps, self.agree = self.steps + 1, False
        if self._due is not None and self.steps >= self._due:
            self._move(self.rounds.carry, self.rounds.unsent)
        return 0 if self.steps % self.rounds.every else self._round(self.rounds.delay, self.rounds.unsent)

    def synchronise(self) -> int:
        """A round, unless all have the same parameters. Returns the bytes that a rank received."""
        if self._due is not None:
            self._move(self.rounds.carry)
        return 0 if self.agree else self._round(0)

    def _round(self, delay: int, unsent: bool = False) -> int:
        self._means = [shared.difference(restart=self.rounds.carry and delay > 0) for shared in self.shared]
        self.ranks.reduce(self._means)
        received = self.ranks.bytes_received
        if self.samples is not None:
            self.samples.reduce([one.message() for one in self.lengths])
            received += self.samples.bytes_received
            for one in self.lengths:
                one.arrived()
        self._due = self.steps + delay
        if not delay:
            self._move(carry=False, unsent=unsent)
            self.agree = not unsent
        return received

    def _move(self, carry: bool, unsent: bool = False) -> None:
        """Apply the means that have been exchanged."""
        for shared, mean, memory in zip(self.shared, self._means, self.ranks.memories, strict=True):
            shared.move(mean, keep_local=carry)
            if unsent:
                shared.take_unsent(memory)
        for one in self.lengths:
            one.take(len(self.models))
        self._due = None
