"""`LocalUpdates` on ranks of one process: each trains a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...compress import Residual
from ...hooks.local_sgd.outer_sgd import GlobalParameters, OuterSGD
from ..common.language_model import update
from .ranks import InProcessRanks
from .tasks import Batch

#: Steps over which `Agreement` takes means, as GPT-2's AdamW does with a β2 of 0.95.
STEPS = 20


@dataclass(frozen=True)
class RoundSchedule:
    """When replicas exchange: after `every` steps. The mean arrives `delay` steps later, and with `carry` what was
    trained meanwhile is kept, and with `unsent` what has not been sent: arguments of `LocalUpdates`. With `agreeing`
    each rank's steps are as long as those of one optimizer on the mean gradient, by "model", "tensor" or "element"
    (`Agreement`)."""

    every: int
    delay: int = 0
    carry: bool = False
    unsent: bool = False
    agreeing: str = ""

    def __str__(self) -> str:
        late = f", delay {self.delay}" if self.delay else ""
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        kept = (", carried" if self.carry else "") + (", unsent kept" if self.unsent else "")
        return steps + late + kept + (f", agreeing by {self.agreeing}" if self.agreeing else "")


class Agreement:
    """Factors by which replicas' steps become those of one Adam on the mean of their gradients.

    A replica's second moment v_i has the noise of its own gradients g_i, that of their mean ḡ only 1/P of it, so that
    P replicas that step by m/√v_i move less than one that steps by m/√v. The factor is √(mean v_i / v), from 1 to √P,
    with v_i and v as means of g_i² and ḡ² over some `STEPS` steps, and over the model, over a tensor or of each
    element. It takes exact mean gradients, which ranks that compress do not have: it tells what their absence costs.
    """

    def __init__(self, by: str) -> None:
        self._by, self._squares = by, list[torch.Tensor]()

    @torch.no_grad()
    def factors(self, models: Sequence[nn.Module]) -> list[torch.Tensor]:
        """One for each parameter, from the gradients of all models."""
        squares = []
        for replicas in zip(*(model.parameters() for model in models), strict=True):
            gradients = torch.stack([one.grad for one in replicas if one.grad is not None])
            pair = torch.stack([gradients.square().mean(0), gradients.mean(0).square()])
            squares.append(pair if self._by == "element" else pair.flatten(1).sum(1))
        if self._by == "model":
            squares = [torch.stack(squares).sum(0)] * len(squares)
        self._squares = self._squares or [torch.zeros_like(pair) for pair in squares]
        for pair, new in zip(self._squares, squares, strict=True):
            pair.lerp_(new, 1.0 / STEPS)
        return [(own / agreed).nan_to_num(1.0).clamp(1.0, len(models)).sqrt() for own, agreed in self._squares]


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
        self.agreement = Agreement(rounds.agreeing) if rounds.agreeing else None
        self.steps, self.agree = 0, True
        self._means: list[torch.Tensor] = []
        self._due: int | None = None  # after so many steps they arrive

    def step(self, data: Sequence[Iterator[Batch]], rate: float) -> int:
        """One step of every rank, with each one's next batch. Returns the bytes that a rank received."""
        for model, batches in zip(self.models, data, strict=True):
            self.backward(model, next(batches))
        factors = [] if self.agreement is None else self.agreement.factors(self.models)
        for model, optimizers in zip(self.models, self.optimizers, strict=True):
            longer = [(p.detach(), p.detach().clone(), f) for p, f in zip(model.parameters(), factors, strict=False)]
            update(optimizers, rate, self.clip)
            for parameter, before, factor in longer:
                parameter.copy_(torch.lerp(before, parameter, factor))
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
        self._due = self.steps + delay
        if not delay:
            self._move(carry=False, unsent=unsent)
            self.agree = not unsent
        return self.ranks.bytes_received

    def _move(self, carry: bool, unsent: bool = False) -> None:
        """Apply the means that have been exchanged."""
        for shared, mean, memory in zip(self.shared, self._means, self.ranks.memories, strict=True):
            shared.move(mean, keep_local=carry)
            if unsent:
                shared.take_unsent(memory)
        self._due = None
