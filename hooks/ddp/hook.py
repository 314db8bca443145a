"""DDP's communication hook, and its state during a step.

Annotations stay evaluated here: `register_comm_hook` compares the hook's with its own.
"""

import contextlib
import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...compress.codec import Codec
from ...compress.feedback.base import Feedback
from ...compress.formats.layout import Slot
from ..auto.planner import Fallback
from ..comm import handshake
from ..comm.between_steps import between_steps, part_of_step, undivided, within_step, within_steps_too
from ..comm.untraced import untraced
from ..core.bucket import Bucket
from ..core.checkpoint import Checkpoint, idle_names
from ..core.dense_path import DensePath
from ..core.front import BackwardFront
from ..core.options import ExchangeName, Exclude, Options, check_dtypes, excluded_names
from ..core.reducer import DENSE_CHECK_INTERVAL, Reducer, Step
from ..core.sparse_gradient import SparseGradient, sparse_names
from ..core.statistics import Statistics
from ..timeouts import HANDSHAKE_TIMEOUT
from ..training.autograd_end import AtEnd, at_end, current_pass, raise_at_end, waited
from ..training.grad_scaler import LossScale
from ..training.optimizer_checks import expect_optimizer
from ..training.weak_method import weakly
from .model import (
    Untrained,
    UnusedMeans,
    begins_anew,
    check_options,
    ddp_of,
    finalized_by_hand,
    find_owner,
    frees_buckets,
    join_mode,
    module_of,
    parameters_of,
    strides_in_bucket,
)
from .registration import check_free, expect_hook

Schedule = Callable[[int], Codec]

BIND = (
    "call state.bind(ddp_model) on every rank, once the model is wrapped in DistributedDataParallel and before the "
    "first backward pass"
)


FOREIGN = (
    "this CompressState was made for another model, and would add that one's residuals to the gradients of this one: "
    "make a CompressState for each model, or call state.bind(ddp_model) on every rank before training to begin anew"
)


#: Attributes that belong to a process, and that copies of a state do not get.
OF_PROCESS = ("_reducer", "_buckets", "_names", "_open", "_dense_path", "_untrained", "_discarded", "_known", "overlap")


