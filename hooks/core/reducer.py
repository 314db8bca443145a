"""The data path: a flat gradient in, the ranks' mean out. It does not know its callers, DDP or others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ...compress.backends import all_finite
from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import layout_numel
from ..auto.controller import Controller
from ..auto.planner import REPLAN_INTERVAL, Choice, Plan
from ..comm.ports import Stages, drive, saved_by
from ..comm.readback import Readback
from ..comm.tasks import Clock
from ..timeouts import HANDSHAKE_TIMEOUT
from ..training.grad_scaler import ScalerSync, Scaling
from .bucket import Bucket, clock
from .dense_path import DensePath
from .report import report, tell
from .session import Session
from .sparse_gradient import SparseGradient
from .statistics import Statistics

#: Steps from one dense step that takes the pipeline to the next: there ranks compare steps, and look for NaN.
DENSE_CHECK_INTERVAL = 64


def plans_again(choice: Choice, number: int) -> bool:
    """True if "auto" plans again before this step."""
    return number % (DENSE_CHECK_INTERVAL if choice.codec.lossless else REPLAN_INTERVAL) == 0


class ClipFuture(torch.futures.Future[Tensor]):
    """Future of a bucket that waits for the norm of all gradients: a hook that waited for it would deadlock."""

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
class StepCounters:
    """Counts of a step's exchanges on their way to the host: rows of two numbers, `Exchange.counts` of each bucket, and
    the number of means that were not finite.

    Attributes:
        sparse_finite: True if the means of sparse gradients were finite.
        seen: the earlier counts of each bucket, and its number of rows.
    """

    step: Step
    sparse_finite: bool
    seen: list[tuple[list[int], int]]
    #: On a GPU under way.
    numbers: Readback | Tensor

    @classmethod
    def of(cls, step: Step, memory: Tensor | None) -> StepCounters:
        """Start to read back. `memory` is `Readback`'s."""
        buckets = [bucket for bucket, _ in step.reduced]
        rows = [row for bucket in buckets for row in bucket.counts]
        overflows = [bucket.overflow.long() for bucket in buckets if bucket.overflow is not None]
        if overflows:
            rows.append(torch.stack(overflows).sum().expand(2))
        numbers = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.int64, device="cpu")
        finite = all(gradient.finite for gradient in step.sparse)
        seen = [(bucket.seen, len(bucket.counts)) for bucket in buckets]
        return cls(step, finite, seen, Readback(numbers, memory) if numbers.is_cuda else numbers)

    def read(self) -> tuple[int, bool]:
        """The number of entries skipped, and True if anything was not finite. Called once."""
        numbers: list[list[int]]
        numbers = self.numbers.read() if isinstance(self.numbers, Readback) else self.numbers.tolist()
        skipped, broken, first = 0, 0, 0
        for seen, length in self.seen:
            now = [sum(column) for column in zip(*numbers[first : first + length], strict=True)]
            skipped, broken = skipped + now[0] - seen[0], broken + now[1] - seen[1]
            seen[:], first = now, first + length
        if len(numbers) > first:  # the means themselves decide for a scaler
            broken = numbers[-1][0]
        return skipped, bool(broken) or not self.sparse_finite


