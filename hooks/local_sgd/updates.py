"""Periodic synchronisation: every rank trains its own model, and ranks exchange their progress every H steps.

A round: differences out, means in, and the outer step. Where ranks come and go, a round that fails is repeated among
those that are left.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import __version__
from ...compress.codec import Codec
from ...compress.codecs.cast import Identity
from ...compress.feedback.base import Feedback
from ...compress.feedback.store import FeedbackStore
from ..auto.planner import Choice
from ..comm import handshake
from ..comm.between_steps import between_steps, undivided
from ..comm.group import Group
from ..comm.linger import linger
from ..comm.pieces import broadcast
from ..comm.untraced import untraced
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
from .options import Aggregate, LocalExchange, LocalOptions, meeting_of, modern
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
from .schedule import RoundRollback, Rounds, Schedule
from .skipped import StepCounter
from .step_lengths import StepLengths
from .view import ReplicaStatistics

OWNER = "LocalUpdates"
#: A checkpoint's key of the state of `StepLengths`.
LENGTHS = "step_lengths"

#: The choice of a round that sends what residuals hold, too.
UNCOMPRESSED = Choice(Identity(), "dense", False)


class LocalUpdates(Front):
    """Local SGD and its descendants: each rank trains its own model with its own optimizer. Every `every` steps all
    ranks exchange Δ = θ0 - θ, the difference between the global parameters and their own. A round is

        e = β·e + Δ;  send the code of e, keep in e what it leaves out;  ū = the ranks' mean
        m = μ·m + ū;  θ0 = θ0 - lr·(ū + μ·m)  (nesterov; else lr·m, and lr·ū without momentum);  θ = θ0

    which is local SGD as it stands (Stich, ICLR 2019), post-local SGD with `Rounds(sync_until=…)` (Lin et al., ICLR
    2020), DiLoCo with `OuterSGD(lr=0.7, momentum=0.9)` (Douillard et al., 2023), Streaming DiLoCo with
    `Rounds(fragments=…, delay=…, mixing=…)` (Douillard et al., 2025), and SparseLoCo with `ChunkedTopK`,
    `exchange="gather"` and `error_feedback=Residual(decay=0.95)` (Sarfi et al., 2025), as its code has it with
    `exchange=Aggregate(mean="senders", clip="median")`. With `Rounds(keep_unsent=True)` θ = θ0 - e (Xu et al., 2021),
    and with `Rounds(lengthen_steps=True)` local steps are as long as those of one optimizer on the mean gradient.

        updates = LocalUpdates(model, optimizer, codec, every=30)
        for batch in data:
            loss(model(batch)).backward(); optimizer.step(); optimizer.zero_grad()
            updates.step()

    Inside `with updates:` the optimizer's steps are counted without calls of `step`, including steps that a GradScaler
    skips; of several optimizers, such as Muon for matrices and AdamW for the rest, a step has one of each.
    Constructing it is a collective: ranks compare options and parameters, and all start from the first rank's
    parameters and buffers, as in DDP. Later on the optimizers' state and buffers, such as BatchNorm's statistics, stay
    each rank's own.

    θ0 and e are float32, whatever the parameters are. Memory: 4 bytes an element for θ0, 4 for the momentum, where
    there is one, 8 where a residual is kept (4 or 2 by `Residual(dtype=…)`), and 4 for Δ.

    Args:
        model: each rank's own, not in DDP; float32, float16 or bfloat16, on one device. Parameters that do not require
            gradients are made equal at the start, and then left alone; requiring gradients later on raises.
        optimizer: a torch optimizer of some or all of the model's parameters, or several.
        codec: the codec of Δ, or a function of the round (counted from 0) that returns one, equal on all ranks.
        every: H, local steps from one exchange of a parameter to the next.
        rounds: options of a round: fragments, delay, mixing and more.
        outer: the outer optimizer, SGD; `OuterSGD(device="cpu")` keeps θ0 and its momentum there.
        exchange: "gather", "two_pass", "mask", "union", "split", "factors", "blocks" or "dense"; "auto" is the one with
            the fewest bytes to receive, without measuring: "dense" for `Identity`, "factors" for `PowerSGD`, "two_pass"
            for block codecs on more than two ranks, else "gather". `Aggregate` replaces the ranks' mean.
        error_feedback: `CompressState`'s: the strategy of e; False: e = Δ, and what the codec leaves out is lost.
        exclude: `CompressState`'s: names of parameters that travel as float32.
        process_group: the ranks; by default all.
        meeting: "host:port" of a `gradwire-meet`, or a `Meeting`, in the place of torch.distributed: replicas come and
            go, a round has those that are there, and a newcomer takes over the state of the others (docs/elastic.md).
            By default the environment's GRADWIRE_MEETING, if set.
        seed: seed of stochastic rounding.
        entropy_coding: `CompressState`'s.

    Raises:
        TypeError, ValueError: an argument is invalid, here or on another rank, or the ranks disagree.
        RuntimeError: torch.distributed is not initialised, or a rank did not arrive within 60 s.
        MeetingLost: the meeting point was not reached for `Meeting.patience`.
    """

    _owner, _closed_text = OWNER, f"this {OWNER} is closed: make another, and load its state_dict() there"
    _options: LocalOptions

    @torch.inference_mode(False)  # a step changes what is made here
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        codec: Codec | Callable[[int], Codec],
        *,
        every: int,
        rounds: Rounds = Rounds(),  # noqa: B008 - frozen
        outer: OuterSGD = OuterSGD(),  # noqa: B008 - frozen
        exchange: LocalExchange = "auto",
        error_feedback: bool | Literal["auto"] | Feedback = "auto",
        exclude: Exclude | None = None,
        process_group: dist.ProcessGroup | None = None,
        meeting: str | Meeting | None = None,
        seed: int = 0,
        entropy_coding: bool = False,
        **former: Any,
    ) -> None:
        given = modern(former, rounds=rounds, outer=outer, exchange=exchange)
        rounds, outer, exchange = given["rounds"], given["outer"], given["exchange"]
        point = meeting_of(meeting, process_group)
        self._group: Any = None if point is not None else process_group or dist.group.WORLD
        size = dist.get_world_size(self._group) if point is None else point.wait_for or point.min_replicas
        how: dict[str, Any] = {"world_size": size}
        if isinstance(exchange, Aggregate):
            how, exchange = {**how, "mean": exchange.mean, "clip": exchange.clip}, "gather"
        how |= {"fallback": None, "topology": None, "seed": seed, "entropy_coding": entropy_coding}
        self._options = options = LocalOptions(codec, exchange, error_feedback, **how)
        self._model, self._outer = model, outer
        self._optimizers = optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._schedule = schedule = Schedule(every, rounds)
        self._counter: StepCounter | None = None  # inside `with`
        self._parameters: dict[str, Tensor] = {}  # this rank's shards of them, if it shares the model
        self._excluded: frozenset[str] = frozenset()
        self._statistics = statistics = Statistics() if point is None else ReplicaStatistics()
        trained: dict[str, nn.Parameter] = {}
        #: None: steps stay as they are.
        self._lengths: StepLengths | None = None
        inside, parts = list[int](), list[list[dict[str, Tensor]]]()
        problem: Exception | None = None
        try:
            trained = trainable(model, optimizers)
            self._parameters = {name: local(p) for name, p in trained.items() if local(p).numel()}
            self._device = next(iter(trained.values())).device
            inside = ranks_inside(trained.values(), self._group)
            schedule.check()
            if not isinstance(outer, OuterSGD):
                raise TypeError(f"outer={outer!r}: expected OuterSGD(lr=…, momentum=…)")
            outer.check(options.strategy)
            schedule.check_strategy(options.error_feedback, options.strategy)
            options.check(options.world_size)
            check_dtypes(self._parameters)
            check_whole(self._parameters, OWNER)
            check_writable(model)
            if point is not None:
                options.check_meeting()
            self._excluded = excluded_names(exclude, trained) & self._parameters.keys()
            parts = fragments_of(self._parameters, schedule.rounds.fragments, schedule.rounds.bucket_cap_mb)
            options.prepare(0, [torch.float32], self._device)
            if rounds.lengthen_steps:
                here = {name: trained[name] for name in self._parameters}
                lengths = StepLengths(optimizers, here, sum(map(len, parts)))
                self._lengths = lengths if lengths.names else None
        except Exception as error:  # the other ranks must hear of any error
            problem = error
        within = None if point is None else group_inside(inside, problem)
        self._feedback = FeedbackStore(options.strategy, keep_previous=True)
        self._scaler_sync = RoundRollback(self._feedback)
        kept: dict[str, Any] = {"clean": False, "numel": sum(p.numel() for p in self._parameters.values())}
        kept["speaks"] = not inside or inside[0] == dist.get_rank()
        if point is None:
            tensors = [*map(local, model.parameters()), *model.buffers()]
            broadcast(self._meet_to_reduce(problem, **kept).session.group, self._device, tensors)
        strategy, index = self._feedback.strategy, count()
        #: The global parameters, fragment by fragment and bucket by bucket.
        self._fragments = [
            [GlobalParameters(next(index), part, self._excluded, strategy, outer) for part in fragment]
            for fragment in parts
        ]
        self._every = [shared for fragment in self._fragments for shared in fragment]
        self._trained = list(trained.values())
        if self._lengths is not None:
            self._lengths.watch()
        #: The tie to ranks that come and go; None: ranks stay.
        self._replicas: Replicas | None = None
        #: This rank's steps; the number of them that rounds have counted; and True if ranks may have different
        #: parameters.
        self._progress, self._counted_steps, self._moved = Progress(0, 0), 0, False
        self._under_way: InFlightRound | None = None
        #: An exception of a signal's handler during a wait, until the step is complete.
        self._interruption: BaseException | None = None
        if isinstance(statistics, ReplicaStatistics) and point is not None:
            open_view = partial(
                view_reducer, self._device, options, self._feedback, self._scaler_sync, statistics, kept
            )
            described = point.describe() | self._description()
            state = CommonState(model, self._every)
            self._replicas = Replicas(point, described, state, open_view, statistics, within)
            weakref.finalize(self, self._replicas.close)
            self._follow(self._replicas.join())

    def __repr__(self) -> str:
        text = f"{len(self._parameters)} parameters every {self._schedule.every} steps: {self._options.codec_text}"
        done = f"step {self._progress.steps}, round {self._step}"
        return f"<{OWNER} of {text} by {self._options.exchange!r}, {done}>"

    def _description(self) -> dict[str, Any]:
        return {
            "version": __version__,
            **self._options.describe(self._options.world_size),
            "schedule": str(self._schedule),
            "outer optimizer": str(self._outer),
            "the model's parameters": handshake.describe_model(self._parameters, self._excluded),
            "the model's tensors": handshake.describe_model(tensors_of(self._model), ()),
        }

    @untraced
    def __enter__(self) -> Self:
        if self._counter is not None:
            raise RuntimeError(f"this {OWNER} counts the optimizer's steps already: leave the first `with` first")
        self._counter = StepCounter(self._optimizers, self._counted)
        return self

    @untraced
    def __exit__(self, *exception: object) -> None:
        if self._counter is not None:
            self._counter.remove()
        self._counter = None

    @property
    def rounds(self) -> int:
        """Number of exchanges so far; that of a fragment counts as one. With `meeting`, of all replicas."""
        return self._step

    @property
    def member(self) -> int:
        """This replica's number, which no other one has, had or will have: a seed for its data. Without `meeting`, its
        rank."""
        replicas = self._replicas
        return dist.get_rank(self._group) if replicas is None else replicas.client.member

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the replicas that the last round was made with, or the next one will be; without `meeting`,
        the ranks."""
        replicas = self._replicas
        if replicas is None or replicas.view is None:
            return tuple(range(dist.get_world_size(self._group)))
        return replicas.view.members

    # -- training ----------------------------------------------------------------------------------------------------

    @untraced
    @undivided
    def step(self) -> None:
        """Count a step of the optimizers, and exchange a fragment, or all parameters, when it is due. Every rank must
        call it equally often while it trains, also if a GradScaler skips the optimizer's step.

        Raises:
            RuntimeError: the mean of a round is not finite, on every rank alike: θ0, momentum and residuals are then
                as before the round, and the model is unchanged, or with `keep_local` has gone on from θ0. Or another
                rank has failed or is gone; with `meeting`, too few are left for `Meeting.patience`.
            MeetingLost: the meeting point was needed, and not reached for `Meeting.patience`.
            ValueError: ranks disagree, on every rank alike. Or the model has new parameters to train: local progress
                is unchanged.
        """
        if self._counter is not None:
            raise RuntimeError("inside `with` the optimizer's steps are counted by themselves: leave out step()")
        self._counted()

    @untraced
    @between_steps
    def synchronise(self) -> None:
        """Make a round of all parameters now, without delay and mixing, and restart the count: before evaluation,
        before saving a model, and at the end. All ranks then have the same parameters. Nothing happens if no rank has
        made a step since they last had. A collective; ranks may have made different numbers of steps.

        Raises:
            RuntimeError, ValueError: `step`'s, or a rank is in another call.
        """
        self._synchronise()

    def _synchronise(self, uncompressed: bool = False) -> None:
        self._finish()
        if self._under_way is not None:  # first, as other ranks may in a step: a refusal is a collective
            self._apply()
        moved = True
        if self._replicas is None:
            session = self._session
            session.agree("synchronise()", self.rounds, patience=None)
            moved = any(session.control.all_gather_object(self._moved))
        self._progress.count = 0
        if moved:
            self._exchange_all(uncompressed)
        self._raise_interruption()

    @untraced
    @between_steps
    def rewind(self) -> None:
        """Set the model to the global parameters: this rank loses its progress since the last round, and with
        `keep_unsent` what it has not sent."""
        for shared in self._every:
            shared.hand_out()

    @between_steps
    def close(self) -> None:
        """Wait for the round in flight, then release the thread and the connections. Nothing can follow. With `meeting`
        the other replicas go on without this one."""
        if self._replicas is not None:
            if self._under_way is not None:
                with contextlib.suppress(RuntimeError):
                    self._apply()
            linger(LEAVE_SECONDS)  # the others may still wait for this replica's last messages
            self._replicas.close()
        self._flush()
        self._reducer = None
        if self._lengths is not None:
            self._lengths.remove()

    @untraced
    @undivided
    def _counted(self) -> None:
        self._count_step()
        self._raise_interruption()

    def _count_step(self) -> None:
        schedule = self._schedule
        self._running()  # raises after `close`
        progress, replicas, self._moved = self._progress, self._replicas, True
        progress.steps += 1
        progress.count += progress.steps > schedule.rounds.sync_until
        if replicas is not None and not self._look_around(replicas):
            return
        if progress.steps <= schedule.rounds.sync_until:
            self._exchange_all()
            return
        broken = replicas is not None and replicas.interrupted
        if self._under_way is not None and (progress.count >= self._under_way.due or broken):
            self._apply(goes_on=True)
        # If the others wait for this replica in a round that it has not counted to, they say of what.
        awaited = replicas is not None and replicas.awaited
        fragment = 0 if awaited else schedule.fragment(progress.count)
        if fragment is None or not self._begin_round(self._fragments[fragment], schedule.rounds.keep_local):
            return
        if schedule.rounds.delay == 0:
            self._apply(goes_on=True)
            self._moved = not schedule.agrees

    def _exchange_all(self, uncompressed: bool = False) -> None:
        if self._begin_round(self._every, keep_local=False, uncompressed=uncompressed):
            self._apply()
        self._moved = False

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @between_steps
    def state_dict(self) -> dict[str, Any]:
        """This rank's part: tensors, numbers and strings only, so `torch.load` reads it with `weights_only=True`. It
        loads on the same rank of the same number of ranks. Save each rank's model and optimizer with it: they differ
        between rounds. A round in flight is waited for, and its means are saved.

        Raises:
            RuntimeError: replicas come and go, so that there is no such rank later on.
        """
        if self._replicas is not None:
            raise RuntimeError(
                f"state_dict() of a {OWNER} with meeting=… would load on one rank of as many only, and replicas come "
                "and go: call consolidated_state_dict() on every replica"
            )
        self._finish()
        return self._checkpoint.of_rank() | self._replicated(self._arrived())

    @between_steps
    def consolidated_state_dict(self) -> dict[str, Any]:
        """Call `synchronise()`, and return the mean of the residuals over the ranks beside the values that are the same
        on all. Loads on any number of ranks, with the model of any rank, and nothing is lost. A collective. With
        `meeting` the round is made without compression, and sends what residuals hold, so that none are left to save.

        Raises:
            RuntimeError, ValueError: `synchronise`'s.
        """
        if self._replicas is not None:
            self._synchronise(uncompressed=True)
            return self._checkpoint.of_rank() | self._replicated(None)
        self._synchronise()
        return self._checkpoint.mean_over_ranks(self._session) | self._replicated(None)

    def _replicated(self, arrived: InFlightRound | None) -> dict[str, Any]:
        lengths = {} if self._lengths is None else {LENGTHS: self._lengths.state_dict()}
        return replicated(self._every, arrived) | lengths

    @between_steps
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from a checkpoint. Every rank must load one of the same step. Model and optimizer are left alone: load
        theirs, too. With `meeting`, load it where `rounds` is 0, before the first step: a replica that comes later
        has the state of the others.

        Args:
            state_dict: from `state_dict` on this rank of as many, or from `consolidated_state_dict`.
            strict: False accepts, with a warning, a checkpoint that has no residuals for this rank.

        Raises:
            ValueError: the checkpoint is of another format, rank, world size, codec or model. Nothing has changed
                then.
        """
        self._running()
        saved, vectors = self._checkpoint.read(state_dict, strict, REPLICATED_KEYS)
        saved = {**saved, **{what: renamed(saved[what], self._parameters) for what in REPLICATED_KEYS}}
        check_saved(saved, self._parameters, self._every)
        self._finish()
        if self._lengths is not None:
            self._lengths.load_state_dict(saved.get(LENGTHS, {}), self._options.world_size, saved["step"])
        self._resume(saved, vectors)
        self._moved, self._under_way = bool(saved["moved"]), restore(self._every, saved)
        self._progress = Progress(saved["local_steps"], saved["counted_steps"])
        if self._replicas is not None:
            self._replicas.loaded(self._step)

    def _made_buckets(self) -> list[Bucket]:
        more = [] if self._lengths is None else [self._lengths.bucket]
        return [*(shared.bucket for shared in self._every), *more]

    @property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            OWNER, self._options, self._feedback, self._parameters, self._group, self._step,
            zeros=self._parameters, idle=idle_names(() if self._options.keeps_all else self._excluded),
            local_steps=self._progress.steps, counted_steps=self._progress.count, moved=self._moved,
            due=0 if self._under_way is None else self._under_way.due,
        )  # fmt: skip

    # -- a round -----------------------------------------------------------------------------------------------------

    def _begin_round(self, parts: Sequence[GlobalParameters], keep_local: bool, uncompressed: bool = False) -> bool:
        """Start to exchange this rank's differences from the global parameters. Returns False, and sends nothing, where
        this replica has fallen behind: it then has the others' state.

        Args:
            keep_local: go on from the global parameters at once.
            uncompressed: send all that residuals hold, too.
        """
        if self._under_way is not None:  # from a checkpoint with another schedule
            self._apply(goes_on=True)
        self._check_thawed()
        return self._send(InFlightRound(list(parts), [], [], 0, keep_local, None, uncompressed))

    def _send(self, sent: InFlightRound) -> bool:
        """Send a round, for the first time or again."""
        if self._replicas is not None and not self._enter(self._replicas, sent):
            return False
        reducer, parts = self._running(), sent.globals
        pieces = f"{parts[0].bucket.index} to {parts[-1].bucket.index} of {len(self._every)}"
        choice = UNCOMPRESSED if sent.uncompressed else self._options.choice(self._step)
        step = reducer.begin(self._step, choice, {"pieces of the model": pieces})
        self._step += 1
        reducer.announce_step(step, parts[0].bucket)
        sent.buffers, sent.futures, former = [], [], sent.copies
        sent.steps = self._progress.steps if former is None else sent.steps
        for index, shared in enumerate(parts):  # the first is in flight while the next difference is computed
            if former is None:
                buffer = shared.difference(restart=sent.keep_local)
            else:
                buffer = shared.difference_again(former[index])
            if sent.keep_local and self._replicas is not None and former is None:
                sent.copies = [*(sent.copies or ()), buffer.clone()]
            sent.buffers.append(buffer)
            sent.futures.append(reducer.reduce(step, shared.bucket, buffer))
        if self._lengths is not None:
            message = self._lengths.message()
            sent.futures.append(reducer.reduce(step, self._lengths.bucket, message))
        reducer.end(step)
        if sent.step is None:
            sent.due = self._progress.count + self._schedule.rounds.delay
        sent.step = step
        self._under_way = sent
        return True

    def _apply(self, goes_on: bool = False) -> None:
        """Wait for the round in flight, and make the outer step. Where training goes on, ranks may begin apart."""
        rounds = self._schedule.rounds
        done = self._arrived()
        if done is None:
            return
        self._under_way = None
        if done.step is not None:
            done.step.reduced.clear()  # else the buffers would live until the next round
        refused = any(bool(shared.bucket.overflow) for shared in done.globals)
        if self._replicas is not None:  # on one of its ranks: on all
            refused = not self._replicas.completed(not refused)
        if refused:
            self._feedback.rollback()
        else:
            for shared, mean in zip(done.globals, done.buffers, strict=True):
                shared.move(mean, rounds.mixing if goes_on else 0.0, done.keep_local)
                if goes_on and rounds.keep_unsent:
                    shared.take_unsent(self._feedback)
                if self._replicas is not None and done.step is not None:
                    shared.keep(mean)
            self._feedback.commit()
            self._counted_steps = max(self._counted_steps, done.steps)
            if self._lengths is not None:
                self._lengths.take(self._options.world_size)
        if self._replicas is not None and done.step is not None:
            self._replicas.applied(self._step)
        if refused:
            self._refuse(done)

    def _arrived(self) -> InFlightRound | None:
        """The round in flight, after a wait for its means; None where the others have gone on without this replica,
        which then has their state."""
        while (sent := self._under_way) is not None:
            failure = RuntimeError("another rank of this replica has failed in this round")
            here = False
            try:
                self._interruption = self._await_means(sent.futures) or self._interruption
                here = True
            except RuntimeError as error:
                if self._replicas is None or sent.step is None:
                    raise
                if isinstance(error.__cause__, ValueError):  # it would fail again: `close` must not wait for it
                    self._under_way = None
                    raise
                failure = error
            if self._replicas is None or sent.step is None or self._replicas.completed(here):
                if self._lengths is not None and sent.step is not None:
                    self._lengths.arrived()
                return sent
            self._session.pipeline.idle()
            sent.futures.clear()  # they hold the failure, and its traceback this round
            self._under_way = None
            try:
                arrival = self._replicas.failed(failure)
            finally:
                del failure  # its traceback holds this frame, and the former view's pipeline
            self._follow(arrival, sent)
            if arrival.healed is None:  # nobody has completed it
                self._send(sent)
        return None

    def _finish(self) -> None:
        """Wait until nothing is in flight; the means stay."""
        if self._replicas is None:
            self._running().settle()
        else:
            self._arrived()

    def _raise_interruption(self) -> None:
        """Raise what a signal's handler has raised during a wait."""
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption

    def _check_thawed(self) -> None:
        problem = thawed(self._model, self._trained)
        if problem is not None:  # ranks that are in a round must hear of it, too
            if self._replicas is None:
                self._session.pipeline.wait()
                self._session.refuse(problem)
            raise ValueError(f"gradwire: {problem}")

    def _refuse(self, done: InFlightRound) -> None:
        """Raise for a mean that is not finite, on all ranks alike, and name the ranks at fault. A collective, where
        ranks stay."""
        first = next((name for shared in done.globals for name in shared.not_finite()), None)
        found = [first] if self._replicas is not None else self._session.control.all_gather_object(first)
        whose = "; ".join(f"rank {rank} has NaN or infinity in {name!r}" for rank, name in enumerate(found) if name)
        if self._replicas is not None:
            whose = f"this replica has NaN or infinity in {first!r}" if first else "another replica is at fault"
        raise RuntimeError(
            f"gradwire: the mean of round {self._step - 1} is not finite: "
            f"{whose or f'no parameter is to blame, so the code of {self._options.codec_text} has overflowed'}. The "
            "global parameters and residuals are as before the round: call rewind() on every rank to go on from "
            "there, with an optimizer whose state is finite, or load a checkpoint"
        )

    # -- replicas that come and go -----------------------------------------------------------------------------------

    def _look_around(self, replicas: Replicas) -> bool:
        """Between rounds: follow a change of view, if there was one. Returns False where this replica had fallen
        behind, so that its last step is lost."""
        arrival = replicas.arrival()
        if arrival is not None:
            self._follow(arrival)
            if arrival.healed is not None:
                return False
        replicas.tell(self._progress)
        return True

    def _enter(self, replicas: Replicas, sent: InFlightRound) -> bool:
        """Wait for a view to make the next round in. Returns False where this replica has fallen behind."""
        while True:
            progress = replace(self._progress)
            if sent.step is not None:  # it is sent again; this replica has trained on since, by the delay
                progress = Progress(sent.steps, sent.due - self._schedule.rounds.delay)
            synchronises = not progress.count and progress.steps > self._schedule.rounds.sync_until
            call: Call = "consolidate" if sent.uncompressed else "synchronise" if synchronises else "step"
            due = DueRound(replace(progress), call)
            if synchronises:
                progress.count = self._schedule.every  # whoever hears of it is to come with its next step
            replicas.tell(progress, due)
            arrival = replicas.enter(self._step + 1)
            if arrival is None:
                try:
                    theirs = replicas.others_round()
                except RuntimeError as error:
                    arrival = replicas.failed(error)
                else:
                    if theirs is not None:
                        self._join_round(theirs, sent)
                    return True
            self._follow(arrival)
            if arrival.healed is not None:
                return False

    def _join_round(self, theirs: DueRound, sent: InFlightRound) -> None:
        """Send what the others send in their round, whatever this replica's own schedule says."""
        schedule, progress = self._schedule, theirs.progress
        self._counted_steps += progress.steps - self._progress.steps
        self._progress = replace(progress)
        whole = theirs.call != "step" or progress.steps <= schedule.rounds.sync_until
        fragment = None if whole else schedule.fragment(progress.count)
        sent.globals = list(self._every if fragment is None else self._fragments[fragment])
        sent.keep_local = schedule.rounds.keep_local and not whole
        sent.uncompressed = theirs.call == "consolidate"

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
        self._counted_steps = self._counted_steps if sent is None else sent.steps

    def _follow(self, arrival: Arrival, sent: InFlightRound | None = None) -> None:
        """Go on in another view, from the state that its members agree on.

        Args:
            sent: the round that has failed here, if one has.
        """
        assert self._replicas is not None
        if arrival.ending == "counted":
            self._conclude(arrival, sent)
        else:
            self._feedback.rollback()
        # What this replica owed the ranks of the former view for slices that it owned becomes its own residual.
        self._feedback.fold()
        if arrival.healed is not None:
            self._replicas.statistics.own_steps_lost += self._progress.steps - self._counted_steps
            self._replicas.state.take(arrival.healed)
            self._progress = self._caught_up(arrival.progress or Progress(0, 0))
            self._counted_steps = self._progress.steps
        self._step, self._reducer = arrival.name[1], arrival.view.reducer
        if self._lengths is not None:
            self._lengths.next_round = self._step
        self._options.resize(len(arrival.view.members))
        self._running().seed = self._options.seed
        for bucket in self._made_buckets():
            bucket.disconnect()
        self._replicas.followed(arrival)


def view_reducer(
    device: torch.device, options: LocalOptions, feedback: FeedbackStore, scaler_sync: RoundRollback,
    statistics: Statistics, how: dict[str, Any], group: Group,
) -> Reducer:  # fmt: skip
    """Make the reducer of a view, over its group. A collective of the members. It knows no runner, which would live as
    long as the replicas' thread."""
    session = Session(OWNER, group, device, dict, None, entropy_coding=options.entropy_coding)
    return Reducer(session, feedback, scaler_sync, statistics, options.seed, **how)