class CompressState(BackwardFront):
    """The state of `compress_hook` for one DDP model. Constructing it for a model is a collective: ranks compare their
    arguments, which must be equal.

    `CompressState(codec)` can be made before the model and before `init_process_group`. It meets the other ranks in
    `bind()`, or at the first bucket of the model with which it is registered.

    Rank 0 says what is sent on one line of stderr, or of `logging` where that is set up: in the first step, and again
    if it changes. `print(state)` shows the counts so far.

    Args:
        model: the `DistributedDataParallel` model, or a wrapper of it by `torch.compile` or Fabric; may be left out.
        codec: a codec, or a function of the step (counted from 0) that returns one, equal on all ranks:
            `gradwire.schedules` has some.
        exchange: "gather", "two_pass", "mask", "union", "split", "factors", "blocks", "dense", "hierarchical", or
            "auto": the fastest one for each bucket by `hooks.network.cost`. The first state measures the group for
            that, a second or two; over Gloo some steps are then timed with and without compression. Measured times
            differ between runs, and so may decisions: name an exchange where runs must be repeatable.
        error_feedback: keep what compression leaves out, and add it to the next gradient. "auto" does so for codecs
            that contract (the deterministic ones); True makes stochastic codecs round to nearest. Or a strategy:
            `Residual(decay=0.95)`, `Residual(dtype=torch.bfloat16)` in half the memory, `Tracking()` for optimizers
            like Adam, or `Momentum()` for SGD. The last two refuse an optimizer with a momentum. True: `Residual()`.
        warmup_steps: number of first steps that are dense.
        exclude: names of parameters, with `*` for any part (`*.bias`), or a predicate `(name, parameter)`: these stay
            float32, inside the same messages.
        fallback: how "auto" sends a bucket for which compression does not pay (a fast network, a small bucket):
            torch.float32; torch.bfloat16, with error feedback; "auto": the faster of both, float32 where no residuals
            are kept; or None: always compressed.
        topology: the placement of ranks on nodes, for "auto" and "hierarchical", which compress between nodes only:
            ranks on each node, a two-dimensional DeviceMesh (nodes × ranks inside), "auto" (from torchrun's variables),
            or None. Over NCCL, groups inside and between nodes are made once for a process group: by its ranks if
            `init_process_group` was given `device_id`, else by all processes.
        grad_scaler: the GradScaler in use, if any: residuals follow its scale, and return to their values of its last
            `update()` if it skips a step because of an overflow. One optimizer must have all of the model's parameters.
        process_group: carries the exchanges. By default a Gloo group of the model's ranks is made, and dense buckets
            use the model's own group, as without a hook; a model on GPUs uses its own NCCL group. Words between hosts
            use a Gloo group in any case. States may share a group: over Gloo only the first uses its collectives, and
            the others use point-to-point messages; in the model's own group, where DDP uses collectives, all do.
        seed: seed of stochastic rounding.
        entropy_coding: send messages through the package zstandard where they become shorter: the same bits, for
            gradients on CPUs and links below 300 Mbit/s or so (docs/distance.md).

    Raises:
        TypeError, ValueError: an argument is invalid, here or on another rank, or the ranks disagree.
        RuntimeError: there is a model and torch.distributed is not initialised, or a rank did not arrive within 60 s.
    """

    _owner = "CompressState"
    _buckets: dict[int, Bucket | SparseGradient]
    _names: dict[int, str]
    _dense_path: DensePath | None  # reduces steps without the pipeline
    _untrained: Untrained | None  # as of the last check
    _known: Callable[[], Tensor | None]  # the first bucket's buffer, once it is known to be of this model
    _closed = False
    _resumed: int | None = None  # the step as of the last load or copy
    overlap: Any = None  # an `OverlapForward` that is not closed: it waits for means later than DDP

    def __init__(
        self,
        model: nn.Module | Codec | Schedule | None = None,
        codec: Codec | Schedule | None = None,
        *,
        exchange: ExchangeName = "auto",
        error_feedback: bool | Literal["auto"] | Feedback = "auto",
        warmup_steps: int = 0,
        fallback: Fallback = "auto",
        topology: Any = "auto",
        exclude: Exclude | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
        entropy_coding: bool = False,
    ) -> None:
        given: Any = codec
        if codec is None and not isinstance(model, nn.Module):
            given, model = model, None
        if given is None:
            raise TypeError("codec is missing: pass one, such as TopK(density=0.01), or a function of the step")
        options = Options(given, exchange, error_feedback, warmup_steps, fallback, topology, seed, entropy_coding)
        if model is None:  # no other rank waits to hear of errors
            options.check(None)
            options.choice(0)
            LossScale(grad_scaler)
        self._begin_empty(options, exclude, grad_scaler, process_group)
        if model is not None:
            self.bind(model)  # type: ignore[arg-type]

    def _begin_empty(
        self,
        options: Options,
        exclude: Exclude | None,
        grad_scaler: torch.amp.GradScaler | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        """Begin without a model, residuals and counts."""
        self._options = self._given_options = options
        self._exclude = exclude
        self._parameters: dict[str, nn.Parameter] = {}
        self._excluded: frozenset[str] = frozenset()
        self._sparse: frozenset[str] = frozenset()
        self._model: Callable[[], DistributedDataParallel | None] | None = None
        self._bound = False
        #: A checkpoint that was loaded before there was a model, and whether strictly.
        self._loaded: tuple[dict[str, Any], bool] | None = None
        self._step = self._saves = 0
        self._warned = False
        self._keep(None)
        self._discarded: UnusedMeans = UnusedMeans(self._parameters, self._feedback)
        self._statistics = Statistics()
        self._model_group: dist.ProcessGroup | None = None
        self._given_group = process_group
        self._scaler = grad_scaler
        self._disconnect()

    def __repr__(self) -> str:
        options = self._options
        size = f"{len(self._parameters)} parameters" if self._bound else "no model yet"
        text = f"{size}: {options.codec_text} by {options.exchange!r}, step {self._step}"
        if self._reducer is not None:
            group = self._reducer.session.group
            text += f" on rank {group.rank} of {group.size}"
        return f"<CompressState of {text}>"

    @property
    def bound(self) -> bool:
        """True if the state belongs to a model."""
        return self._bound

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler in use. A copy of the state has a copy of it: assign the one that training goes on with.

        Raises:
            ValueError: the state is bound, and only one of the former and the new scaler is enabled.
        """
        return self._scaler_sync.loss_scale.scaler if self._bound else self._scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        new = LossScale(scaler)
        if not self._bound:
            self._scaler = scaler
            return
        if new.skips != self._scaler_sync.skips:
            raise ValueError(
                "a state cannot begin or cease to follow a GradScaler: make another and load its state_dict()"
            )
        self._scaler_sync.loss_scale = new

    @property
    def failed(self) -> bool:
        """True after a failure of the exchange: steps fail until the state is closed on every rank."""
        return self._reducer is not None and self._reducer.session.pipeline.failed

    # -- the model ---------------------------------------------------------------------------------------------------

    @between_steps
    def bind(self, model: nn.Module) -> Self:
        """Bind the state to a DDP model, and return it: ranks compare options and models. A collective; nothing happens
        if the state is bound to that model already.

        A state that was made without a model binds itself at its first bucket, on all ranks. `bind` reports errors
        sooner, and lets a rank take its time for its first batch. A bound state can be bound again, and keeps its
        residuals, after the same parameters have been wrapped again. Call `bind` then if the former wrapper still
        exists: buckets do not know their model.

        Bound to another model of the same names and shapes, it begins anew: nothing of the former model remains. If it
        was loaded or copied since its last step, it goes on from there with the new model.

        The line that says what is sent (`CompressState`) follows in the first step, and again for another model.

        Args:
            model: `CompressState`'s.

        Raises:
            TypeError, ValueError: `CompressState`'s; or the checkpoint loaded before does not fit; or the state
                belongs to another model, of other names or shapes. The state is unchanged then.
            RuntimeError: torch.distributed is not initialised, or a rank did not arrive within 60 s.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "CompressState needs torch.distributed: call torch.distributed.init_process_group() first"
            )
        self._follow(ddp_of(model), self.grad_scaler)
        return self

    def _follow(self, model: DistributedDataParallel, scaler: torch.amp.GradScaler | None) -> None:
        """`bind`, with this GradScaler from now on."""
        if not (self._bound and self._ddp() is model):
            self._bind(model, scaler)
            expect_hook(self._parameters.values(), weakly(self._find_owner), weakly(self._refuse))
        elif scaler is not self.grad_scaler:
            self.grad_scaler = scaler

    @undivided
    def _bind(
        self, model: DistributedDataParallel, scaler: torch.amp.GradScaler | None, within_hook: bool = False
    ) -> Reducer:
        before = self.__dict__.copy()
        problem: Exception | None = None
        try:
            parameters = parameters_of(model)
            if self._bound and begins_anew(self._parameters, parameters):
                self._begin_anew()
        except Exception as error:  # the other ranks must hear of any error
            problem = error
        if self._bound:
            self._idle()
            self._disconnect()
        try:
            if problem is not None:
                raise problem
            self._parameters = parameters
            self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
            self._model, self._model_group = weakref.ref(model), model.process_group
            if not within_hook:
                check_free(model)
            if scaler is not self.grad_scaler:
                self.grad_scaler = scaler
            self._check(model)
            self._discarded = UnusedMeans(self._parameters, self._feedback)
            if not within_hook:
                self._discarded.look(model)
            self._options.prepare(self._step, (p.dtype for p in self._parameters.values()), self._device)
            self._bound = True
            if self._loaded is not None:
                self._load(*self._loaded)
            self._names = {id(p): name for name, p in self._parameters.items()}
        except Exception as error:
            problem = error
        try:
            reducer = self._connect(problem)
        except Exception:
            self.__dict__.update(before)
            raise
        self._loaded = self._scaler = None
        expect_optimizer(self, self._parameters.values(), type(self)._check_optimizer)
        return reducer

    def _begin_anew(self) -> None:
        """Become a state without a model, which nothing of the former one's remains of."""
        with contextlib.suppress(Exception):  # the former model's
            self._idle()
        loaded = (self._checkpoint.of_rank(), True) if self._resumed == self._step else None
        if self.overlap is not None:
            with contextlib.suppress(Exception):
                self.overlap.close()
            self.overlap = None
        self._bound, self._resumed = False, None
        self._begin_empty(self._given_options, self._exclude, None, self._given_group)
        self._loaded = loaded

    def _check(self, model: DistributedDataParallel) -> None:
        self._options.check(dist.get_world_size(model.process_group))
        check_options(model, self._options.strategy)
        if not self._bound:
            self._keep(self._options.strategy, LossScale(self._scaler))
        check_dtypes(self._parameters)
        self._sparse = sparse_names(module_of(model), self._parameters)
        if self._sparse and self._options.keeps_all:
            raise ValueError(
                f"error_feedback={self._options.strategy} hands out a momentum, which parameter {min(self._sparse)!r} "
                "cannot have, as its gradients are sparse: build the embedding with sparse=False, or take Residual()"
            )
        self._excluded = excluded_names(self._exclude, self._parameters)

    def _ddp(self) -> DistributedDataParallel | None:
        return None if self._model is None else self._model()

    def _find_owner(self, parameter: Tensor) -> DistributedDataParallel | None:
        """The model of a parameter; a copied state knows it if both were copied at once."""
        return self._ddp() or find_owner(self, parameter)

    def _expect_model(self, what: str) -> None:
        if not self._bound:
            raise RuntimeError(
                f"{what} needs the model that the state was made without: call state.bind(ddp_model) first, on every "
                "rank"
            )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @within_steps_too
    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state: tensors, numbers and strings only, so `torch.load` reads it with
        `weights_only=True`. It loads on the same rank of the same number of ranks; save one for each rank, or let
        `torch.distributed.checkpoint` save them all.

        Saving changes nothing. Training that goes on and training that loads give the same, with two exceptions: DDP
        has other buckets in its first step, and `"factors"` begins its approximation anew (`PowerSGD`). Parameters that
        may have a residual, but have none yet, have zeros.

        Within a backward pass, as from a signal's handler, it waits until the gradients that have been submitted are
        reduced. The running state does not change. The checkpoint is that of a step that is given up: its number is
        that of the step under way, and what ranks would apply of that step is in the saved residuals.

        Raises:
            RuntimeError: the state has no model yet, and nothing was loaded into it. Or a signal's handler has
                interrupted another save, or a place where a step is half submitted.
        """
        if not self._bound and self._loaded is not None:
            return self._loaded[0]
        self._expect_model("state_dict()")
        self._saves += 1
        if within_step(self):
            return self._saved_within_step()
        self._idle()
        return self._checkpoint.of_rank()

    def _saved_within_step(self) -> dict[str, Any]:
        """`state_dict` as if the step under way were given up."""
        step, number = None, self._step
        if self._reducer is not None:
            self._reducer.session.pipeline.flush()
            step = self._reducer.unsettled
        if step is not None and not step.own and self._discarded.pending:  # of `DDP.join`, before this pass
            step = None
        dense_path = self._dense_path
        if dense_path is not None and (dense_path.under_way or dense_path.backward == current_pass()):
            number = dense_path.number
        elif step is not None:
            number = step.number
        vectors, checkpoint = self._discarded.without(step), self._checkpoint
        checkpoint.facts["step"] = number
        return checkpoint.of_rank(vectors)

    @between_steps
    def consolidated_state_dict(self) -> dict[str, Any]:
        """The mean of the residuals over the ranks, equal on all: loads on any number of ranks, and nothing is lost.

        A collective: every rank must call it, after the same step.

        Raises:
            ValueError: another rank is in another call, or at another step; on every rank alike.
            RuntimeError: another rank did not come within 60 s, or the state has no model yet.
        """
        self._expect_model("consolidated_state_dict()")
        self._idle()
        session = (self._reducer or self._connect(None)).session
        session.agree("consolidated_state_dict()", self._step)
        return self._checkpoint.mean_over_ranks(session)

    @between_steps
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from a checkpoint. Every rank must load one of the same step; the next step compares them. A state
        without a model keeps the checkpoint until it is bound, and checks it then.

        Args:
            state_dict: from `state_dict` on this rank of as many, or from `consolidated_state_dict`.
            strict: False accepts, with a warning, a checkpoint that has no residuals for this rank, or residuals of
                parameters that are excluded, frozen, sparse, of another shape or gone now. Those residuals are lost.

        Raises:
            ValueError: the checkpoint is of another format, rank, world size, codec or model. Nothing has changed
                then.
        """
        if self._bound:
            self._load(state_dict, strict)
        else:
            self._loaded = state_dict, strict

    def _load(self, state_dict: dict[str, Any], strict: bool) -> None:
        with torch.inference_mode(False):
            saved, vectors = self._checkpoint.read(state_dict, strict)
            self._idle()
            self._resume(saved, vectors)
            self._scaler_sync.loaded(saved["scale"])
            self._resumed, self._dense_path = self._step, None

    def _made_buckets(self) -> Iterable[Bucket | SparseGradient]:
        return self._buckets.values()

    @property
    def _checkpoint(self) -> Checkpoint:
        idle = idle_names(() if self._options.keeps_all else self._excluded, self._sparse)
        return Checkpoint(
            "CompressState", self._options, self._feedback, self._parameters, self._group, self._step,
            zeros=self._parameters.keys() - idle, idle=idle, scale=self._scaler_sync.scale,
        )  # fmt: skip

    @between_steps
    def __getstate__(self) -> dict[str, Any]:
        self._idle()
        kept = {name: value for name, value in self.__dict__.items() if name not in OF_PROCESS}
        # As in DDP's own copies, which are of the default group.
        kept["_model_group"] = kept["_given_group"] = kept["_model"] = None
        if self._bound and callable(self._exclude):  # which may not be copied
            kept["_exclude"] = sorted(self._excluded) or None
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._resumed = self._step
        self._discarded = UnusedMeans(self._parameters, self._feedback)
        self._disconnect()
        if self._bound and not self._closed:
            expect_hook(self._parameters.values(), weakly(self._find_owner), weakly(self._refuse))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = type(self).__new__(type(self))
        model = self._ddp()
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied = memo.get(id(model))
        twin._model = None if copied is None else weakref.ref(copied)
        return twin

    # -- other ranks -------------------------------------------------------------------------------------------------

    @between_steps
    def close(self) -> None:
        """Wait for queued work, then release the thread and the connections. The next use makes new ones, which is a
        collective: every rank must close after the same step, or those that go on wait for the group's timeout.
        """
        self._idle()
        if self._reducer is not None:
            self._reducer.close()
        self._disconnect()
        self._closed = True

    def _disconnect(self) -> None:
        self._reducer = self._open = self._dense_path = self._untrained = None
        self._scaler_sync.disconnected()
        self._buckets = {}
        self._known = _nothing
        self._names = {id(p): name for name, p in self._parameters.items()}

    @undivided
    def _connect(self, problem: Exception | None) -> Reducer:
        """Make a session and a reducer. A collective, in which the other ranks hear of this one's problem, if any."""
        options, self._closed = self._options, False
        reducer = self._meet_to_reduce(
            problem, clean=self._step == 0,
            numel=sum(p.numel() for name, p in self._parameters.items() if name not in self._sparse),
            topology=options.topology if options.exchange in ("auto", "hierarchical") else None,
            given=self._given_group, fallback=options.fallback, probes=options.exchange == "auto",
            dense_path=not self._scaler_sync.skips,  # a step that may be undone has to be remembered
        )  # fmt: skip
        reducer.controller.follow(options.choice(self._step))
        if self.overlap is not None:
            reducer.session.order_messages()
        return reducer

    @between_steps
    def prepare_overlap(self, problem: str | None) -> dict[str, nn.Parameter]:
        """Begin to order messages, for `overlap_forward`; returns the parameters that DDP reduces, by name. A
        collective, in which the other ranks hear of this one's problem, if any.

        Raises:
            ValueError: a problem, on every rank alike.
            RuntimeError: a rank did not come.
        """
        self._idle()
        session = (self._reducer or self._connect(None)).session
        if self._device.type != "cpu":
            problem = f"gradients are on {self._device}, where messages keep the order of backward: train without it"
        elif self._sparse or self._scaler_sync.skips:
            what = "a GradScaler decides" if self._scaler_sync.skips else f"{min(self._sparse)!r} is sparse, and merged"
            problem = f"{what} when all gradients are in: leave it out, or overlap_forward"
        if problem is not None:
            session.refuse(f"overlap_forward: {problem}", HANDSHAKE_TIMEOUT)
            raise ValueError(f"overlap_forward: {problem}")
        session.agree("overlap_forward()", self._step)
        session.order_messages()
        return self._parameters

    def _refuse(self, problem: str) -> None:
        """Report a problem to all ranks, and raise it; do nothing once the state is closed."""
        if self._closed:
            return
        error = RuntimeError(f"gradwire: {problem}")
        reducer = self._reducer or self._connect(error)  # a copy has not met the others yet: this raises
        reducer.session.refuse(problem)
        raise error

    @property
    def _group(self) -> Any:
        return self._model_group or dist.group.WORLD

    def _description(self) -> dict[str, Any]:
        return {
            **super()._description(),
            "grad_scaler": self._scaler_sync.skips,
            "step": self._step,
            "the model's parameters": handshake.describe_model(self._parameters, self._excluded, self._sparse),
        }

    def _idle(self) -> None:
        """Wait for queued work, and for the return of means that follows from it."""
        if self._dense_path is not None:  # DDP holds futures that complete before the sums do
            self._dense_path.end()
        self._flush()
        if self._reducer is not None and self._discarded.pending:
            self._discarded.reclaim_unused(self._reducer.session.pipeline)
            self._flush()

    # -- one step, seen from DDP -------------------------------------------------------------------------------------

    @part_of_step
    def submit(self, grad_bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Queue a bucket, for `compress_hook`. DDP calls it in the order of the buckets, equal on all ranks."""
        buffer, dense_path = grad_bucket.buffer(), self._dense_path
        if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "gradwire's exchanges cannot be captured in a CUDA graph: leave backward out of the graph"
            )
        if dense_path is None or not dense_path.under_way:
            dense_path = self._choose_dense_path(grad_bucket, buffer)
        if dense_path is not None:
            future = dense_path.reduce(buffer)
            if grad_bucket.is_last():
                self._step += 1
                dense_path.steps += 1
                self._statistics.steps += 1
                # The last bucket may come in another pass than the first; or in none, as in `DDP.join`.
                if current_pass() != dense_path.backward and not at_end(self._end_dense):
                    self._end_dense()
            return future
        reducer = self._reducer or self._connect(None)  # none after `close`, or in a copy
        bucket = self._bucket_of(grad_bucket, buffer, reducer)
        if self._open is not None and not bucket.names.isdisjoint(self._open.names):
            # An outer pass has raised unnoticed, after one inside it had ended: its means are overwritten by now.
            self._step, self._open = self._open.number + 1, None
        first = self._open is None
        if first and self.overlap is not None:
            self.overlap.begin(self._ddp())
        step = self._open or self._begin(reducer)
        step.names |= bucket.names
        if first:
            step.own = self._queue_end(step)
            # In DDP.join, which reads from the device at every step, ranks that have joined must hear of the scale.
            joins, step.of_present = join_mode(self._ddp())
            scaling = self._scaler_sync.loss_scale.scaling(read=joins) if reducer.skips and step.own else None
            reducer.announce_step(step, bucket, self._saves, scaling)
        future = reducer.reduce(step, bucket, buffer)
        if self.overlap is not None:
            future = self.overlap.take(step, bucket, buffer, future)
        if grad_bucket.is_last():
            self._buckets = {index: b for index, b in self._buckets.items() if index <= bucket.index}
            self._close_step(step, reducer)
            if not AtEnd(partial(self._deliver, step), partial(self._discard, step)).queue():
                self._discarded.expect(step)
        return future

    def _find_model(self, grad_bucket: dist.GradBucket) -> None:
        """Find the model of a bucket: in the first step of a state without a model, of a copy, or after the model has
        been wrapped again. Its options tell which means DDP applies."""
        parameter = grad_bucket.parameters()[0]
        owner, known = find_owner(self, parameter), id(parameter) in self._names
        if owner is not None and known:
            self._model, self._discarded = weakref.ref(owner), UnusedMeans(self._parameters, self._feedback)
        elif owner is not None and (not self._bound or self._resumed == self._step):
            self._bind(owner, self.grad_scaler, within_hook=True)
        elif known:
            warnings.warn(
                "a copied CompressState does not find the model that it is registered at, and cannot keep means that "
                "DDP throws away: say state.bind(ddp_model) on every rank",
                stacklevel=3,
            )
            self._model = _nowhere
        elif not self._bound:
            self._connect(RuntimeError("this CompressState does not find its model: " + BIND))

    def _choose_dense_path(self, grad_bucket: dist.GradBucket, buffer: Tensor) -> DensePath | None:
        """At the begin of a step, or of a backward pass inside another: the dense path, if an all-reduce of each bucket
        is enough; else None."""
        model, dense_path = self._model, self._dense_path
        if model is None or (model is not _nowhere and model() is None):
            self._find_model(grad_bucket)
        if self._open is None:
            if self._known() is not buffer:
                if id(grad_bucket.parameters()[0]) not in self._names:
                    self._refuse_step(FOREIGN)
                self._known = weakref.ref(buffer)
            self._check_trained()
        if dense_path is None or self._step >= dense_path.until or self._must_compare():
            dense_path = self._dense_path = self._dense_run() if self._open is None else None
        if dense_path is not None:  # if the pass raises, no sum in flight may still write to DDP's buckets
            queued = AtEnd(self._end_dense, self._drop_dense).queue()
            dense_path.number, dense_path.backward = self._step, current_pass() if queued else None
        return dense_path

    def _must_compare(self) -> bool:
        """True if an all-dense step needs the announcements of the ranks."""
        model = self._ddp()
        return join_mode(model)[1] or finalized_by_hand(model)

    def _check_trained(self) -> None:
        """At the begin of a step: raise ValueError if a parameter is trained that DDP does not reduce, on every rank
        that takes the pipeline; a rank on the dense path, which has no announcements, fails by its group's abort."""
        model = self._ddp()
        if model is None:
            return
        if self._untrained is None or self._step % DENSE_CHECK_INTERVAL == 0:
            self._untrained = Untrained(model, self._names)
        problem = self._untrained.problem(model)
        if problem is not None:
            self._refuse_step(problem)

    def _refuse_step(self, problem: str) -> NoReturn:
        """Raise ValueError at the begin of a step, on every rank that takes the pipeline."""
        session = (self._reducer or self._connect(ValueError(f"gradwire: {problem}"))).session
        self._idle()
        try:
            session.refuse(problem, HANDSHAKE_TIMEOUT)
        except RuntimeError:
            if session.dense_group is not None:
                session.dense_group.abort()
        raise ValueError(f"gradwire: {problem}")

    def _dense_run(self) -> DensePath | None:
        """A new run of dense steps, at the begin of a step; None where this one needs the pipeline."""
        reducer, model = self._reducer or self._connect(None), self._ddp()
        self._discarded.reclaim_unused(reducer.session.pipeline)
        if getattr(model, "skip_all_reduce_unused_params", False) or self._must_compare():
            return None
        options, step = self._options, self._step
        until = options.warmup_steps if step < options.warmup_steps else sys.maxsize
        if options.scheduled:
            # A user's function may choose otherwise on another rank, which would then wait for an announcement.
            if options.exchange != "dense":
                return None
            until = step + 1
        return reducer.dense_path(
            step, options.choice(step), until, self._device, futures_observed(model) or frees_buckets(model)
        )

    @undivided
    def _drop_dense(self) -> None:
        """Leave the dense path: the backward pass has raised."""
        dense_path, self._dense_path = self._dense_path, None
        if dense_path is not None:
            sums = len(dense_path.under_way)
            dense_path.drop()
            if self._reducer is not None:
                self._reducer.raised(self._step, sums)

    @part_of_step
    def _end_dense(self) -> None:
        """Wait for the means of the dense path, before DDP reads them."""
        dense_path = self._dense_path
        if dense_path is None:
            return
        try:
            interruption = waited(dense_path.end, lambda error: type(error) is RuntimeError)
        except Exception as error:
            model = self._ddp()
            if model is not None:
                model.reducer._reset_state()
            if type(error) is RuntimeError:  # the backend's, which says little
                text = "gradwire: a rank is not responding in a dense step: check that rank's log"
                raise RuntimeError(f"{text}. {error}") from error
            raise
        if interruption is not None:
            raise_at_end(interruption)

    def _begin(self, reducer: Reducer) -> Step:
        self._discarded.reclaim_unused(reducer.session.pipeline)
        if reducer.session.uneven_saves and not self._warned:
            self._warned = True
            warnings.warn(
                "state_dict() was not called equally often on all ranks: it holds the residuals of its own rank and "
                "loads there only. Call it on every rank and save each to a file of its own, or let every rank call "
                "consolidated_state_dict(), which loads anywhere",
                stacklevel=2,
            )
        return super()._begin(reducer)

    def _close_step(self, step: Step, reducer: Reducer) -> None:
        self._dense_path = None
        super()._close_step(step, reducer)

    @part_of_step
    def _ended(self, step: Step) -> None:
        """End the backward pass of the step's first bucket, which may be one inside another."""
        if step is not self._open or self._reducer is None:
            return
        # If DDP skips buckets, the last one is not known in advance; a static graph's first pass marks none as last.
        if getattr(self._ddp(), "skip_all_reduce_unused_params", False) or len(step.names) == len(self._parameters):
            self._close_step(step, self._reducer)
            self._deliver(step)

    @part_of_step
    def _deliver(self, step: Step) -> None:
        """Wait for the means at the end of the backward pass, before DDP applies them."""
        reducer, model = self._reducer, self._ddp()
        if reducer is None:
            return
        pipeline = reducer.session.pipeline
        if self.overlap is not None and not pipeline.failed:
            at_end(self.overlap.backward_ended)
            return
        try:
            interruption = self._await_means()
            if model is not None:
                self._discarded.look(model)
        except Exception:
            self._discard(step)
            if model is not None:  # else DDP would report this pass, and nothing else, at the next one
                model.reducer._reset_state()
            raise
        self._discarded.expect(step)
        at_end(partial(self._discarded.reclaim_unused, pipeline))
        if interruption is not None:  # DDP must apply the means first, as on the other ranks
            raise_at_end(interruption)

    @undivided
    def _discard(self, step: Step) -> None:
        if step is self._open:
            self._dense_path = None
        super()._discard(step)

    def _dropped(self) -> None:
        if self.overlap is not None:
            self.overlap.drop()

    @undivided
    def give_up(self, step: Step, names: set[str]) -> None:
        """The pipeline has failed: raise its error, after the step's means of these parameters, which nobody has used,
        have returned to the residuals."""
        self._idle()
        self._discarded.keep(step, names)
        if self._reducer is not None:
            self._reducer.session.pipeline.wait()

    def _bucket_of(self, grad_bucket: dist.GradBucket, buffer: Tensor, reducer: Reducer) -> Bucket | SparseGradient:
        index = grad_bucket.index()
        bucket = self._buckets.get(index)
        if isinstance(bucket, Bucket) and bucket.buffer() is buffer:
            return bucket
        parameters = grad_bucket.parameters()
        if buffer.layout != torch.strided:
            if bucket is None or not bucket.serves(parameters, buffer):
                (parameter,) = parameters  # DDP gives each sparse gradient a bucket
                bucket = self._buckets[index] = reducer.sparse_gradient(
                    index, self._name_of(parameter, index), parameter
                )
            return bucket
        slots = []
        for parameter, grad in zip(parameters, grad_bucket.gradients(), strict=True):
            name = self._name_of(parameter, index)
            start = int(grad.storage_offset()) - int(buffer.storage_offset())
            slots.append(Slot(name, start, tuple(parameter.shape), strides_in_bucket(parameter, buffer)))
        if not (isinstance(bucket, Bucket) and bucket.serves(parameters, buffer) and bucket.slots == tuple(slots)):
            bucket = self._buckets[index] = Bucket(
                index, parameters, tuple(slots), self._excluded, buffer, self._feedback.strategy
            )
        bucket.buffer = weakref.ref(buffer)  # another one after a rebuild, where strides may have changed
        return bucket

    def _name_of(self, parameter: Tensor, index: int) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"bucket {index} holds a parameter of shape {tuple(parameter.shape)} that this state does not "
                f"know: {FOREIGN}"
            )
        return name


