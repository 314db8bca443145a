"""The data path: a flat gradient in, the ranks' mean out. It knows nothing of who asks: DDP, or anybody else."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..compress.feedback import NOTHING, Kept
from ..compress.layout import layout_numel
from ..compress.memory import Memory
from .auto.drift import Drift
from .auto.planner import REVIEW_EVERY, Choice
from .auto.trial import Trial
from .comm.group import HANDSHAKE_TIMEOUT
from .comm.pipeline import Stages, drive, outcome
from .connection import Connection
from .exchanges import Exchange
from .loss_scale import Scaling, Tracker
from .statistics import Statistics
from .unit import Unit

#: Where everything is dense, every so many steps one goes the usual way: ranks compare steps, and look for NaN.
LOOK_EVERY = 64


@dataclass(eq=False)
class Step:
    """One reduction of all gradients: its number, its choice, whose gradients have been submitted, and the units
    reduced so far, with the buffers that hold their means."""

    number: int
    choice: Choice
    names: set[str] = field(default_factory=set)
    reduced: list[tuple[Unit, Tensor]] = field(default_factory=list)
    #: Whether gradients of this rank go in, and not zeros in the place of a rank that has joined.
    own: bool = True
    #: Whether the scaler will skip it, as far as is known.
    undone: bool = False
    #: Whether its owner has got all of its means, or never will.
    settled: bool = False
    began: float = 0.0


class Reducer:
    """Reduces the gradients of one model among the ranks of a connection, step by step.

    Args:
        connection: to the other ranks.
        feedback: what compression has left out, by parameter.
        tracker: follows the loss scaler.
        statistics: what is counted.
        seed: of stochastic rounding.
        clean: whether no rank can have anything in its feedback.
        numel: elements of all gradients.
    """

    def __init__(
        self,
        connection: Connection,
        feedback: Memory,
        tracker: Tracker,
        statistics: Statistics,
        seed: int,
        *,
        clean: bool,
        numel: int,
    ) -> None:
        self.connection, self.seed, self._numel = connection, seed, numel
        self._feedback, self._tracker, self._statistics = feedback, tracker, statistics
        self._asked: Choice | None = None  # the step's choice, as the user wants it
        self._current: Choice  # and as a trial of it does
        self.trial: Trial | None = None
        self._skips = tracker.skips
        self._drift = Drift()
        self._clean = clean
        self._last: Step | None = None
        self._ended: Step | None = None
        #: The choice under which all units are dense and no rank keeps anything.
        self._all_dense: Choice | None = None
        self._was_straight = False

    # -- one step ----------------------------------------------------------------------------------------------------

    def goes_straight(self, number: int, choice: Choice) -> bool:
        """Whether all units of a step are dense and nothing is kept, so that `reduce_straight` does. Alike on all
        ranks."""
        self._await_last()
        if number % LOOK_EVERY == 0 or self._all_dense is None or self.deciding:
            return False
        return self.follow(choice) == self._all_dense

    def reduce_straight(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """The mean, by nothing but an all-reduce in the group that the gradients would take anyway."""
        self._was_straight = True
        statistics, group = self._statistics, self.connection.dense_group
        assert group is not None
        statistics.elements += buffer.numel()
        statistics.dense_bytes += 4 * buffer.numel()
        if group.size > 1:
            statistics.payload_bytes += 4 * buffer.numel()
            statistics.transfer_bytes += 8 * buffer.numel() * (group.size - 1) // group.size
        return outcome(group.all_reduce(buffer.mul_(1.0 / group.size)))

    def begin(self, number: int, choice: Choice) -> Step:
        """A step begins; `greet` must follow."""
        self._await_last()
        self._last = Step(number, self.follow(choice), began=time.perf_counter())
        return self._last

    def _await_last(self) -> None:
        """What a step is depends on how the last one ended; outside of backward nobody has waited for that yet."""
        if self._ended is not self._last:
            self.connection.pipeline.idle()

    def greet(self, step: Step, unit: Unit, saves: int, scaling: Scaling | None) -> None:
        """Compare with the other ranks what the step is to be.

        Args:
            unit: its first.
            saves: how often this rank has saved its part of the state.
            scaling: what the loss scaler has done, as far as this rank knows.
        """
        pipeline, planner = self.connection.pipeline, self.connection.planner
        stages = self._greet(step, unit, saves, scaling)
        if self._tracker.asks(step) or not planner.knows(step.choice):  # what the others say is needed before all else
            pipeline.submit(partial(drive, stages))
        else:
            pipeline.start(stages, unit.nothing, self._statistics.clock(unit.index, unit.device))

    def reduce(self, step: Step, unit: Unit, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Replace a unit's gradients by their mean; the future gets `buffer`."""
        clock = self._statistics.clock(unit.index, buffer.device)
        return self.connection.pipeline.start(self._reduce(step, unit, buffer), buffer, clock)

    def end(self, step: Step) -> None:
        """Every unit of the step has been given to `reduce`."""
        self.connection.pipeline.submit(partial(self._end, step))

    @property
    def deciding(self) -> bool:
        """Whether a trial is going on."""
        return self.trial is not None and self.trial.verdict is None

    def forget(self, seed: int, units: Iterable[Unit]) -> None:
        """Residuals have been loaded: draws and decisions of all units begin again."""
        self.seed, self._clean, self._all_dense = seed, False, None
        for unit in units:
            unit.forget()

    # -- on the pipeline ---------------------------------------------------------------------------------------------

    def _greet(self, step: Step, unit: Unit, saves: int, scaling: Scaling | None) -> Stages:
        """Compare, while the first units may be under way already: what ranks mean differently has no tag in common."""
        try:
            self._announce(step, saves, scaling)
            if not self._tracker.follow(self.connection, step, scaling):
                yield self.connection.announced
                self.connection.compare(step.choice)
            if not self.connection.planner.knows(step.choice):
                # Measuring takes all ranks, which now are known to mean this codec.
                self.connection.planner.learn(step.choice, unit.numel)
        except Exception as error:
            raise self._failure(error, step, f"bucket {unit.index}", step.choice.exchange) from error

    def _announce(self, step: Step, saves: int, scaling: Scaling | None) -> None:
        # Ranks that go straight on tell nothing: if some of them still do, waiting for them must end.
        patience, self._was_straight = HANDSHAKE_TIMEOUT if self._was_straight else None, False
        self.connection.announce(step.number, step.choice, saves, self._drift.changed, scaling, patience)

    def _reduce(self, step: Step, unit: Unit, buffer: Tensor) -> Stages:
        """One unit's way to its mean."""
        choice, number = step.choice, step.number
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        try:
            exchange = self._prepare(unit, choice, number)
            unit.draw[1] = unit.owner_draw[1] = number
            if exchange.collective:  # it must not begin before the other ranks are known to mean it too
                yield self.connection.announced
            grad = unit.gather(buffer)
            sent, kept, owned = self._feed(unit, exchange, grad)
            yield from exchange.reduce(sent, grad, unit.extra, kept, owned, unit.draw, unit.owner_draw)
            exchange.post()
            # Only exchanges that read on the host gain by knowing it, and to count waits for the device.
            reviews = choice.exchange == "auto" and self.connection.pipeline.threaded
            if reviews and number % REVIEW_EVERY == REVIEW_EVERY - 1:
                unit.union = exchange.union_of(grad) or unit.union
            self._feedback.deliver(unit.layout, grad)
            unit.scatter(buffer)
            if self._skips:
                unit.look_for_overflow(buffer)
            step.reduced.append((unit, buffer))
            self._count(unit, exchange)
        except Exception as error:
            name = unit.plan.exchange if unit.plan is not None else choice.exchange
            raise self._failure(error, step, f"bucket {unit.index}", name) from error

    def _feed(self, unit: Unit, exchange: Exchange, grad: Tensor) -> tuple[Tensor, Kept, list[Kept]]:
        """What is to be encoded, what is kept of it, and the same of what this rank encodes for others."""
        assert unit.plan is not None
        if not (unit.plan.feedback and exchange.numel):
            return self._feedback.take(unit.layout, grad), NOTHING, []
        self._clean = False
        kept = self._feedback.of(unit.layout, grad.device)
        return grad, kept, kept.owned(exchange.owned_slices)

    def _prepare(self, unit: Unit, choice: Choice, number: int) -> Exchange:
        """The exchange that serves a unit: decided when its choice changes, and now and then."""
        planner, plan = self.connection.planner, unit.plan
        if plan is None or unit.choice != choice or (choice.exchange == "auto" and number % REVIEW_EVERY == 0):
            numel = layout_numel(unit.layout)
            plan, why = planner.plan(choice, numel, unit.union, max(1, round(self._numel / max(1, numel))))
            unit.choice = choice
            trial = "" if self.trial is None else str(self.trial)
            self._statistics.decisions[unit.index] = f"{plan.exchange} of {plan.codec}: {why}{trial}"
        return unit.prepare(plan, planner.topology, self.seed)

    def _count(self, unit: Unit, exchange: Exchange) -> None:
        statistics = self._statistics
        statistics.elements += unit.numel
        statistics.dense_bytes += 4 * unit.numel
        statistics.payload_bytes += exchange.payload_bytes
        statistics.transfer_bytes += exchange.transfer_bytes

    def _end(self, step: Step) -> None:
        try:
            self._judge(step, time.perf_counter() - step.began)
            units = [unit for unit, _ in step.reduced]
            counts = [unit.new_status() for unit in units]
            self._statistics.skipped_entries += sum(skipped for skipped, _ in counts)
            # A GradScaler waits for the GPU at every step anyway. The means are the same on all ranks, and so is this.
            skips = self._skips
            not_finite = any(unit.overflowed() for unit in units) if skips else any(n for _, n in counts)
            self._statistics.nonfinite_steps += not_finite
            self._statistics.steps += 1
            step.undone = self._tracker.ended(not_finite)
            dense = self._feedback.strategy.only_residual and all(
                unit.goes_dense(step.choice, self._clean) for unit in units
            )
            self._all_dense = step.choice if dense and self.connection.dense_group is not None else None
            for unit in units if self._all_dense is not None else ():
                self._feedback.let_go(unit.layout)
            self._ended = step
            self.connection.post()
        except Exception as error:
            raise self._failure(error, step, "at its end", step.choice.exchange) from error

    def _judge(self, step: Step, span: float) -> None:
        """Tell the trial what the step took. A collective at the end of its turns, and when the network has changed."""
        trial, asked, planner = self.trial, self._asked, self.connection.planner
        if trial is None or asked is None:
            return
        if trial.verdict is None:
            served = [(layout_numel(u.layout), u.union, u.plan) for u, _ in step.reduced if u.plan is not None]
            trial.end_step(span, lambda: planner.rival(asked, served), self.connection.agreed)
            if trial.verdict is None:
                return
            self._drift.restart()
        else:
            self._drift.observe(span)
            if not self.connection.drifted:
                return
            planner.recalibrate()
            self.trial = Trial()
            self._drift.restart()
        for unit, _ in step.reduced:
            unit.choice = None  # decide again, by the verdict

    # ----------------------------------------------------------------------------------------------------------------

    def follow(self, choice: Choice) -> Choice:
        """What a step of this choice is, as a trial wants it."""
        if choice != self._asked:
            self._asked = self._current = choice
            tried = self.connection.pipeline.threaded and self.connection.planner.undecided(choice)
            self.trial = Trial() if tried else None
        if self.trial is not None and self.trial.way != self._current.way:
            self._current = replace(choice, way=self.trial.way)
        return self._current

    @staticmethod
    def _failure(error: Exception, step: Step, where: str, exchange: str) -> RuntimeError:
        return RuntimeError(f"gradwire: {error} [step {step.number}, {where}, {step.choice.codec}, {exchange}]")
