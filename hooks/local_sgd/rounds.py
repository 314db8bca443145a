"""Rounds: differences out, means in, and the outer step. Where ranks come and go, a round that fails is repeated among
those that are left."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import __version__
from ...compress.codecs.cast import Identity
from ...compress.feedback.store import FeedbackStore
from ..auto.planner import Choice
from ..comm import handshake
from ..comm.group import Group
from ..comm.linger import linger
from ..comm.pieces import broadcast
from ..core.bucket import Bucket
from ..core.checkpoint import Checkpoint, idle_names
from ..core.front import Front
from ..core.options import Exclude, check_dtypes, check_whole, excluded_names
from ..core.reducer import Reducer
from ..core.session import Session
from ..core.statistics import Statistics
from ..timeouts import LEAVE_SECONDS
from ..training.names import renamed
from .healing import Call, CommonState, DueRound, Progress
from .initial_sync import check_writable, group_inside, local, ranks_inside, tensors_of, thawed, trainable
from .meeting.options import Meeting
from .options import LocalOptions
from .outer_sgd import (
    REPLICATED_KEYS,
    GlobalParameters,
    InFlightRound,
    OuterSGD,
    check_saved,
    fragments_of,
    replicated,
    restore,
)  # fmt: skip
from .replicas import Arrival, Replicas
from .schedule import RoundRollback, Schedule
from .view import ReplicaStatistics

OWNER = "LocalUpdates"

#: The choice of a round that sends what residuals hold, too.
UNCOMPRESSED = Choice(Identity(), "dense", False)


class RoundRunner(Front):
    """Makes the rounds of one rank, one at a time. Constructing it is a collective.

    Args:
        model, optimizers, outer, exclude: `LocalUpdates`'s.
        options: the codec and its like.
        schedule: H, and the rounds' options.
        group: the ranks; None: replicas come and go.
        meeting: where replicas meet; None: ranks stay.

    Attributes:
        fragments, every: the global parameters, bucket by bucket.
        replicas: the tie to ranks that come and go; None: ranks stay.
        progress: this rank's steps.
        moved: True if ranks may have different parameters.
        under_way: the round in flight, if any.
        interruption: an exception of a signal handler during a wait, until the step is complete.
    """

    _owner, _closed_text = OWNER, f"this {OWNER} is closed: make another, and load its state_dict() there"
    _options: LocalOptions

    @torch.inference_mode(False)  # a step changes what is made here
    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: LocalOptions,
        schedule: Schedule,
        outer: OuterSGD,
        exclude: Exclude | None,
        group: Any,
        meeting: Meeting | None,
    ) -> None:
        self._model, self._options, self._schedule, self._outer, self._group = model, options, schedule, outer, group
        self._parameters: dict[str, Tensor] = {}  # this rank's shards of them, if it shares the model
        self._excluded: frozenset[str] = frozenset()
        self._statistics = statistics = Statistics() if meeting is None else ReplicaStatistics()
        trained: dict[str, nn.Parameter] = {}
        inside, parts = list[int](), list[list[dict[str, Tensor]]]()
        problem: Exception | None = None
        try:
            trained = trainable(model, optimizers)
            self._parameters = {name: local(p) for name, p in trained.items() if local(p).numel()}
            self._device = next(iter(trained.values())).device
            inside = ranks_inside(trained.values(), group)
            schedule.check()
            if not isinstance(outer, OuterSGD):
                raise TypeError(f"outer={outer!r}: expected OuterSGD(lr=…, momentum=…)")
            outer.check(options.strategy)
            options.check(options.world_size)
            check_dtypes(self._parameters)
            check_whole(self._parameters, OWNER)
            check_writable(model)
            if meeting is not None:
                options.check_meeting()
            self._excluded = excluded_names(exclude, trained) & self._parameters.keys()
            parts = fragments_of(self._parameters, schedule.rounds.fragments, schedule.rounds.bucket_cap_mb)
            options.prepare(0, [torch.float32], self._device)
        except Exception as error:  # the other ranks must hear of any error
            problem = error
        within = None if meeting is None else group_inside(inside, problem)
        self._feedback = FeedbackStore(options.strategy, keep_previous=True)
        self._scaler_sync = RoundRollback(self._feedback)
        how: dict[str, Any] = {"clean": False, "numel": sum(p.numel() for p in self._parameters.values())}
        how["speaks"] = not inside or inside[0] == dist.get_rank()
        if meeting is None:
            tensors = [*map(local, model.parameters()), *model.buffers()]
            broadcast(self._meet(problem, **how).session.group, self._device, tensors)
        strategy, index = self._feedback.strategy, count()
        self.fragments = [
            [GlobalParameters(next(index), part, self._excluded, strategy, outer) for part in fragment]
            for fragment in parts
        ]
        self.every = [shared for fragment in self.fragments for shared in fragment]
        self._trained = list(trained.values())
        self.replicas: Replicas | None = None
        self.progress, self.moved = Progress(0, 0), False
        self.under_way: InFlightRound | None = None
        self._counted = 0  # this rank's steps that rounds have counted
        self.interruption: BaseException | None = None
        if isinstance(statistics, ReplicaStatistics) and meeting is not None:
            open_view = partial(view_reducer, self._device, options, self._feedback, self._scaler_sync, statistics, how)
            described = meeting.describe() | self._description()
            state = CommonState(model, self.every)
            self.replicas = Replicas(meeting, described, state, open_view, statistics, within)
            weakref.finalize(self, self.replicas.close)
            self.follow(self.replicas.join())

    def __repr__(self) -> str:
        text = f"{len(self._parameters)} parameters every {self._schedule.every} steps: {self._options.codec_text}"
        done = f"step {self.progress.steps}, round {self.number}"
        return f"<{OWNER} of {text} by {self._options.exchange!r}, {done}>"

    @property
    def number(self) -> int:
        """Number of rounds so far."""
        return self._step

    @property
    def group(self) -> Any:
        """The ranks; None: replicas come and go."""
        return self._group

    @property
    def running(self) -> Reducer:
        """The reducer of the ranks that are there.

        Raises:
            RuntimeError: it is closed.
        """
        return self._running()

    def _description(self) -> dict[str, Any]:
        return {
            "version": __version__,
            **self._options.describe(self._options.world_size),
            "schedule": str(self._schedule),
            "outer optimizer": str(self._outer),
            "the model's parameters": handshake.describe_model(self._parameters, self._excluded),
            "the model's tensors": handshake.describe_model(tensors_of(self._model), ()),
        }

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def saved_by_rank(self) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        return self._checkpoint.of_rank() | replicated(self.every, self.arrived())

    def saved_by_all(self) -> dict[str, Any]:
        """A checkpoint that is the same on all ranks. A collective."""
        return self._checkpoint.mean_over_ranks(self.running.session) | replicated(self.every, self.arrived())

    def load(self, state_dict: dict[str, Any], strict: bool) -> None:
        """Go on from a checkpoint."""
        self._running()
        saved, vectors = self._checkpoint.read(state_dict, strict, REPLICATED_KEYS)
        saved = {**saved, **{what: renamed(saved[what], self._parameters) for what in REPLICATED_KEYS}}
        check_saved(saved, self._parameters, self.every)
        self.finish()
        self._resume(saved, vectors)
        self.moved, self.under_way = bool(saved["moved"]), restore(self.every, saved)
        self.progress = Progress(saved["local_steps"], saved["counted_steps"])
        if self.replicas is not None:
            self.replicas.loaded(self.number)

    def _made_buckets(self) -> list[Bucket]:
        return [shared.bucket for shared in self.every]

    @property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            OWNER, self._options, self._feedback, self._parameters, self._group, self.number,
            zeros=self._parameters, idle=idle_names(() if self._options.keeps_all else self._excluded),
            local_steps=self.progress.steps, counted_steps=self.progress.count, moved=self.moved,
            due=0 if self.under_way is None else self.under_way.due,
        )  # fmt: skip

    # -- a round -----------------------------------------------------------------------------------------------------

    @property
    def interrupted(self) -> bool:
        """True if the round in flight cannot be completed among the ranks that are there."""
        return self.replicas is not None and self.replicas.interrupted

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
        self._step += 1
        reducer.announce_step(step, parts[0].bucket)
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
                self._await(sent)
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

    def _await(self, sent: InFlightRound) -> None:
        self.interruption = self._await_means() or self.interruption
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
        self._flush()
        self._reducer = None

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
        sent.globals = list(self.every if fragment is None else self.fragments[fragment])
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
        self._step, self._reducer = arrival.name[1], arrival.view.reducer
        self._options.resize(len(arrival.view.members))
        self.running.seed = self._options.seed
        for shared in self.every:
            shared.bucket.disconnect()
        self.replicas.followed(arrival)


def view_reducer(
    device: torch.device, options: LocalOptions, feedback: FeedbackStore, scaler_sync: RoundRollback,
    statistics: Statistics, how: dict[str, Any], group: Group,
) -> Reducer:  # fmt: skip
    """Make the reducer of a view, over its group. A collective of the members. It knows no runner, which would live as
    long as the replicas' thread."""
    session = Session(OWNER, group, device, dict, None, entropy_coding=options.entropy_coding)
    return Reducer(session, feedback, scaler_sync, statistics, options.seed, **how)