@untraced
def compress_hook(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace a bucket's gradients by their mean over the ranks, compressed on the way.

    Equals DDP's all-reduce and division by the world size, up to the part that the codec leaves out; `state` keeps
    that part, and sends it in a later step. Register it with `model.register_comm_hook(state, compress_hook)`.

    Args:
        state: made for this model, once.
        bucket: DDP's; float32, float16 or bfloat16.

    Returns:
        A future of `bucket.buffer()`, holding the mean.

    Raises:
        RuntimeError: compression or a peer has failed; a later bucket raises it, or the end of the backward pass.
        TypeError: `state` is no CompressState, or `bucket` is not from DDP's own reducer.
    """
    try:
        return _submitted(state, bucket)
    except Exception:
        owner = find_owner(state, bucket.parameters()[0]) if isinstance(bucket, dist.GradBucket) else None
        if owner is not None:  # once the pass has raised: else DDP would report it, and nothing else, at the next one
            AtEnd(_nowhere, owner.reducer._reset_state).queue()
        raise


def _submitted(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(state, CompressState):
        raise TypeError(
            f"compress_hook got a state that is a {type(state).__name__}, expected a CompressState: register it with "
            "model.register_comm_hook(CompressState(model, TopK(density=0.01)), compress_hook)"
        )
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            f"compress_hook got a {type(bucket).__name__}, expected DDP's GradBucket: under torch.compile set "
            'torch._dynamo.config.optimize_ddp = "ddp_optimizer", as "python_reducer" calls hooks otherwise'
        )
    return state.submit(bucket)


def futures_observed(model: nn.Module | None) -> bool:
    """True if anybody but DDP gets the futures of the hook."""
    return {hook for hook, _ in getattr(model, "_comm_hooks", ())} != {compress_hook}


def _nowhere() -> None:
    """The model of a copy that does not find it; the end of a pass with nothing to do."""


def _nothing() -> None:
    """The buffer of a bucket that has not been seen."""
