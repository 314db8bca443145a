"""Periodic synchronisation: every rank trains its own model, and ranks exchange their progress every H steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import __version__
from ...compress.codec import Codec
from ...compress.feedback.base import Feedback
from ...compress.feedback.store import FeedbackStore
from ..comm import handshake
from ..comm.pieces import broadcast
from ..comm.untraced import untraced
from ..core.checkpoint import Checkpoint, idle_names
from ..core.options import Exclude, check_dtypes, check_whole, excluded_names
from ..core.reducer import Reducer
from ..core.session import Session
from ..core.statistics import Statistics
from ..training.autograd_end import waited
from ..training.names import renamed
from .initial_sync import check_writable, tensors_of, thawed, trainable
from .options import Aggregate, LocalExchange, LocalOptions, modern
from .outer_sgd import (
    REPLICATED_KEYS,
    GlobalParameters,
    InFlightRound,
    OuterSGD,
    check_saved,
    fragments_of,
    replicated,
    restore,
)
from .schedule import RoundRollback, Rounds, Schedule
from .skipped import Skips

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
    skips. Constructing it is a collective: ranks compare options and parameters, and all start from the first rank's
    parameters and buffers, as in DDP. Later on the optimizer's state and buffers, such as BatchNorm's statistics, stay
    each rank's own.

    θ0 and e are float32, whatever the parameters are. Memory: 4 bytes an element for θ0, 4 for the momentum, where
    there is one, 8 where a residual is kept (4 or 2 by `Residual(dtype=…)`), and 4 for Δ.

    Args:
        model: each rank's own, not in DDP; float32, float16 or bfloat16, on one device. Parameters that do not require
            gradients are made equal at the start, and then left alone; requiring gradients later on raises.
        optimizer: a torch optimizer of some or all of the model's parameters.
        codec: the codec of Δ, or a function of the round (counted from 0) that returns one, equal on all ranks.
        every: H, local steps from one exchange of a parameter to the next.
        rounds: options of a round: fragments, delay, mixing and more.
        outer: the outer optimizer, SGD; `OuterSGD(device="cpu")` keeps θ0 and its momentum there.
        exchange: "gather", "two_pass", "union", "split", "factors" or "dense"; "auto" is the one with the fewest bytes
            to receive, without measuring: "dense" for `Identity`, "factors" for `PowerSGD`, "two_pass" for block codecs
            on more than two ranks, else "gather". `Aggregate` replaces the ranks' mean.
        error_feedback: `CompressState`'s: the strategy of e; False: e = Δ, and what the codec leaves out is lost.
        exclude: `CompressState`'s: names of parameters that travel as float32.
        process_group: the ranks; by default all.
        seed: seed of stochastic rounding.

    Raises:
        TypeError, ValueError: an argument is invalid, here or on another rank, or the ranks disagree.
        RuntimeError: torch.distributed is not initialised, or a rank did not arrive within 60 s.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        codec: Codec | Callable[[int], Codec],
        *,
        every: int,
        rounds: Rounds = Rounds(),  # noqa: B008 - frozen
        outer: OuterSGD = OuterSGD(),  # noqa: B008 - frozen
        exchange: LocalExchange = "auto",
        error_feedback: bool | Literal["auto"] | Feedback = "auto",
        exclude: Exclude | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        **former: Any,
    ) -> None:
        given = modern(former, rounds=rounds, outer=outer, exchange=exchange)
        rounds, outer, exchange = given["rounds"], given["outer"], given["exchange"]
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(f"{OWNER} needs torch.distributed: call torch.distributed.init_process_group() first")
        self._group: Any = process_group or dist.group.WORLD
        how: dict[str, Any] = {"world_size": dist.get_world_size(self._group)}
        if isinstance(exchange, Aggregate):
            how, exchange = {**how, "mean": exchange.mean, "clip": exchange.clip}, "gather"
        self._options = LocalOptions(codec, exchange, error_feedback, fallback=None, topology=None, seed=seed, **how)
        self._outer = outer
        self._model, self._optimizer = model, optimizer
        self._schedule = Schedule(every, rounds)
        self._parameters: dict[str, nn.Parameter] = {}
        self._rounds = self._steps = self._count = 0
        self._moved = False  # True if ranks may have different parameters
        self._under_way: InFlightRound | None = None
        #: An exception of a signal handler during a wait, until the step is complete.
        self._interruption: BaseException | None = None
        self._handles: list[Any] = []
        self._statistics = Statistics()
        fragments_in: list[list[dict[str, nn.Parameter]]] = []
        self._excluded: frozenset[str] = frozenset()
        problem: Exception | None = None
        place = torch.device("cpu")
        try:
            self._parameters = trainable(model, optimizer)
            place = next(iter(self._parameters.values())).device
            self._schedule.check()
            if not isinstance(outer, OuterSGD):
                raise TypeError(f"outer={outer!r}: expected OuterSGD(lr=…, momentum=…)")
            outer.check(self._options.strategy)
            self._options.check(dist.get_world_size(self._group))
            check_dtypes(self._parameters)
            check_whole(self._parameters, OWNER)
            check_writable(model)
            self._excluded = excluded_names(exclude, self._parameters)
            fragments_in = fragments_of(self._parameters, rounds.fragments, rounds.bucket_cap_mb)
            self._options.prepare(0, [torch.float32], place)
        except Exception as error:  # the other ranks must hear of any error
            problem = error
        session = Session(OWNER, self._group, place, self._description, problem)
        self._feedback = FeedbackStore(self._options.strategy, keep_previous=True)
        scaler_sync, numel = RoundRollback(self._feedback), sum(p.numel() for p in self._parameters.values())
        self._reducer: Reducer | None = Reducer(
            session, self._feedback, scaler_sync, self._statistics, seed, clean=False, numel=numel
        )
        broadcast(session.group, place, [*model.parameters(), *model.buffers()])
        strategy, index = self._feedback.strategy, count()
        self._fragments = [
            [GlobalParameters(next(index), part, self._excluded, strategy, outer) for part in fragment]
            for fragment in fragments_in
        ]

    def __repr__(self) -> str:
        text = f"{len(self._parameters)} parameters every {self._schedule.every} steps: {self._options.codec_text}"
        return f"<{OWNER} of {text} by {self._options.exchange!r}, step {self._steps}, round {self._rounds}>"

    @untraced
    def __enter__(self) -> Self:
        if self._handles:
            raise RuntimeError(f"this {OWNER} counts the optimizer's steps already: leave the first `with` first")
        counted = self._optimizer.register_step_post_hook(lambda *_: self._counted())
        self._handles = [counted, Skips(self._optimizer, lambda: self._steps, self._counted)]
        return self

    @untraced
    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def rounds(self) -> int:
        """Number of exchanges so far; that of a fragment counts as one."""
        return self._rounds

    def statistics(self) -> Statistics:
        """This rank's counts so far; `steps` are rounds."""
        if self._reducer is not None:
            self._reducer.flush()
        return copy.deepcopy(self._statistics)

    # -- training ----------------------------------------------------------------------------------------------------

    @untraced
    def step(self) -> None:
        """Count a step of the optimizer, and exchange a fragment, or all parameters, when it is due. Every rank must
        call it equally often while it trains, also if a GradScaler skips the optimizer's step.

        Raises:
            RuntimeError: the mean of a round is not finite, on every rank alike: θ0, momentum and residuals are then
                as before the round, and the model is unchanged, or with `keep_local` has gone on from θ0. Or another
                rank has failed or is gone.
            ValueError: ranks disagree, on every rank alike. Or the model has new parameters to train: local progress
                is unchanged.
        """
        if self._handles:
            raise RuntimeError("inside `with` the optimizer's steps are counted by themselves: leave out step()")
        self._counted()

    @untraced
    def synchronise(self) -> None:
        """Make a round of all parameters now, without delay and mixing, and restart the count: before evaluation,
        before saving a model, and at the end. All ranks then have the same parameters. Nothing happens if no rank has
        made a step since they last had. A collective; ranks may have made different numbers of steps.

        Raises:
            RuntimeError, ValueError: `step`'s, or a rank is in another call.
        """
        reducer = self._running()
        session = reducer.session
        reducer.settle()
        if self._under_way is not None:  # first, as other ranks may in a step: `_refuse` is a collective
            self._apply()
        session.agree("synchronise()", self._rounds, patience=None)
        moved = any(session.control.all_gather_object(self._moved))
        self._count = 0
        if moved:
            self._exchange_all()
        self._raise_interruption()

    @untraced
    def rewind(self) -> None:
        """Set the model to the global parameters: this rank loses its progress since the last round."""
        for shared in self._all():
            shared.hand_out()

    def close(self) -> None:
        """Wait for the round in flight, then release the thread and the connections. Nothing can follow."""
        if self._reducer is not None:
            self._reducer.flush()
        self._reducer = None

    @untraced
    def _counted(self) -> None:
        self._count_step()
        self._raise_interruption()

    def _raise_interruption(self) -> None:
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption

    def _count_step(self) -> None:
        self._running()
        schedule, self._moved = self._schedule, True
        self._steps += 1
        if self._steps <= schedule.rounds.sync_until:
            self._exchange_all()
            return
        self._count += 1
        if self._under_way is not None and self._count >= self._under_way.due:
            self._apply(schedule.rounds.mixing)
        fragment = schedule.fragment(self._count)
        if fragment is not None:
            self._send(self._fragments[fragment], schedule.rounds.keep_local)
            if schedule.rounds.delay == 0:
                self._apply(schedule.rounds.mixing)
                self._moved = not schedule.agrees

    def _exchange_all(self) -> None:
        self._send(self._all(), keep_local=False)
        self._apply()
        self._moved = False

    def _send(self, parts: list[GlobalParameters], keep_local: bool) -> None:
        """Start to exchange this rank's differences from the global parameters."""
        reducer = self._running()
        if self._under_way is not None:  # from a checkpoint with another schedule
            self._apply(self._schedule.rounds.mixing)
        problem = thawed(self._model, self._parameters.values())
        if problem is not None:  # ranks that are in a round must hear of it, too
            reducer.session.pipeline.wait()
            reducer.session.refuse(problem)
            raise ValueError(f"gradwire: {problem}")
        pieces = f"{parts[0].bucket.index} to {parts[-1].bucket.index} of {len(self._all())}"
        step = reducer.begin(self._rounds, self._options.choice(self._rounds), {"pieces of the model": pieces})
        self._rounds += 1
        reducer.announce_step(step, parts[0].bucket, 0, None)
        buffers, futures = list[Tensor](), list[torch.futures.Future[Tensor]]()
        for shared in parts:  # the first is in flight while the next difference is computed
            buffers.append(shared.difference(restart=keep_local))
            futures.append(reducer.reduce(step, shared.bucket, buffers[-1]))
        reducer.end(step)
        due = self._count + self._schedule.rounds.delay
        self._under_way = InFlightRound(parts, buffers, futures, due, keep_local, step)

    def _apply(self, mixing: float = 0.0) -> None:
        """Wait for the round in flight, and make the outer step."""
        done = self._arrived()
        self._under_way = None
        if done.step is not None:
            done.step.reduced.clear()  # else the buffers would live until the next round
        if any(bool(shared.bucket.overflow) for shared in done.globals):
            self._refuse(done)
        for shared, mean in zip(done.globals, done.buffers, strict=True):
            shared.move(mean, mixing, done.keep_local)

    def _arrived(self) -> InFlightRound:
        """The round in flight, after a wait for its means."""
        assert self._under_way is not None
        pipeline = self._running().session.pipeline
        self._interruption = waited(pipeline.wait, lambda _: pipeline.failed) or self._interruption
        for future in self._under_way.futures:  # on a GPU, later kernels on this stream wait for it
            future.wait()
        return self._under_way

    def _refuse(self, done: InFlightRound) -> None:
        """Raise for a mean that is not finite, on all ranks alike, and name the ranks at fault. A collective."""
        names = (name for shared in done.globals for name in shared.not_finite())
        found = self._running().session.control.all_gather_object(next(names, None))
        whose = "; ".join(f"rank {rank} has NaN or infinity in {name!r}" for rank, name in enumerate(found) if name)
        raise RuntimeError(
            f"gradwire: the mean of round {self._rounds - 1} is not finite: "
            f"{whose or f'no parameter is to blame, so the code of {self._options.codec_text} has overflowed'}. The "
            "global parameters and residuals are as before the round: call rewind() on every rank to go on from "
            "there, with an optimizer whose state is finite, or load a checkpoint"
        )

    def _all(self) -> list[GlobalParameters]:
        return [shared for fragment in self._fragments for shared in fragment]

    def _running(self) -> Reducer:
        if self._reducer is None:
            raise RuntimeError(f"this {OWNER} is closed: make another, and load its state_dict() there")
        return self._reducer

    def _description(self) -> dict[str, Any]:
        return {
            "version": __version__,
            **self._options.describe(dist.get_world_size(self._group)),
            "schedule": str(self._schedule),
            "outer optimizer": str(self._outer),
            "the model's parameters": handshake.describe_model(self._parameters, self._excluded),
            "the model's tensors": handshake.describe_model(tensors_of(self._model), ()),
        }

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: tensors, numbers and strings only, so `torch.load` reads it with `weights_only=True`. It
        loads on the same rank of the same number of ranks. Save each rank's model and optimizer with it: they differ
        between rounds. A round in flight is waited for, and its means are saved.
        """
        self._running().settle()
        return self._export(self._checkpoint.of_rank())

    def consolidated_state_dict(self) -> dict[str, Any]:
        """Call `synchronise()`, and return the mean of the residuals over the ranks beside the values that are the same
        on all. Loads on any number of ranks, with the model of any rank, and nothing is lost. A collective.

        Raises:
            RuntimeError, ValueError: `synchronise`'s.
        """
        self.synchronise()
        return self._export(self._checkpoint.second_pass(self._running().session))

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from a checkpoint. Every rank must load one of the same step. Model and optimizer are left alone: load
        theirs, too.

        Args:
            state_dict: from `state_dict` on this rank of as many, or from `consolidated_state_dict`.
            strict: False accepts, with a warning, a checkpoint that has no residuals for this rank.

        Raises:
            ValueError: the checkpoint is of another format, rank, world size, codec or model. Nothing has changed
                then.
        """
        reducer = self._running()
        saved, vectors = self._checkpoint.read(state_dict, strict, REPLICATED_KEYS)
        saved = {**saved, **{what: renamed(saved[what], self._parameters) for what in REPLICATED_KEYS}}
        check_saved(saved, self._parameters, self._all())
        reducer.settle()
        self._feedback.load(vectors)
        self._rounds, self._steps, self._count = saved["step"], saved["local_steps"], saved["counted_steps"]
        self._options.seed, self._moved = saved["seed"], bool(saved["moved"])
        self._under_way = restore(self._all(), saved)
        reducer.forget(self._options.seed, (shared.bucket for shared in self._all()))

    def _export(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with what is the same on all ranks."""
        return saved | replicated(self._all(), None if self._under_way is None else self._arrived())

    @property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            OWNER, self._options, self._feedback, self._parameters, self._group, self._rounds,
            zeros=self._parameters, idle=idle_names(() if self._options.keeps_all else self._excluded),
            local_steps=self._steps, counted_steps=self._count, moved=self._moved,
            due=0 if self._under_way is None else self._under_way.due,
        )  # fmt: skip
