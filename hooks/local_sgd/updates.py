"""Periodic synchronisation: every rank trains its own model, and ranks exchange their progress every H steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from ...compress.codec import Codec
from ...compress.feedback.base import Feedback
from ..comm.between_steps import between_steps, undivided
from ..comm.untraced import untraced
from ..core.options import Exclude
from ..core.statistics import Statistics
from .meeting.options import Meeting
from .options import Aggregate, LocalExchange, LocalOptions, meeting_of, modern
from .outer_sgd import OuterSGD
from .rounds import RoundRunner
from .schedule import Rounds, Schedule
from .skipped import StepCounter

OWNER = "LocalUpdates"


class LocalUpdates:
    """Local SGD and its descendants: each rank trains its own model with its own optimizer. Every `every` steps all
    ranks exchange Δ = θ0 - θ, the difference between the global parameters and their own. A round is

        e = β·e + Δ;  send the code of e, keep in e what it leaves out;  ū = the ranks' mean
        m = μ·m + ū;  θ0 = θ0 - lr·(ū + μ·m)  (nesterov; else lr·m, and lr·ū without momentum);  θ = θ0

    which is local SGD as it stands (Stich, ICLR 2019), post-local SGD with `Rounds(sync_until=…)` (Lin et al., ICLR
    2020), DiLoCo with `OuterSGD(lr=0.7, momentum=0.9)` (Douillard et al., 2023), Streaming DiLoCo with
    `Rounds(fragments=…, delay=…, mixing=…)` (Douillard et al., 2025), and SparseLoCo with `ChunkedTopK`,
    `exchange="gather"` and `error_feedback=Residual(decay=0.95)` (Sarfi et al., 2025), as its code has it with
    `exchange=Aggregate(mean="senders", clip="median")`.

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
        found = meeting_of(meeting, process_group)
        group: Any = None if found is not None else process_group or dist.group.WORLD
        size = dist.get_world_size(group) if found is None else found.wait_for or found.min_replicas
        how: dict[str, Any] = {"world_size": size}
        if isinstance(exchange, Aggregate):
            how, exchange = {**how, "mean": exchange.mean, "clip": exchange.clip}, "gather"
        how |= {"fallback": None, "topology": None, "seed": seed, "entropy_coding": entropy_coding}
        options = LocalOptions(codec, exchange, error_feedback, **how)
        self._optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._schedule = Schedule(every, rounds)
        self._counter: StepCounter | None = None  # inside `with`
        self._runner = RoundRunner(model, self._optimizers, options, self._schedule, outer, exclude, group, found)

    def __repr__(self) -> str:
        return repr(self._runner)

    def __str__(self) -> str:
        return str(self._runner)

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
        return self._runner.number

    @property
    def member(self) -> int:
        """This replica's number, which no other one has, had or will have: a seed for its data. Without `meeting`, its
        rank."""
        replicas = self._runner.replicas
        return dist.get_rank(self._runner.group) if replicas is None else replicas.client.member

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the replicas that the last round was made with, or the next one will be; without `meeting`,
        the ranks."""
        replicas = self._runner.replicas
        if replicas is None or replicas.view is None:
            return tuple(range(dist.get_world_size(self._runner.group)))
        return replicas.view.members

    def statistics(self) -> Statistics:
        """This rank's counts so far; `steps` are rounds. With `meeting` a `ReplicaStatistics`."""
        return self._runner.statistics()

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
        runner = self._runner
        runner.finish()
        if runner.under_way is not None:  # first, as other ranks may in a step: a refusal is a collective
            runner.apply()
        moved = True
        if runner.replicas is None:
            session = runner.running.session
            session.agree("synchronise()", self.rounds, patience=None)
            moved = any(session.control.all_gather_object(runner.moved))
        runner.progress.count = 0
        if moved:
            self._exchange_all(uncompressed)
        runner.raise_interruption()

    @untraced
    @between_steps
    def rewind(self) -> None:
        """Set the model to the global parameters: this rank loses its progress since the last round."""
        for shared in self._runner.every:
            shared.hand_out()

    @between_steps
    def close(self) -> None:
        """Wait for the round in flight, then release the thread and the connections. Nothing can follow. With `meeting`
        the other replicas go on without this one."""
        self._runner.close()

    @untraced
    @undivided
    def _counted(self) -> None:
        self._count_step()
        self._runner.raise_interruption()

    def _count_step(self) -> None:
        runner, schedule = self._runner, self._schedule
        _ = runner.running  # raises after `close`
        progress, runner.moved = runner.progress, True
        progress.steps += 1
        progress.count += progress.steps > schedule.rounds.sync_until
        if runner.replicas is not None and not runner.look_around(runner.replicas):
            return
        if progress.steps <= schedule.rounds.sync_until:
            self._exchange_all()
            return
        if runner.under_way is not None and (progress.count >= runner.under_way.due or runner.interrupted):
            runner.apply(schedule.rounds.mixing)
        fragment = 0 if runner.awaited else schedule.fragment(progress.count)
        if fragment is None or not runner.send(runner.fragments[fragment], schedule.rounds.keep_local):
            return
        if schedule.rounds.delay == 0:
            runner.apply(schedule.rounds.mixing)
            runner.moved = not schedule.agrees

    def _exchange_all(self, uncompressed: bool = False) -> None:
        if self._runner.send(self._runner.every, keep_local=False, uncompressed=uncompressed):
            self._runner.apply()
        self._runner.moved = False

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @between_steps
    def state_dict(self) -> dict[str, Any]:
        """This rank's part: tensors, numbers and strings only, so `torch.load` reads it with `weights_only=True`. It
        loads on the same rank of the same number of ranks. Save each rank's model and optimizer with it: they differ
        between rounds. A round in flight is waited for, and its means are saved.

        Raises:
            RuntimeError: replicas come and go, so that there is no such rank later on.
        """
        if self._runner.replicas is not None:
            raise RuntimeError(
                f"state_dict() of a {OWNER} with meeting=… would load on one rank of as many only, and replicas come "
                "and go: call consolidated_state_dict() on every replica"
            )
        self._runner.finish()
        return self._runner.saved_by_rank()

    @between_steps
    def consolidated_state_dict(self) -> dict[str, Any]:
        """Call `synchronise()`, and return the mean of the residuals over the ranks beside the values that are the same
        on all. Loads on any number of ranks, with the model of any rank, and nothing is lost. A collective. With
        `meeting` the round is made without compression, and sends what residuals hold, so that none are left to save.

        Raises:
            RuntimeError, ValueError: `synchronise`'s.
        """
        if self._runner.replicas is not None:
            self._synchronise(uncompressed=True)
            return self._runner.saved_by_rank()
        self._synchronise()
        return self._runner.saved_by_all()

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
        self._runner.load(state_dict, strict)
