"""The parts of `CompressState` outside a step: options, feedback, model, handshake and checkpoints."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..comm import handshake
from ..comm.between_steps import between_steps, undivided, within_step, within_steps_too
from ..core.bucket import Bucket
from ..core.checkpoint import Checkpoint, idle_names
from ..core.dense_path import DensePath
from ..core.front import BackwardFront
from ..core.options import Exclude, Options, check_dtypes, excluded_names
from ..core.reducer import Reducer
from ..core.sparse_gradient import SparseGradient, sparse_names
from ..core.statistics import Statistics
from ..timeouts import HANDSHAKE_TIMEOUT
from ..training.grad_scaler import LossScale
from ..training.optimizer_checks import expect_optimizer
from ..training.weak_method import weakly
from .ddp_options import check_options
from .discarded import UnusedMeans
from .model_lookup import begins_anew, ddp_of, find_owner, module_of, parameters_of
from .registration import check_free, expect_hook, expect_hook_of_copy
from .untrained import Untrained

#: Attributes that belong to a process, and that copies of a state do not get.
OF_PROCESS = ("_reducer", "_buckets", "_names", "_open", "_dense_path", "_untrained", "_discarded", "_known", "overlap")


class State(BackwardFront):
    """The part of `CompressState` outside a step.

    Args:
        options: the user's options.
        exclude, grad_scaler, process_group: `CompressState`'s.
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
        options: Options,
        exclude: Exclude | None,
        grad_scaler: torch.amp.GradScaler | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
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
            expect_hook(self._parameters.values(), weakly(self._ddp), weakly(self._refuse))
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
        State.__init__(self, self._given_options, self._exclude, None, self._given_group)
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
        """The model of a copied state, which the state knows if both were copied at once."""
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
        if self._dense_path is not None and self._dense_path.under_way:
            number = self._dense_path.number
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
            expect_hook_of_copy(self._parameters.values(), weakly(self._find_owner), weakly(self._refuse))

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
        reducer = self._meet(
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


def _nothing() -> None:
    """The buffer of a bucket that has not been seen."""