@dataclass(eq=False)
class Step:
    """One reduction of all gradients: its number and choice, the names of the parameters submitted so far, and the
    buckets reduced so far with the buffers of their means."""

    number: int
    choice: Choice
    #: What all ranks must have in common at its begin: `Session.history`, and what its owner adds.
    history: Mapping[str, str]
    names: set[str] = field(default_factory=set)
    reduced: list[tuple[Bucket, Tensor]] = field(default_factory=list)
    #: Sparse gradients reduced so far.
    sparse: list[SparseGradient] = field(default_factory=list)
    #: Buckets that wait for the norm of all gradients, and the norm of each.
    held: list[tuple[Bucket, Tensor, torch.futures.Future[Tensor]]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    #: Factor that has brought this rank's gradients to the largest norm allowed; None: not clipped.
    factor: Tensor | None = None
    #: True if this rank contributes gradients; False if it has joined and contributes zeros.
    own: bool = True
    #: True if means are over the ranks that have not joined, and the number of all ranks divided by that of these.
    of_present: bool = False
    share: float = 1.0
    #: Reads from the device whether the scaler will skip the step; None once that is known.
    learn: Callable[[], None] | None = None
    #: True if its owner has got all of its means, or never will.
    settled: bool = False
    #: True once the pipeline has ended it without an error.
    ended: bool = False
    _undone: bool = False

    @property
    def undone(self) -> bool:
        """True if the scaler will skip the step. Waits for the device where only the device knows."""
        if self.learn is not None:
            self.learn()
        return self._undone

    @undone.setter
    def undone(self, undone: bool) -> None:
        self._undone, self.learn = undone, None


class Reducer:
    """Reduces the gradients of one model among the ranks of a session, step by step.

    Args:
        session: the tie to the other ranks.
        feedback: the residuals, by parameter.
        scaler_sync: follows the loss scaler.
        statistics: the counts to add to.
        seed: seed of stochastic rounding.
        clean: no rank can hold a residual.
        numel: number of elements of all gradients.
        speaks: False: another group's first rank says what is sent (`report`).
    """

    def __init__(
        self,
        session: Session,
        feedback: FeedbackStore,
        scaler_sync: ScalerSync,
        statistics: Statistics,
        seed: int,
        *,
        clean: bool,
        numel: int,
        speaks: bool = True,
    ) -> None:
        self.session, self.seed, self._numel = session, seed, numel
        self._feedback, self._scaler_sync, self._statistics = feedback, scaler_sync, statistics
        timed = session.pipeline.threaded or session.planner.device.type == "cuda"
        self.controller = Controller(session.planner, timed, session.averaged)
        #: True if a scaler can skip steps.
        self.skips = scaler_sync.skips
        self._speaks = speaks and session.group.rank == 0
        #: True if a plan has been made in this step.
        self._decided = False
        self._clean = clean
        self._last: Step | None = None
        #: The choice under which all buckets are dense and no rank keeps a residual.
        self._all_dense: Choice | None = None
        self._dense_buckets: list[Bucket] = []
        #: The dense path of the last steps, if they took it.
        self._dense_path: DensePath | None = None
        #: True if this rank left the dense path before its end, which other ranks may not have done.
        self._left_early = False
        #: Counts of the last step until the host has read them: on a GPU a step later.
        self._counts: StepCounters | None = None
        #: Host memory for them.
        self._counted: Tensor | None = None

    @property
    def unsettled(self) -> Step | None:
        """The last step, unless its owner has got all of its means, or never will."""
        return None if self._last is None or self._last.settled else self._last

    # -- one step ----------------------------------------------------------------------------------------------------

    def dense_path(
        self, number: int, choice: Choice, until: int, device: torch.device, futures_observed: bool
    ) -> DensePath | None:
        """The dense path for the steps from this one on, if all buckets are dense and nothing is kept; else None. Alike
        on all ranks.

        Args:
            number, choice: number and choice of the next step.
            until, device, futures_observed: `DensePath`'s; it ends at the latest where ranks compare steps again.
        """
        self._await_last(number)
        group = self.session.dense_group
        if number % DENSE_CHECK_INTERVAL == 0 or self._all_dense is None or group is None:
            return None
        if self.controller.follow(choice) != self._all_dense or not self.controller.dense_steps:
            return None
        last, self._dense_buckets = self._dense_buckets, []
        for bucket in last:  # not before it is known that their means are applied
            self._feedback.let_go(bucket.layout)
        until = min(
            until, number - number % DENSE_CHECK_INTERVAL + DENSE_CHECK_INTERVAL, number + self.controller.dense_steps
        )
        self._dense_path = DensePath(group, device, until, futures_observed, self._statistics, self.controller)
        return self._dense_path

    def raised(self, number: int, sums: int) -> None:
        """A backward pass has raised on the dense path, after `sums` sums: sums that one rank has not begun, the others
        would complete with those of the next step. The next step therefore takes the pipeline, where ranks compare."""
        self._all_dense = None
        self.session.raised(number, [f"bucket {place}" for place in range(sums)])

    def begin(self, number: int, choice: Choice, alike: Mapping[str, str] | None = None) -> Step:
        """Begin a step; `announce_step` must follow.

        Args:
            alike: further values that must be equal on all ranks, by the name for the message.
        """
        self._await_last(number)
        self._all_dense = None
        history = self.session.history() if alike is None else {**self.session.history(), **alike}
        self._last = Step(number, self.controller.follow(choice), history)
        self.session.begin()
        self.controller.begin_timing()
        return self._last

    def _await_last(self, number: int) -> None:
        """Wait for the end of the last step, which the next one depends on; within backward it has been waited for."""
        if self._last is not None and not self._last.ended:
            self.session.pipeline.idle()
        dense_path, self._dense_path = self._dense_path, None
        if dense_path is not None:
            self._left_early = number != dense_path.until
            self.controller.took_dense_path(dense_path.steps)

    def announce_step(
        self, step: Step, bucket: Bucket | SparseGradient, saves: int = 0, scaling: Scaling | None = None
    ) -> None:
        """Compare the step with those of the other ranks.

        Args:
            bucket: its first bucket.
            saves: number of times that this rank has saved its part of the state.
            scaling: the loss scaler's state, as far as this rank knows.
        """
        pipeline, asks = self.session.pipeline, self.skips and self._scaler_sync.asks(step)
        stages = self._announce_step(step, bucket, saves, scaling)
        if asks or self._must_learn(step.choice):  # the step depends on the announcements of the other ranks
            pipeline.submit(partial(drive, stages))
        else:
            pipeline.start(stages, clock=self._clock(bucket))

    def _must_learn(self, choice: Choice) -> bool:
        """True if the choice's plans need a measurement, which is a collective."""
        return choice.exchange == "auto" and not self.session.planner.knows(choice)

    def sparse_gradient(self, index: int, name: str, parameter: Tensor) -> SparseGradient:
        """Make the argument of `reduce` for a parameter with sparse gradients. All ranks must, equally often."""
        return SparseGradient(index, name, parameter, self.session.planner.topology.all.channel(f"rows of {name}"))

    def reduce(self, step: Step, bucket: Bucket | SparseGradient, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Replace a bucket's gradients by their mean; the future gets `buffer`."""
        # A bucket without elements has no part in the norm, and may come after the last that has.
        has_part = isinstance(bucket, Bucket) and bucket.numel > 0 and bucket.of_gradients
        clips = has_part and self._feedback.strategy.largest_norm is not None
        future = self.session.pipeline.new_future(ClipFuture if clips else torch.futures.Future)
        if isinstance(bucket, SparseGradient):
            stages = self._reduce_sparse(step, bucket, buffer)
            return self.session.pipeline.start(stages, buffer, self._clock(bucket), future)
        if not isinstance(future, ClipFuture):
            self._start(step, bucket, buffer, future)
        else:
            step.held.append((bucket, buffer, future))
            step.norms.append(torch.linalg.vector_norm(buffer, dtype=torch.float32))
            # In a static graph's first pass DDP waits for the means before the end of the pass is known.
            if sum(other.numel for other, *_ in step.held) == self._numel:
                self._clip(step)
        return future

    def _start(self, step: Step, bucket: Bucket, buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
        if isinstance(future, ClipFuture):
            future.held = False
        self.session.pipeline.start(self._reduce(step, bucket, buffer), buffer, self._clock(bucket), future)

    def end(self, step: Step) -> None:
        """End a step whose buckets have all been given to `reduce`."""
        if step.held:
            self._clip(step)
        self.session.pipeline.submit(partial(self._end, step))

    def _clip(self, step: Step) -> None:
        """Scale this rank's gradient to the largest norm that the strategy allows, and start its buckets."""
        limit, norm = self._feedback.strategy.largest_norm, torch.stack(step.norms).double().norm()
        assert limit is not None
        scale = self._scaler_sync.loss_scale.scale
        factor = (limit * (1.0 if scale is None else scale) / norm).clamp(max=1.0)
        step.factor = factor = torch.where(norm.isfinite(), factor, 1.0)  # NaN must not spread to other elements
        for bucket, buffer, future in step.held:
            if factor.is_cuda or float(factor) < 1.0:
                buffer.mul_(factor)
            self._start(step, bucket, buffer, future)
        step.held.clear()

    def flush(self) -> None:
        """Wait for all that has been submitted, and for its counts."""
        self.session.pipeline.flush()
        self._read_counts()

    def close(self) -> None:
        """`flush`, and end the threads. The reducer cannot be used again."""
        self.flush()
        self.session.pipeline.end()

    def settle(self) -> None:
        """`flush`, and raise the pipeline's failure, if any."""
        self.session.pipeline.wait()
        self.flush()

    def forget(self, seed: int, buckets: Iterable[Bucket | SparseGradient]) -> None:
        """Begin draws and decisions of all buckets again: residuals have been loaded."""
        self.seed, self._clean, self._all_dense = seed, False, None
        self.session.loaded(seed)
        for bucket in buckets:
            bucket.forget()

    # -- on the pipeline ---------------------------------------------------------------------------------------------

    def _announce_step(
        self, step: Step, bucket: Bucket | SparseGradient, saves: int, scaling: Scaling | None
    ) -> Stages:
        """Compare the step, while its first buckets may be in flight: messages of unequal steps have no common tag."""
        left_early, self._left_early = self._left_early, False
        try:
            if self.skips:
                self._read_counts()
            # Ranks on the dense path announce nothing: the wait for them must end.
            patience = HANDSHAKE_TIMEOUT if left_early else None
            self.session.announce(
                step.number, step.choice, step.history, saves=saves, scaling=scaling, patience=patience,
                drift=self.controller.changed, joined=not step.own,
            )  # fmt: skip
            if not (self.skips and self._scaler_sync.follow(self.session, step, scaling)):
                yield self.session.announced
                self.session.compare(step.choice, step.history)
            if self._must_learn(step.choice):
                # Measuring is a collective, and all ranks are known to use this codec now.
                self.session.planner.learn(step.choice, max(1, self._numel))
        except Exception as error:
            if left_early and not isinstance(error, ValueError) and self.session.dense_group is not None:
                self.session.dense_group.abort()  # or they would wait there for this rank
            raise self._failure(error, step, f"bucket {bucket.index}", step.choice.exchange) from error

    def _reduce(self, step: Step, bucket: Bucket, buffer: Tensor) -> Stages:
        """Stages from a bucket's gradients to their mean."""
        choice, number = step.choice, step.number
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        try:
            self._prepare(bucket, choice, number)
            assert bucket.plan is not None
            if bucket.exchange.collective:  # it must not start before the other ranks are known to start it, too
                yield self.session.announced
            keeps = bucket.plan.feedback and bucket.exchange.numel > 0
            self._clean &= not keeps
            stages, queue = bucket.reduce(buffer, self._feedback, keeps, number), self.session.sends
            yield from queue.in_turn(bucket.index, stages) if queue.ordered else stages
            if step.of_present:
                yield self.session.announced
                step.share = self.session.share()
                buffer.mul_(step.share)
            if choice.exchange == "auto" and self._counts_union(choice, number):
                union = bucket.exchange.union_of(buffer if bucket.packed is None else bucket.packed)
                bucket.counting = None if union is None else Readback(union.view(1, 1))
            if self.skips:
                bucket.overflow = ~all_finite(buffer)
            step.reduced.append((bucket, buffer))
            self._count(bucket)
        except Exception as error:
            name = bucket.plan.exchange if bucket.plan is not None else choice.exchange
            raise self._failure(error, step, f"bucket {bucket.index}", name) from error

    def _counts_union(self, choice: Choice, number: int) -> bool:
        """True if "auto" counts in this step the elements that any rank sends, for its next plan: in the step before
        it, or, where the steps between two plans may be dense and not take the pipeline, in that of a plan."""
        if choice.codec.lossless:
            return plans_again(choice, number) and not self.session.planner.inline
        return plans_again(choice, number + 1)

    def _reduce_sparse(self, step: Step, gradient: SparseGradient, grad: Tensor) -> Stages:
        """Stages from a sparse gradient to its mean."""
        try:
            if gradient.collective:
                yield self.session.announced
            exchanger, statistics = gradient.exchanger, self._statistics
            sent, received = exchanger.sent, exchanger.received
            yield from gradient.reduce(grad, self.session.planner.network)
            if step.of_present:
                yield self.session.announced
                grad.mul_(self.session.share())
            step.sparse.append(gradient)
            statistics.elements += gradient.numel
            statistics.dense_bytes += 4 * gradient.numel
            statistics.bytes_sent += exchanger.sent - sent
            statistics.bytes_received += exchanger.received - received
            self._decided |= gradient.index not in statistics.decisions
            statistics.decisions[gradient.index] = f"{gradient.algorithm} of rows"
        except Exception as error:
            raise self._failure(error, step, f"bucket {gradient.index}", "rows") from error

    def _prepare(self, bucket: Bucket, choice: Choice, number: int) -> None:
        """Plan a bucket's exchange: when its choice changes, and with "auto" from time to time."""
        plan = bucket.plan
        if plan is None or bucket.choice != choice or (choice.exchange == "auto" and plans_again(choice, number)):
            planner, numel = self.session.planner, layout_numel(bucket.layout)
            if bucket.counting is not None:  # since an earlier step
                bucket.union, bucket.counting = bucket.counting.read()[0][0] or bucket.union, None
            plan, bucket.why = planner.plan(choice, numel, bucket.union, max(1, round(self._numel / max(1, numel))))
            bucket.choice, self._decided = choice, True
            self._statistics.decisions[bucket.index] = f"{plan.exchange} of {plan.codec}: {bucket.why}{self.controller}"
            bucket.follow(plan, planner, self.seed)

    def _clock(self, bucket: Bucket | SparseGradient) -> Clock:
        if bucket.clock is None:
            bucket.clock = clock(self._statistics.seconds, bucket.index, bucket.device)
        return bucket.clock

    def _count(self, bucket: Bucket) -> None:
        statistics = self._statistics
        if bucket.of_gradients:
            statistics.elements += bucket.numel
            statistics.dense_bytes += 4 * bucket.numel
        sent_less, received_less = saved_by(bucket.exchange.ports)
        statistics.bytes_sent += bucket.exchange.bytes_sent - sent_less
        statistics.bytes_received += bucket.exchange.bytes_received - received_less

    def _end(self, step: Step) -> None:
        try:
            buckets = [bucket for bucket, _ in step.reduced]
            self._read_counts()
            self._counts = StepCounters.of(step, self._counted)
            if any(bucket.device.type == "cuda" for bucket in buckets):
                step.learn = self._read_counts if self.skips else None
            else:
                self._read_counts()
            self._statistics.steps += 1
            for bucket in buckets:
                bucket.replaced = None
            parts: list[Bucket | SparseGradient] = [*buckets, *step.sparse]
            for port in [port for part in parts for port in part.ports]:
                port.post_receives()
            self.session.post_receives()
            self.session.end()
            if self._decided:
                self._decided = False
                if self._speaks:
                    self._report(step, buckets)
            if self.controller.ended(partial(self._served, step), self.session.drifted):
                for bucket in buckets:
                    bucket.choice = None
            dense = (
                self._feedback.strategy.only_residual
                and not step.sparse
                and all(bucket.goes_dense(step.choice, self._clean) for bucket in buckets)
            )
            if dense and self.session.dense_group is not None:
                self._all_dense, self._dense_buckets = step.choice, buckets
            step.ended = True
        except Exception as error:
            raise self._failure(error, step, "at its end", step.choice.exchange) from error

    def _report(self, step: Step, buckets: list[Bucket]) -> None:
        statistics = self._statistics
        if self.session.group.size == 1:
            tell(statistics, "one rank: nothing is sent")
            return
        numel = sum(bucket.numel for bucket in buckets if bucket.of_gradients)
        size = 4 * numel, sum(bucket.exchange.bytes_sent for bucket in buckets)
        planned = [bucket for bucket in buckets if bucket.plan is not None and bucket.layout]
        plans, why = [plan for bucket in planned if (plan := bucket.plan)], [bucket.why for bucket in planned]
        rows = len(step.sparse)
        report(statistics, step.choice, plans, size, rows=rows, why=why, controller=self.controller)

    def _read_counts(self) -> None:
        """Add the counts of the last step to the statistics, and undo the step if a scaler skips it."""
        counts, self._counts = self._counts, None
        if counts is None:
            return
        skipped, not_finite = counts.read()
        self._counted = counts.numbers.memory if isinstance(counts.numbers, Readback) else None
        self._statistics.skipped_entries += skipped
        self._statistics.nonfinite_steps += not_finite
        counts.step.undone = self.skips and self._scaler_sync.ended(not_finite)

    @staticmethod
    def _served(step: Step) -> list[tuple[int, int, Plan]]:
        return [
            (layout_numel(bucket.layout), bucket.union, bucket.plan)
            for bucket, _ in step.reduced
            if bucket.plan is not None
        ]

    @staticmethod
    def _failure(error: Exception, step: Step, where: str, exchange: str) -> RuntimeError:
        return RuntimeError(f"gradwire: {error} [step {step.number}, {where}, {step.choice.codec}, {exchange}]")
