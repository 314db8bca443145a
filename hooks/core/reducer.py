"""The data path: a flat gradient in, the ranks' mean out. It knows nothing of who asks: DDP, or anybody else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ...compress.codec import new_draw
from ...compress.feedback.base import NOTHING, Feedback, Kept
from ...compress.feedback.store import Memory
from ...compress.formats.layout import Layout, Packing, end_to_end, layout_numel, runs_between
from ..auto.controller import Tuner
from ..auto.planner import REVIEW_EVERY, Choice, Plan, Planner
from ..comm.group import HANDSHAKE_TIMEOUT, Collective, Port
from ..comm.pipeline import Clock, Stages, clock, drive
from ..comm.readback import Reading
from ..exchanges import Dense, Exchange, Operands, all_finite
from .dense_path import Straight
from .grad_scaler import Scaling, Tracker
from .session import Connection
from .sparse_gradient import Rows
from .statistics import Statistics

#: Where everything is dense, every so many steps one goes the usual way: ranks compare steps, and look for NaN.
LOOK_EVERY = 64
#: Up to so many gradients a step is not worth other threads: what these could do beside backward takes less time than
#: it takes to wake them.
SMALL_NUMEL = 1 << 18


class Unit:
    """What is reduced as one, a bucket of DDP for example: its layout, and the exchange that serves it now, with its
    buffers.

    Args:
        index: tells it from the others, alike on all ranks.
        parameters: whose gradients these are.
        slots: where they lie.
        excluded: names of those that stay as they are, inside the same messages.
        like: a flat gradient.
        strategy: what is kept between steps, where that is more than a residual.
    """

    def __init__(
        self,
        index: int,
        parameters: list[Tensor],
        slots: Layout,
        excluded: frozenset[str],
        like: Tensor,
        strategy: Feedback | None = None,
    ) -> None:
        self.index, self.parameters, self.numel, self.dtype = index, parameters, like.numel(), like.dtype
        self.slots, self.names = slots, frozenset(slot.name for slot in slots)
        kept = tuple(slot for slot in slots if slot.name not in excluded)
        rest = tuple(slot for slot in slots if slot.name in excluded)
        self.layout, self.beside = end_to_end(kept), end_to_end(rest)
        self.extra = torch.zeros(layout_numel(rest), dtype=torch.float32, device=like.device)
        #: Whether what stays as it is goes through the strategy too.
        self.keeps_beside = bool(rest) and strategy is not None and not strategy.only_residual
        # Where some parameters stay dense, the others have to move together first. What adds up means would add up
        # their rounding too.
        wide = strategy is not None and not strategy.only_residual
        dtype = torch.float32 if wide else like.dtype
        moves = bool(rest) or dtype != like.dtype
        self.packed = torch.zeros(layout_numel(kept), dtype=dtype, device=like.device) if moves else None
        if self.packed is not None:
            compressed = runs_between(zip(kept, self.layout, strict=True), self.packed)
            dense = runs_between(zip(rest, self.beside, strict=True), self.extra)
            self.packing = Packing(self.numel, [*compressed, *dense])
        self.choice: Choice | None = None
        self.plan: Plan | None = None
        self.clock: Clock | None = None
        self.exchange: Exchange
        #: What has served before, until ranks are known to have replaced it alike: a rank that has not sends to it, and
        #: a message for memory that is gone would stop those behind it, which say so.
        self.replaced: Exchange | None = None
        self.operands: Operands
        #: What is kept of it, and as of which version of the feedback; None where nothing is, or that is not known.
        self.kept: Kept | None = None
        self.kept_version = -1
        #: How many elements any rank has selected, where a sparse codec's exchange has seen that; else 0.
        self.union = 0
        #: The same, on its way to the host.
        self.counting: Reading | None = None
        self.device = like.device
        #: The result of what has none.
        self.nothing = torch.empty(0, device="cpu")
        #: Whether the last mean was not finite, as DDP gets it, so alike on all ranks; where that is asked for.
        self.overflow: Tensor | None = None

    @property
    def ports(self) -> Sequence[Port | Collective]:
        """Messages to announce between two steps."""
        return self.exchange.ports

    def serves(self, parameters: list[Tensor], like: Tensor) -> bool:
        """Whether DDP's bucket of these parameters still is this one; after a rebuild it may not be."""
        return (
            self.numel == like.numel()
            and self.dtype == like.dtype
            and self.device == like.device
            and len(self.parameters) == len(parameters)
            and all(a is b for a, b in zip(self.parameters, parameters, strict=True))
        )

    def use(self, exchange: Exchange, seed: int, rank: int) -> None:
        """Let an exchange serve from now on."""
        stream = 2 * rank << 32 | self.index
        draws = torch.stack([new_draw(seed, 0, number, self.device) for number in (stream, stream | 1 << 32)])
        self.exchange, self.operands = exchange, Operands(self.extra, self.extra, self.extra, NOTHING, (), *draws)
        stochastic = exchange.codec.stochastic or exchange.codec.of_means().stochastic
        #: Where the draws have their step; None where nothing is drawn.
        self.steps = draws[:, 1] if stochastic else None
        self.kept = None  # nor what owners keep, whose slices are the exchange's
        self.seen = [0, 0]  # of its counts

    def follow(self, plan: Plan, planner: Planner, seed: int) -> None:
        """Let the exchange serve that a plan wants."""
        if self.plan != plan:
            numel, extra = layout_numel(self.layout), self.extra.numel()
            exchange = planner.make(plan, f"{self.index} {numel} {extra} {plan}", self.layout, extra, self.device)
            self.replaced = getattr(self, "exchange", None)
            self.use(exchange, seed, planner.topology.all.rank)
            self.plan = plan

    def reduce(self, buffer: Tensor, feedback: Memory, keeps: bool, step: int) -> Stages:
        """Stages: replace the gradients by their mean.

        Args:
            buffer: where they lie.
            feedback: what compression has left out so far.
            keeps: whether what it leaves out now is kept there; what is there goes out in any case.
            step: of the draws.
        """
        operands = self.operands
        if self.steps is not None:
            self.steps.fill_(step)
        if self.packed is not None:
            self.packing.take(buffer)
        operands.out = grad = buffer if self.packed is None else self.packed
        operands.grad = self._feed(grad, feedback, keeps)
        if self.keeps_beside:
            self.extra.copy_(feedback.take(self.beside, self.extra))
        yield from self.exchange.reduce(operands)
        operands.grad = operands.out = self.extra  # holds nothing between steps
        for port in self.exchange.ports:
            port.post()
        if self.kept is not None:
            self.kept.deliver(grad)
        else:
            feedback.deliver(self.layout, grad)
        if self.keeps_beside:
            feedback.deliver(self.beside, self.extra)
        if self.packed is not None:
            self.packing.put(buffer)

    def _feed(self, grad: Tensor, feedback: Memory, keeps: bool) -> Tensor:
        """What is to be encoded; puts what is kept, and what this rank keeps for others, among the operands."""
        operands = self.operands
        if not keeps:
            self.kept, operands.feedback, operands.owned = None, NOTHING, ()
            return feedback.take(self.layout, grad)
        if self.kept is None or self.kept_version != feedback.version:
            self.kept = operands.feedback = kept = feedback.of(self.layout, grad.device)
            operands.owned = kept.owned(self.exchange.owned_slices)
            self.kept_version = feedback.version
        return grad

    def goes_dense(self, choice: Choice, clean: bool) -> bool:
        """Whether nothing but a float32 all-reduce of the buffer serves it, for good by this choice.

        Args:
            clean: whether no rank can have kept anything back; else the last mean tells.
        """
        if self.dtype != torch.float32 or self.choice != choice or not isinstance(self.exchange, Dense):
            return False
        return clean or self.exchange.settled

    def forget(self) -> None:
        """Draws and predictions begin again."""
        self.plan = self.choice = None


