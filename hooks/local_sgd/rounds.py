"""Rounds: differences out, means in, and the outer step. Where ranks come and go, a round that fails is repeated among
those that are left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from ...compress.codecs.cast import Identity
from ...compress.feedback.store import FeedbackStore
from ..auto.planner import Choice
from ..comm.linger import linger
from ..core.reducer import Reducer
from ..timeouts import LEAVE_SECONDS
from ..training.autograd_end import waited
from .healing import Call, DueRound, Progress
from .initial_sync import thawed
from .options import LocalOptions
from .outer_sgd import GlobalParameters, InFlightRound
from .replicas import Arrival, Replicas
from .schedule import Schedule

#: The choice of a round that sends what residuals hold, too.
UNCOMPRESSED = Choice(Identity(), "dense", False)


class RoundRunner:
    """Runs the rounds of one rank, one at a time.

    Args:
        model: the rank's own, and its parameters that are trained.
        fragments: the global parameters, bucket by bucket.
        options: the codec and its like.
        schedule: H, and the rounds' options.
        feedback: the residuals.

    Attributes:
        reducer: of the ranks that are there; None: closed.
        replicas: the tie to ranks that come and go; None: ranks stay.
        number: number of rounds so far.
        progress: this rank's steps.
        under_way: the round in flight, if any.
        interruption: an exception of a signal handler during a wait, until the step is complete.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[Tensor],
        fragments: Sequence[Sequence[GlobalParameters]],
        options: LocalOptions,
        schedule: Schedule,
        feedback: FeedbackStore,
    ) -> None:
        self.every = [shared for fragment in fragments for shared in fragment]
        self._fragments, self._model, self._trained, self._options = fragments, model, list(trained), options
        self._schedule, self._feedback = schedule, feedback
        self.reducer: Reducer | None = None
        self.replicas: Replicas | None = None
        self.number, self.progress = 0, Progress(0, 0)
        self.under_way: InFlightRound | None = None
        self._counted = 0  # this rank's steps that rounds have counted
        self.interruption: BaseException | None = None

    def join(self, replicas: Replicas) -> None:
        """Join the replicas that train, and take over their state."""
        self.replicas = replicas
        self.follow(replicas.join())

    def check_open(self) -> None:
        """Raise RuntimeError after `close`."""
        if self.reducer is None:
            raise RuntimeError("this LocalUpdates is closed: make another, and load its state_dict() there")

    def load(self, number: int, progress: Progress, under_way: InFlightRound | None) -> None:
        """Go on from a checkpoint, whose residuals have been loaded."""
        self.number, self.progress, self.under_way = number, progress, under_way
        self.running.forget(self._options.seed, (shared.bucket for shared in self.every))
        if self.replicas is not None:
            self.replicas.loaded(number)

    @property
    def interrupted(self) -> bool:
        """True if the round in flight cannot be completed among the ranks that are there."""
        return self.replicas is not None and self.replicas.interrupted

    @property
    def running(self) -> Reducer:
        self.check_open()
        assert self.reducer is not None
        return self.reducer

    def send(self, parts: Sequence[GlobalParameters], keep_local: bool, uncompressed: bool = False) -> bool:
        """Start to exchange this rank's differences from the global parameters. Returns False, and sends nothing, where
        this replica has fallen behind: it then has the others' state.

        Args:
            keep_local: go on from the global parameters at once.
            uncompressed: send all that residuals hold, too.
        """
        if self.under_way is not None:  # from a checkpoint with another schedule
            self.apply(self._schedule.rounds.mixing)
        self._check_thawed()
        return self._send(InFlightRound(list(parts), [], [], 0, keep_local, None, uncompressed))

    def _send(self, sent: InFlightRound) -> bool:
        """Send a round, for the first time or again."""
        if self.replicas is not None and not self._enter(self.replicas, sent):
            return False
        reducer, parts = self.running, sent.globals
        pieces = f"{parts[0].bucket.index} to {parts[-1].bucket.index} of {len(self.every)}"
        choice = UNCOMPRESSED if sent.uncompressed else self._options.choice(self.number)
        step = reducer.begin(self.number, choice, {"pieces of the model": pieces})
        self.number += 1
        reducer.announce_step(step, parts[0].bucket, 0, None)
        sent.buffers, sent.futures, former = [], [], sent.copies
        sent.steps = self.progress.steps if former is None else sent.steps
        for index, shared in enumerate(parts):  # the first is in flight while the next difference is computed
            if former is None:
                buffer = shared.difference(restart=sent.keep_local)
            else:
                buffer = shared.difference_again(former[index])
            if sent.keep_local and self.replicas is not None and former is None:
                sent.copies = [*(sent.copies or ()), buffer.clone()]
            sent.buffers.append(buffer)
            sent.futures.append(reducer.reduce(step, shared.bucket, buffer))
        reducer.end(step)
        if sent.step is None:
            sent.due = self.progress.count + self._schedule.rounds.delay
        sent.step = step
        self.under_way = sent
        return True

    def apply(self, mixing: float = 0.0) -> None:
        """Wait for the round in flight, and make the outer step."""
        done = self.arrived()
        if done is None:
            return
        self.under_way = None
        if done.step is not None:
            done.step.reduced.clear()  # else the buffers would live until the next round
        refused = any(bool(shared.bucket.overflow) for shared in done.globals)
        if self.replicas is not None:  # on one of its ranks: on all
            refused = not self.replicas.completed(not refused)
        if refused:
            self._feedback.rollback()
        else:
            for shared, mean in zip(done.globals, done.buffers, strict=True):
                shared.move(mean, mixing, done.keep_local)
                if self.replicas is not None and done.step is not None:
                    shared.keep(mean)
            self._feedback.commit()
            self._counted = max(self._counted, done.steps)
        if self.replicas is not None and done.step is not None:
            self.replicas.applied(self.number)
        if refused:
            self._refuse(done)

    def arrived(self) -> InFlightRound | None:
        """The round in flight, after a wait for its means; None where the others have gone on without this replica,
        which then has their state."""
        while (sent := self.under_way) is not None:
            failure = RuntimeError("another rank of this replica has failed in this round")
            here = False
            try:
                self._await_means(sent)
                here = True
            except RuntimeError as error:
                if self.replicas is None or sent.step is None:
                    raise
                if isinstance(error.__cause__, ValueError):  # it would fail again: `close` must not wait for it
                    self.under_way = None
                    raise
                failure = error
            if self.replicas is None or sent.step is None or self.replicas.completed(here):
                return sent
            self.running.session.pipeline.idle()
            sent.futures.clear()  # they hold the failure, and its traceback this round
            self.under_way = None
            try:
                arrival = self.replicas.failed(failure)
            finally:
                del failure  # its traceback holds this frame, and the former view's pipeline
            self.follow(arrival, sent)
            if arrival.healed is None:  # nobody has completed it
                self._send(sent)
        return None

    def _await_means(self, sent: InFlightRound) -> None:
        pipeline = self.running.session.pipeline
        self.interruption = waited(pipeline.wait, lambda _: pipeline.failed) or self.interruption
        for future in sent.futures:  # on a GPU, later kernels on this stream wait for it
            future.wait()

    def finish(self) -> None:
        """Wait until nothing is in flight; the means stay."""
        if self.replicas is None:
            self.running.settle()
        else:
            self.arrived()

    def close(self) -> None:
        """Wait for the round in flight, then release the threads and the connections."""
        if self.replicas is not None:
            if self.under_way is not None:
                with contextlib.suppress(RuntimeError):
                    self.apply()
            linger(LEAVE_SECONDS)  # the others may still wait for this replica's last messages
            self.replicas.close()
        if self.reducer is not None:
            self.reducer.flush()
        self.reducer = None

    def raise_interruption(self) -> None:
        """Raise what a signal's handler has raised during a wait."""
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            raise interruption

    def _check_thawed(self) -> None:
        problem = thawed(self._model, self._trained)
        if problem is not None:  # ranks that are in a round must hear of it, too
            if self.replicas is None:
                self.running.session.pipeline.wait()
                self.running.session.refuse(problem)
            raise ValueError(f"gradwire: {problem}")

    def _refuse(self, done: InFlightRound) -> None:
        """Raise for a mean that is not finite, on all ranks alike, and name the ranks at fault. A collective, where
        ranks stay."""
        first = next((name for shared in done.globals for name in shared.not_finite()), None)
        found = [first] if self.replicas is not None else self.running.session.control.all_gather_object(first)
        whose = "; ".join(f"rank {rank} has NaN or infinity in {name!r}" for rank, name in enumerate(found) if name)
        if self.replicas is not None:
            whose = f"this replica has NaN or infinity in {first!r}" if first else "another replica is at fault"
        raise RuntimeError(
            f"gradwire: the mean of round {self.number - 1} is not finite: "
            f"{whose or f'no parameter is to blame, so the code of {self._options.codec_text} has overflowed'}. The "
            "global parameters and residuals are as before the round: call rewind() on every rank to go on from "
            "there, with an optimizer whose state is finite, or load a checkpoint"
        )

    # -- replicas that come and go -----------------------------------------------------------------------------------

    def look_around(self, replicas: Replicas) -> bool:
        """Between rounds: follow a change of view, if there was one. Returns False where this replica had fallen
        behind, so that its last step is lost."""
        arrival = replicas.arrival()
        if arrival is not None:
            self.follow(arrival)
            if arrival.healed is not None:
                return False
        replicas.tell(self.progress)
        return True

    def _enter(self, replicas: Replicas, sent: InFlightRound) -> bool:
        """Wait for a view to make the next round in. Returns False where this replica has fallen behind."""
        while True:
            progress = replace(self.progress)
            if sent.step is not None:  # it is sent again; this replica has trained on since, by the delay
                progress = Progress(sent.steps, sent.due - self._schedule.rounds.delay)
            synchronises = not progress.count and progress.steps > self._schedule.rounds.sync_until
            call: Call = "consolidate" if sent.uncompressed else "synchronise" if synchronises else "step"
            due = DueRound(replace(progress), call)
            if synchronises:
                progress.count = self._schedule.every  # whoever hears of it is to come with its next step
            replicas.tell(progress, due)
            arrival = replicas.enter(self.number + 1)
            if arrival is None:
                try:
                    theirs = replicas.others_round()
                except RuntimeError as error:
                    arrival = replicas.failed(error)
                else:
                    if theirs is not None:
                        self._join_round(theirs, sent)
                    return True
            self.follow(arrival)
            if arrival.healed is not None:
                return False

    def _join_round(self, theirs: DueRound, sent: InFlightRound) -> None:
        """Send what the others send in their round, whatever this replica's own schedule says."""
        schedule, progress = self._schedule, theirs.progress
        self._counted += progress.steps - self.progress.steps
        self.progress = replace(progress)
        whole = theirs.call != "step" or progress.steps <= schedule.rounds.sync_until
        fragment = None if whole else schedule.fragment(progress.count)
        sent.globals = list(self.every if fragment is None else self._fragments[fragment])
        sent.keep_local = schedule.rounds.keep_local and not whole
        sent.uncompressed = theirs.call == "consolidate"

    @property
    def awaited(self) -> bool:
        """True if the other replicas wait for this one in a round that it has not counted to."""
        return self.replicas is not None and self.replicas.awaited

    def _caught_up(self, theirs: Progress) -> Progress:
        """Where to begin, so that the next round is not later here than at the others, who have made a step meanwhile:
        at the latest with the first step."""
        interval = self._schedule.interval
        if 0 < theirs.steps <= self._schedule.rounds.sync_until:  # each step is a round
            return Progress(theirs.steps - 1, 0)
        count = min(theirs.count + 1, -(-max(1, theirs.count) // interval) * interval - 1)
        return Progress(theirs.steps + count - theirs.count, count)

    def _conclude(self, arrival: Arrival, sent: InFlightRound | None) -> None:
        """A round that failed here was completed elsewhere, with this replica's message."""
        means = [] if arrival.healed is None else arrival.healed.means
        for shared in sent.globals if sent is not None and means else ():
            shared.bucket.conclude(means[shared.bucket.index].to(shared.bucket.device))
        self._feedback.commit()
        self._counted = self._counted if sent is None else sent.steps

    def follow(self, arrival: Arrival, sent: InFlightRound | None = None) -> None:
        """Go on in another view, from the state that its members agree on.

        Args:
            sent: the round that has failed here, if one has.
        """
        assert self.replicas is not None
        if arrival.ending == "counted":
            self._conclude(arrival, sent)
        else:
            self._feedback.rollback()
        # What this replica owed the ranks of the former view for slices that it owned becomes its own residual.
        self._feedback.fold()
        if arrival.healed is not None:
            self.replicas.statistics.own_steps_lost += self.progress.steps - self._counted
            self.replicas.state.take(arrival.healed)
            self.progress = self._caught_up(arrival.progress or Progress(0, 0))
            self._counted = self.progress.steps
        self.number, self.reducer = arrival.name[1], arrival.view.reducer
        self._options.resize(len(arrival.view.members))
        self.running.seed = self._options.seed
        for shared in self.every:
            shared.bucket.disconnect()
        self.replicas.followed(arrival)