class Held(torch.futures.Future[Tensor]):
    """Of a unit that waits for the norm of all gradients: a hook that waited for it would never give the others."""

    held = True

    def wait(self) -> Tensor:
        if self.held:
            raise RuntimeError(
                "gradwire: clip scales all gradients by their norm, so that no mean is there before the last bucket "
                "has been given to the hook: return the future, or what its then() gives, instead of waiting for it, "
                "or leave clip out"
            )
        return super().wait()


@dataclass(eq=False)
class Counts:
    """What a step's exchanges have counted, on its way to the host: rows of two, `Exchange.counts` of each unit, and
    how many means were not finite.

    Attributes:
        rows_finite: whether the means of sparse gradients were.
        seen: what each unit had counted before, and in how many rows it counts.
    """

    step: Step
    rows_finite: bool
    seen: list[tuple[list[int], int]]
    reading: Reading

    @classmethod
    def of(cls, step: Step, memory: Tensor | None) -> Counts:
        """Begin to read. Args: as of `Reading`."""
        units = [unit for unit, _ in step.reduced]
        counts = [unit.exchange.counts() for unit in units]
        rows = [row for found in counts for row in found]
        overflows = [unit.overflow.long() for unit in units if unit.overflow is not None]
        if overflows:
            rows.append(torch.stack(overflows).sum().expand(2))
        numbers = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.int64, device="cpu")
        finite = all(gradient.finite for gradient in step.rows)
        seen = [(unit.seen, len(found)) for unit, found in zip(units, counts, strict=True)]
        return cls(step, finite, seen, Reading(numbers, memory))

    def read(self) -> tuple[int, bool]:
        """Entries skipped, and whether anything was not finite. Once."""
        numbers, skipped, broken, first = self.reading.read(), 0, 0, 0
        for seen, length in self.seen:
            now = [sum(column) for column in zip(*numbers[first : first + length], strict=True)]
            skipped, broken = skipped + now[0] - seen[0], broken + now[1] - seen[1]
            seen[:], first = now, first + length
        if len(numbers) > first:  # of the means themselves, which a scaler goes by
            broken = numbers[-1][0]
        return skipped, bool(broken) or not self.rows_finite


@dataclass(eq=False)
class Step:
    """One reduction of all gradients: its number, its choice, whose gradients have been submitted, and the units
    reduced so far, with the buffers that hold their means."""

    number: int
    choice: Choice
    #: What ranks must have done alike before it began, as `Connection` has it, and what else must be equal.
    past: Mapping[str, str]
    names: set[str] = field(default_factory=set)
    reduced: list[tuple[Unit, Tensor]] = field(default_factory=list)
    #: Sparse gradients reduced so far.
    rows: list[Rows] = field(default_factory=list)
    #: Units that wait for the norm of all gradients, and the norms of theirs.
    held: list[tuple[Unit, Tensor, torch.futures.Future[Tensor]]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    #: By what this rank's gradients have been multiplied to have a norm that is allowed; None: they have not been.
    factor: Tensor | None = None
    #: Whether gradients of this rank go in, and not zeros in the place of a rank that has joined.
    own: bool = True
    #: Whether means are of the ranks alone that have not joined, and how many ranks there are for each of those.
    of_present: bool = False
    share: float = 1.0
    #: Learns from the device whether the scaler will skip it, as long as that is not known.
    learn: Callable[[], None] | None = None
    #: Whether its owner has got all of its means, or never will.
    settled: bool = False
    began: float = 0.0
    _undone: bool = False

    def let_go(self) -> None:
        """Keep no buffers: the means have been taken."""
        self.reduced = [(unit, buffer[:0].clone()) for unit, buffer in self.reduced]

    @property
    def undone(self) -> bool:
        """Whether the scaler will skip it. Waits for the device where only that knows."""
        if self.learn is not None:
            self.learn()
        return self._undone

    @undone.setter
    def undone(self, undone: bool) -> None:
        self._undone, self.learn = undone, None


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
        self.tuner = Tuner(connection.planner, connection.pipeline.threaded, connection.averaged)
        self._skips = tracker.skips
        self._clean = clean
        #: Whether the last step had few gradients, and none that wait for what others say before they go.
        self._small = False
        self._last: Step | None = None
        self._ended: Step | None = None
        #: The choice under which all units are dense and no rank keeps anything.
        self._all_dense: Choice | None = None
        self._dense_units: list[Unit] = []
        #: What has served the last steps without the pipeline, if they went so.
        self._straight: Straight | None = None
        #: Whether that was given up before its end, which other ranks may not have done.
        self._left_early = False
        #: What the last step has counted, until the host learns of it: on a GPU a step later.
        self._counts: Counts | None = None
        #: Memory on the host for that.
        self._counted: Tensor | None = None

    # -- one step ----------------------------------------------------------------------------------------------------

    def straight(self, number: int, choice: Choice, until: int, device: torch.device, seen: bool) -> Straight | None:
        """Where all units are dense and nothing is kept: what serves the steps from this one on. Alike on all ranks.

        Args:
            number, choice: of the next step.
            until, device, seen: of `Straight`; the step in which ranks look whether all is well comes first.
        """
        self._await_last(number)
        group = self.connection.dense_group
        if number % LOOK_EVERY == 0 or self._all_dense is None or group is None:
            return None
        if self.tuner.follow(choice) != self._all_dense or not self.tuner.straight:
            return None
        last, self._dense_units = self._dense_units, []
        for unit in last:  # not before it is known what has become of their means
            self._feedback.let_go(unit.layout)
        until = min(until, number - number % LOOK_EVERY + LOOK_EVERY, number + self.tuner.straight)
        self._straight = Straight(group, device, until, seen, self._statistics)
        return self._straight

    def raised(self, number: int, sums: int) -> None:
        """A backward pass has raised in a step that went straight, after so many sums: what one rank has not begun, the
        others would make of the next step's. So that goes the usual way, in which ranks compare."""
        self._all_dense = None
        self.connection.raised(number, [f"bucket {place}" for place in range(sums)])

    def begin(self, number: int, choice: Choice, alike: Mapping[str, str] | None = None) -> Step:
        """A step begins; `greet` must follow.

        Args:
            alike: what else must be equal on all ranks, by the name to complain with.
        """
        self._await_last(number)
        self._all_dense = None
        past = self.connection.past() if alike is None else {**self.connection.past(), **alike}
        self._last = Step(number, self.tuner.follow(choice), past, began=time.perf_counter())
        self.connection.begin()
        return self._last

    def _await_last(self, number: int) -> None:
        """What a step is depends on how the last one ended; outside of backward nobody has waited for that yet."""
        if self._ended is not self._last:
            self.connection.pipeline.idle()
        straight, self._straight = self._straight, None
        if straight is not None:
            self._left_early = number != straight.until
            self.tuner.went_straight(straight.steps, straight.spans)

    def greet(self, step: Step, unit: Unit | Rows, saves: int, scaling: Scaling | None, at_end: bool = False) -> None:
        """Compare with the other ranks what the step is to be.

        Args:
            unit: its first.
            saves: how often this rank has saved its part of the state.
            scaling: what the loss scaler has done, as far as this rank knows.
            at_end: whether nobody waits for a mean before the step has ended, and then by the pipeline, so that a small
                step can be left to the thread that waits.
        """
        pipeline, planner = self.connection.pipeline, self.connection.planner
        stages = self._greet(step, unit, saves, scaling)
        asks = self._tracker.asks(step) or not planner.knows(step.choice)
        pipeline.defer(at_end and self._small and not asks)
        if asks:  # what the others say is needed before all else
            pipeline.submit(partial(drive, stages))
        else:
            pipeline.start(stages, unit.nothing, self._clock(unit))

    def rows(self, index: int, name: str, parameter: Tensor) -> Rows:
        """What `reduce` takes for a parameter whose gradients are sparse. All ranks ask for the same, as often."""
        return Rows(index, name, parameter, self.connection.planner.topology.all.channel(f"rows of {name}"))

    def reduce(self, step: Step, unit: Unit | Rows, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Replace a unit's gradients by their mean; the future gets `buffer`."""
        clips = self._feedback.strategy.largest_norm is not None and isinstance(unit, Unit)
        future = self.connection.pipeline.new_future(Held if clips else torch.futures.Future)
        if isinstance(unit, Rows):
            stages = self._reduce_rows(step, unit, buffer)
            return self.connection.pipeline.start(stages, buffer, self._clock(unit), future)
        if not isinstance(future, Held):
            self._start(step, unit, buffer, future)
        else:
            step.held.append((unit, buffer, future))
            step.norms.append(torch.linalg.vector_norm(buffer, dtype=torch.float32))
            # In a static graph's first pass DDP waits for the means before anybody can tell that it is over.
            if sum(other.numel for other, *_ in step.held) == self._numel:
                self._clip(step)
        return future

    def _start(self, step: Step, unit: Unit, buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
        if isinstance(future, Held):
            future.held = False
        self.connection.pipeline.start(self._reduce(step, unit, buffer), buffer, self._clock(unit), future)

    def end(self, step: Step) -> None:
        """Every unit of the step has been given to `reduce`."""
        if step.held:
            self._clip(step)
        self.connection.pipeline.submit(partial(self._end, step))

    def _clip(self, step: Step) -> None:
        """The norm of this rank's own gradient is known: scale it to what the strategy allows, and let it go."""
        limit, norm = self._feedback.strategy.largest_norm, torch.stack(step.norms).double().norm()
        assert limit is not None
        scale = self._tracker.loss_scale.scale
        factor = (limit * (1.0 if scale is None else scale) / norm).clamp(max=1.0)
        step.factor = factor = torch.where(norm.isfinite(), factor, 1.0)  # what is not finite is not to spread
        for unit, buffer, future in step.held:
            if factor.is_cuda or float(factor) < 1.0:
                buffer.mul_(factor)
            self._start(step, unit, buffer, future)
        step.held.clear()

    def flush(self) -> None:
        """Wait for all that has been submitted, and for what the device has to tell of it."""
        self.connection.pipeline.flush()
        self._learn()

    def close(self) -> None:
        """As `flush`; then its threads end. It is not used again."""
        self.flush()
        self.connection.pipeline.end()

    def settle(self) -> None:
        """As `flush`; raises what has failed."""
        self.connection.pipeline.wait()
        self.flush()

    def forget(self, seed: int, units: Iterable[Unit | Rows]) -> None:
        """Residuals have been loaded: draws and decisions of all units begin again."""
        self.seed, self._clean, self._all_dense = seed, False, None
        self.connection.loaded(seed)
        for unit in units:
            unit.forget()

    # -- on the pipeline ---------------------------------------------------------------------------------------------

    def _greet(self, step: Step, unit: Unit | Rows, saves: int, scaling: Scaling | None) -> Stages:
        """Compare, while the first units may be under way already: what ranks mean differently has no tag in common."""
        left_early, self._left_early = self._left_early, False
        try:
            if self._skips:
                self._learn()
            # Ranks that go straight on tell nothing: if some of them still do, waiting for them must end.
            patience = HANDSHAKE_TIMEOUT if left_early else None
            changed = self.tuner.changed
            told = step.number, step.choice, step.past, saves, changed, scaling, patience
            self.connection.announce(*told, not step.own)
            if not self._tracker.follow(self.connection, step, scaling):
                yield self.connection.announced
                self.connection.compare(step.choice, step.past)
            if not self.connection.planner.knows(step.choice):
                # Measuring takes all ranks, which now are known to mean this codec.
                self.connection.planner.learn(step.choice, max(1, min(unit.numel, self._numel)))
        except Exception as error:
            if left_early and not isinstance(error, ValueError) and self.connection.dense_group is not None:
                self.connection.dense_group.cut()  # or they would wait there for this rank
            raise self._failure(error, step, f"bucket {unit.index}", step.choice.exchange) from error

    def _reduce(self, step: Step, unit: Unit, buffer: Tensor) -> Stages:
        """One unit's way to its mean."""
        choice, number = step.choice, step.number
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        try:
            self._prepare(unit, choice, number)
            assert unit.plan is not None
            if unit.exchange.collective:  # it must not begin before the other ranks are known to mean it too
                yield self.connection.announced
            keeps = unit.plan.feedback and unit.exchange.numel > 0
            self._clean &= not keeps
            yield from unit.reduce(buffer, self._feedback, keeps, number)
            if step.of_present:
                yield self.connection.announced
                step.share = self.connection.share()
                buffer.mul_(step.share)
            if choice.exchange == "auto" and number % REVIEW_EVERY == REVIEW_EVERY - 1:
                union = unit.exchange.union_of(buffer if unit.packed is None else unit.packed)
                unit.counting = None if union is None else Reading(union.view(1, 1))
            if self._skips:
                unit.overflow = ~all_finite(buffer)
            step.reduced.append((unit, buffer))
            self._count(unit)
        except Exception as error:
            name = unit.plan.exchange if unit.plan is not None else choice.exchange
            raise self._failure(error, step, f"bucket {unit.index}", name) from error

    def _reduce_rows(self, step: Step, rows: Rows, grad: Tensor) -> Stages:
        """The way of a sparse gradient."""
        try:
            if rows.collective:
                yield self.connection.announced
            carrier, statistics = rows.carrier, self._statistics
            sent, received = carrier.sent, carrier.received
            yield from rows.reduce(grad, self.connection.planner.network)
            if step.of_present:
                yield self.connection.announced
                grad.mul_(self.connection.share())
            step.rows.append(rows)
            statistics.elements += rows.numel
            statistics.dense_bytes += 4 * rows.numel
            statistics.payload_bytes += carrier.sent - sent
            statistics.transfer_bytes += carrier.received - received
            statistics.decisions[rows.index] = f"{rows.algorithm} of rows"
        except Exception as error:
            raise self._failure(error, step, f"bucket {rows.index}", "rows") from error

    def _prepare(self, unit: Unit, choice: Choice, number: int) -> None:
        """Let a unit have its exchange: decided when its choice changes, and now and then."""
        plan = unit.plan
        if plan is None or unit.choice != choice or (choice.exchange == "auto" and number % REVIEW_EVERY == 0):
            planner, numel = self.connection.planner, layout_numel(unit.layout)
            if unit.counting is not None:  # since an earlier step
                unit.union, unit.counting = unit.counting.read()[0][0] or unit.union, None
            plan, why = planner.plan(choice, numel, unit.union, max(1, round(self._numel / max(1, numel))))
            unit.choice = choice
            self._statistics.decisions[unit.index] = f"{plan.exchange} of {plan.codec}: {why}{self.tuner}"
            unit.follow(plan, planner, self.seed)

    def _clock(self, unit: Unit | Rows) -> Clock:
        if unit.clock is None:
            unit.clock = clock(self._statistics.seconds, unit.index, unit.device)
        return unit.clock

    def _count(self, unit: Unit) -> None:
        statistics = self._statistics
        statistics.elements += unit.numel
        statistics.dense_bytes += 4 * unit.numel
        statistics.payload_bytes += unit.exchange.payload_bytes
        statistics.transfer_bytes += unit.exchange.transfer_bytes

    def _end(self, step: Step) -> None:
        try:
            units = [unit for unit, _ in step.reduced]
            self._learn()
            self._counts = Counts.of(step, self._counted)
            if any(unit.device.type == "cuda" for unit in units):
                step.learn = self._learn if self._skips else None
            else:
                self._learn()
            self._statistics.steps += 1
            for unit in units:
                unit.replaced = None
            parts: list[Unit | Rows] = [*units, *step.rows]
            for port in [port for part in parts for port in part.ports]:
                port.post()
            self.connection.post()
            self.connection.end()
            span, served = time.perf_counter() - step.began, partial(self._served, step)
            if self.tuner.ended(span, served, self.connection.drifted):
                for unit in units:
                    unit.choice = None
            few = self._numel <= SMALL_NUMEL and not step.rows
            self._small = few and not any(unit.exchange.collective for unit in units)
            dense = (
                self._feedback.strategy.only_residual
                and not step.rows
                and all(unit.goes_dense(step.choice, self._clean) for unit in units)
            )
            if dense and self.connection.dense_group is not None:
                self._all_dense, self._dense_units = step.choice, units
            self._ended = step
        except Exception as error:
            raise self._failure(error, step, "at its end", step.choice.exchange) from error

    def _learn(self) -> None:
        """What the last step has counted is known: count it, and undo the step if a scaler skips it."""
        counts, self._counts = self._counts, None
        if counts is None:
            return
        skipped, not_finite = counts.read()
        self._counted = counts.reading.memory
        self._statistics.skipped_entries += skipped
        self._statistics.nonfinite_steps += not_finite
        counts.step.undone = self._tracker.ended(not_finite)

    @staticmethod
    def _served(step: Step) -> list[tuple[int, int, Plan]]:
        return [(layout_numel(unit.layout), unit.union, unit.plan) for unit, _ in step.reduced if unit.plan is not None]

    @staticmethod
    def _failure(error: Exception, step: Step, where: str, exchange: str) -> RuntimeError:
        return RuntimeError(f"gradwire: {error} [step {step.number}, {where}, {step.choice.codec}, {exchange}]")
