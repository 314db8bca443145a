"""DDP's communication hook, and its state: DDP's buckets, its rebuilds, its oddities.

Annotations stay evaluated here: `register_comm_hook` compares the hook's with its own.
"""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import __version__
from ..compress.codec import Codec
from ..compress.feedback import Feedback
from ..compress.layout import Slot
from ..compress.memory import Memory
from . import checkpoint
from .backward import AtEnd, at_end
from .comm import handshake
from .connection import Connection
from .delivery import Delivery
from .loss_scale import LossScale, Tracker
from .optimizers import expect_optimizer, judge
from .options import ExchangeName, Exclude, Options, check_model, excluded_names
from .reducer import Reducer, Step, Unit
from .registration import expect_hook
from .statistics import Statistics

#: What belongs to a process and is left out of copies of a state.
OF_PROCESS = ("_reducer", "_units", "_names", "_open", "_straight")


class CompressState:
    """The state of `compress_hook` for one DDP model. Constructing it is a collective: every rank must, and with equal
    arguments, which are compared.

    Args:
        model: the `DistributedDataParallel` model, or what `torch.compile` made of it.
        codec: a codec, or a function of the step (counted from 0) that returns one, equal on all ranks, as
            `gradwire.schedules` has them.
        exchange: "gather", "two_pass", "union", "split", "dense", "hierarchical", or "auto": what is fastest for each
            bucket by `hooks.auto.cost`, whose probe of the group takes a second or two when the first state is made;
            over Gloo some steps are then trained each way (`hooks.auto.trial`). Measured times differ between runs, and
            so may decisions: name an exchange where runs must be repeatable.
        error_feedback: whether to keep what compression leaves out and add it to the next gradient. "auto" does so for
            codecs that contract (the deterministic ones); True makes stochastic codecs round to nearest. Or a strategy
            of its own: `Residual(decay=0.95)`, `Tracking()` for optimizers like Adam, or `Momentum()` for SGD, both of
            which want an optimizer without momentum, and refuse the first step of another; True means `Residual()`.
        warmup_steps: this many first steps are dense.
        exclude: names of parameters, with "*" for any part ("*.bias"), or a predicate `(name, parameter)`: these stay
            float32, inside the same messages.
        fallback: what "auto" sends where compression does not pay (a fast network, a small bucket): torch.float32,
            torch.bfloat16 (with error feedback), or None: it compresses always.
        topology: how ranks lie on nodes, for "auto" and "hierarchical", which compress between nodes only: ranks on
            each node, a two-dimensional DeviceMesh (nodes × ranks inside), "auto" (what torchrun says), or None. Over
            NCCL groups inside and between nodes are made once for a process group, by all processes.
        grad_scaler: the GradScaler in use, if any: residuals follow its scale, and where it skips a step because of an
            overflow they are put back as they were after its last `update()`. All of the model's parameters are taken
            to be in one optimizer's hands.
        process_group: used for the exchanges and nothing else. By default a Gloo group of the model's ranks is made,
            and dense buckets go in the model's own, as without a hook; for a model on GPUs whose own group is NCCL's,
            that one serves. What the host has to know goes in a Gloo group in any case.
        seed: of stochastic rounding.

    Raises:
        TypeError, ValueError: an argument cannot work, here or on another rank, or the ranks disagree.
        RuntimeError: torch.distributed is not initialised, or a rank did not arrive within 60 s.
    """

    _reducer: Reducer | None
    _units: dict[int, Unit]
    _names: dict[int, str]
    _open: Step | None  # from its first bucket to its last
    _straight: bool | None  # whether the step that is open goes without it
    _delivery: Delivery

    def __init__(
        self,
        model: nn.Module,
        codec: Codec | Callable[[int], Codec],
        *,
        exchange: ExchangeName = "auto",
        error_feedback: bool | Literal["auto"] | Feedback = "auto",
        warmup_steps: int = 0,
        fallback: torch.dtype | None = torch.float32,
        topology: Any = "auto",
        exclude: Exclude | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "CompressState needs torch.distributed: call torch.distributed.init_process_group() first"
            )
        model = getattr(model, "_orig_mod", model)
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"model is a {type(model).__name__}, expected DistributedDataParallel: wrap the model in it first "
                "(FSDP reduces its gradients by itself and cannot use this hook)"
            )
        self._options = Options(codec, exchange, error_feedback, warmup_steps, fallback, topology, seed)
        self._parameters = {
            clean_name(name): p  # in the order in which DDP counts them
            for name, p in model.module.named_parameters()
            if p.requires_grad and name not in model.parameters_to_ignore
        }
        self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._excluded: frozenset[str] = frozenset()
        self._model: Callable[[], DistributedDataParallel | None] | None = weakref.ref(model)
        self._step = self._saves = 0
        self._warned = False
        self._feedback = Memory()
        self._tracker = Tracker(LossScale(None), self._feedback)
        self._delivery = Delivery(self._parameters, self._feedback)
        self._statistics = Statistics()
        self._model_group: dist.ProcessGroup | None = model.process_group
        self._given_group = process_group
        self._disconnect()
        problem: Exception | None = None
        try:
            self._check(model, LossScale(grad_scaler), exclude)
            choice = self._options.choice(0)
            for dtype in {p.dtype for p in self._parameters.values()}:
                choice.codec.kernels(self._device).prepare(choice.codec, dtype, self._device)
            self._feedback.strategy.prepare(self._device)
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        self._connect(problem)
        expect_hook(self._parameters.values(), self._model, partial(_refuse, weakref.ref(self)))
        expect_optimizer(self._parameters.values(), partial(_judge, weakref.ref(self)))

    def __repr__(self) -> str:
        options = self._options
        text = f"{len(self._parameters)} parameters: {options.codec_text} by {options.exchange!r}, step {self._step}"
        if self._reducer is not None:
            group = self._reducer.connection.group
            text += f" on rank {group.rank} of {group.size}"
        return f"<CompressState of {text}>"

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler in use. A copy of the state has a copy of it: assign the one that training goes on with.

        Raises:
            ValueError: it is enabled and the one before was not, or the other way round.
        """
        return self._tracker.loss_scale.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        new = LossScale(scaler)
        if new.skips != self._tracker.skips:
            raise ValueError(
                "a state cannot begin or cease to follow a GradScaler: make another and load its state_dict()"
            )
        self._tracker.loss_scale = new

    @property
    def step(self) -> int:
        """Synchronised backward passes so far."""
        return self._step

    @property
    def deciding(self) -> bool:
        """Whether "auto" still tries which is faster, to compress or not: over Gloo it does for some twenty steps."""
        self._flush()
        return self._reducer is not None and self._reducer.tuner.deciding

    def statistics(self) -> Statistics:
        """What this rank has done so far, as of now; call it between steps."""
        self._flush()
        return copy.deepcopy(self._statistics)

    # -- one step, seen from DDP -------------------------------------------------------------------------------------

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Queue a bucket: what `compress_hook` does. DDP calls it in the order of the buckets, equal on all ranks."""
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise TypeError("gradwire cannot compress sparse gradients: build the embedding with sparse=False")
        if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "gradwire's exchanges cannot be captured in a CUDA graph: leave backward out of the graph"
            )
        if self._model is None:
            self._model = _registered_at(self)
        reducer = self._reducer or self._connect(None)  # none after `close`, or in a copy
        if self._goes_straight(reducer):
            if not reducer.straight:  # a pass that raises must not leave DDP's buckets to a sum that is under way
                AtEnd(_nothing, self._drop_straight).queue()
            future = reducer.reduce_straight(buffer)
            if bucket.is_last():
                self._straight, self._step = None, self._step + 1
                self._statistics.steps += 1
                if not at_end(self._end_straight):
                    self._end_straight()
            return future
        unit = self._unit(bucket, buffer)
        if self._open is not None and not unit.names.isdisjoint(self._open.names):
            # A pass that raised unnoticed, after one inside it had ended: its means are overwritten by now.
            self._step, self._open = self._open.number + 1, None
        first = self._open is None
        step = self._open or self._begin(reducer)
        step.names |= unit.names
        if first:
            step.own = AtEnd(partial(self._ended, step), partial(self._throw_away, step)).queue()
            scaling = self._tracker.loss_scale.scaling() if step.own else None
            reducer.greet(step, unit, self._saves, scaling)
        future = reducer.reduce(step, unit, buffer)
        if bucket.is_last():
            self._units = {index: u for index, u in self._units.items() if index <= unit.index}
            self._close(step, reducer)
            if not AtEnd(partial(self._deliver, step), partial(self._throw_away, step)).queue():
                self._delivery.expect(step)
        return future

    def _goes_straight(self, reducer: Reducer) -> bool:
        """Whether nothing is to be done but an all-reduce of each bucket, in this step."""
        if self._open is None and self._straight is None:
            self._delivery.settle(reducer.connection.pipeline)
            leaves_out = getattr(self._ddp(), "skip_all_reduce_unused_params", False)
            # A user's function might choose otherwise on another rank, which would then wait to hear from this one.
            fixed = not self._options.scheduled or self._options.exchange == "dense"
            self._straight = (
                fixed and not leaves_out and reducer.goes_straight(self._step, self._options.choice(self._step))
            )
        return bool(self._straight)

    def _drop_straight(self) -> None:
        """The backward pass has raised in a step that goes without the pipeline."""
        self._straight = None
        if self._reducer is not None:
            self._reducer.drop_straight()

    def _end_straight(self) -> None:
        """DDP is about to wait for the means of a step that went without the pipeline."""
        model = self._ddp()
        try:
            if self._reducer is not None:
                self._reducer.end_straight()
        except Exception:
            if model is not None:
                model.reducer._reset_state()
            raise

    def _begin(self, reducer: Reducer) -> Step:
        self._delivery.settle(reducer.connection.pipeline)
        if reducer.connection.uneven_saves and not self._warned:
            self._warned = True
            warnings.warn(
                "state_dict() was not called equally often on all ranks: it holds the residuals of its own rank and "
                "loads there only. Call it on every rank and save each to a file of its own, or let every rank call "
                "consolidated_state_dict(), which loads anywhere",
                stacklevel=2,
            )
        step = self._open = reducer.begin(self._step, self._options.choice(self._step))
        return step

    def _close(self, step: Step, reducer: Reducer) -> None:
        """Every bucket of the step has been submitted."""
        self._open = self._straight = None
        self._step = step.number + 1
        reducer.end(step)

    def _ended(self, step: Step) -> None:
        """The backward pass that had the step's first bucket has ended. It may have been one inside another."""
        if step is not self._open or self._reducer is None:
            return
        # Where DDP leaves out buckets nobody knows the last one, and in a static graph's first pass no bucket is called
        # that.
        if getattr(self._ddp(), "skip_all_reduce_unused_params", False) or len(step.names) == len(self._parameters):
            self._close(step, self._reducer)
            self._deliver(step)

    def _deliver(self, step: Step) -> None:
        """The backward pass is over, but for what DDP does with the means: waits for them, as DDP would."""
        reducer, model = self._reducer, self._ddp()
        if reducer is None:
            return
        pipeline = reducer.connection.pipeline
        try:
            pipeline.wait()
        except Exception:
            self._throw_away(step)
            if model is not None:  # else DDP would complain of this pass at the next one, and of nothing else
                model.reducer._reset_state()
            raise
        if model is not None:
            self._delivery.look(model)
        self._delivery.expect(step)
        at_end(partial(self._delivery.settle, pipeline))

    def _throw_away(self, step: Step) -> None:
        """The backward pass has raised."""
        if step is self._open:
            self._open, self._straight, self._step = None, None, step.number + 1
        if self._reducer is not None:
            self._delivery.throw_away(step, self._reducer.connection.pipeline)

    def _unit(self, bucket: dist.GradBucket, buffer: Tensor) -> Unit:
        index, parameters = bucket.index(), bucket.parameters()
        unit = self._units.get(index)
        if unit is None or not unit.serves(parameters, buffer):
            slots = []
            for parameter, grad in zip(parameters, bucket.gradients(), strict=True):
                name = self._names.get(id(parameter))
                if name is None:
                    raise ValueError(
                        f"bucket {index} holds a parameter of shape {tuple(parameter.shape)} that this state does not "
                        "know: it was made for another model; make a CompressState for each model"
                    )
                start = int(grad.storage_offset()) - int(buffer.storage_offset())
                slots.append(Slot(name, start, tuple(parameter.shape), strides_in_bucket(parameter)))
            unit = self._units[index] = Unit(
                index, parameters, tuple(slots), self._excluded, buffer, self._feedback.strategy
            )
        return unit

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state: tensors, numbers and strings only, so `torch.load` reads it with
        `weights_only=True`. It loads on the same rank of the same number of ranks; save one for each rank, or let
        `torch.distributed.checkpoint` save them all.

        Residuals that an owner keeps for all ranks are folded into its own, here and in the running state, so that
        going on and loading give the same. Parameters that may have a residual, but have none yet, have zeros.
        """
        self._idle()
        self._saves += 1
        self._feedback.fold()
        return self._export(checkpoint.rank_key(*self._world()), self._feedback.everything())

    def consolidated_state_dict(self) -> dict[str, Any]:
        """The mean of the residuals over the ranks, equal on all: loads on any number of ranks, and nothing is lost.

        A collective: every rank must call it, after the same step.

        Raises:
            ValueError: another rank does something else now, or is at another step; on every rank alike.
            RuntimeError: another rank did not come within 60 s.
        """
        self._idle()
        connection = (self._reducer or self._connect(None)).connection
        connection.agree("consolidated_state_dict()", self._step)
        self._feedback.fold()
        means = checkpoint.means(connection, self._feedback.everything(), self._parameters)
        return self._export(checkpoint.MEAN, means)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from a checkpoint. Every rank must load one of the same step; the next step compares them.

        Args:
            state_dict: from `state_dict` on this rank of as many, or from `consolidated_state_dict`.
            strict: with False, a checkpoint that has no residuals for this rank loads too, with a warning: what
                compression had left out here is then lost.

        Raises:
            ValueError: it is of another format, rank, world size, codec or model. Nothing has changed then.
        """
        key = checkpoint.rank_key(*self._world())
        expected = self._export(key, {vector: {} for vector in self._feedback.strategy.vectors}, fill=False)
        saved, vectors = checkpoint.read(state_dict, expected, key, self._parameters, strict)
        self._idle()
        self._feedback.load(vectors)
        self._step = saved["step"]
        self._tracker.loaded(saved["scale"])
        self._options.seed = saved["seed"]
        if self._reducer is not None:
            self._reducer.forget(self._options.seed, self._units.values())
        self._straight = None

    def _export(self, key: str, vectors: Mapping[str, dict[str, Tensor]], fill: bool = True) -> dict[str, Any]:
        if fill and self._options.may_keep():
            excluded = () if self._options.keeps_all else self._excluded
            kept = {name: p for name, p in self._parameters.items() if name not in excluded}
            vectors = {vector: checkpoint.filled(found, kept) for vector, found in vectors.items()}
        facts = {
            "codec": self._options.codec_text,
            "step": self._step,
            "seed": self._options.seed,
            "scale": self._tracker.scale,
        }
        return checkpoint.export(key, vectors, **facts)

    def __getstate__(self) -> dict[str, Any]:
        self._idle()
        kept = self.__dict__.copy()
        for name in (*OF_PROCESS, "_delivery"):
            kept.pop(name, None)
        # As in DDP's own copies, which are of the default group.
        kept["_model_group"] = kept["_given_group"] = kept["_model"] = None
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._delivery = Delivery(self._parameters, self._feedback)
        self._disconnect()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressState":
        twin = memo[id(self)] = type(self).__new__(type(self))
        model = self._ddp()
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied = memo.get(id(model))
        twin._model = None if copied is None else weakref.ref(copied)
        return twin

    def _ddp(self) -> DistributedDataParallel | None:
        return None if self._model is None else self._model()

    # -- other ranks -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for what is queued, then give back the thread and the connections. The next use makes new ones."""
        self._idle()
        self._disconnect()

    def _disconnect(self) -> None:
        for name in OF_PROCESS:
            self.__dict__.pop(name, None)
        self._reducer = self._open = self._straight = None
        self._tracker.disconnected()
        self._units = {}
        self._names = {id(p): name for name, p in self._parameters.items()}

    def _connect(self, problem: Exception | None) -> Reducer:
        """Meet the other ranks, who hear of the problem that this one has, if it has any. A collective."""
        options = self._options
        connection = Connection(
            self._model_group or dist.group.WORLD,
            self._given_group,
            self._device,
            {} if problem is not None else self._description(),
            problem,
            options.topology if options.exchange in ("auto", "hierarchical") else None,
            options.fallback,
            probes=options.exchange == "auto",
            straight=not self._tracker.skips,  # a step that may be undone has to be remembered
        )
        parts = self._feedback, self._tracker, self._statistics
        numel = sum(p.numel() for p in self._parameters.values())
        reducer = self._reducer = Reducer(connection, *parts, options.seed, clean=self._step == 0, numel=numel)
        reducer.tuner.follow(options.choice(self._step))
        return reducer

    def _world(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        group: Any = self._model_group or dist.group.WORLD
        return dist.get_rank(group), dist.get_world_size(group)

    def _description(self) -> dict[str, Any]:
        return {
            "version": __version__,
            **self._options.describe(self._world()[1]),
            "grad_scaler": self._tracker.skips,
            "step": self._step,
            "the model's parameters": handshake.describe_model(self._parameters, self._excluded),
        }

    def _check(self, model: DistributedDataParallel, loss_scale: LossScale, exclude: Exclude | None) -> None:
        if getattr(model, "_use_python_reducer", False):
            raise ValueError(
                'torch._dynamo.config.optimize_ddp="python_reducer" calls hooks with other arguments: set it to '
                '"ddp_optimizer"'
            )
        self._options.check(dist.get_world_size(model.process_group))
        clips = self._options.strategy is not None and self._options.strategy.largest_norm is not None
        if clips and model.static_graph and getattr(model, "skip_all_reduce_unused_params", False):
            raise ValueError(
                f"error_feedback={self._options.strategy} waits for the norm of all gradients; with static_graph=True "
                "and skip_all_reduce_unused_params=True nobody knows when they are there: leave out one of the three"
            )
        self._feedback = Memory(self._options.strategy, keep_previous=loss_scale.skips)
        self._tracker = Tracker(loss_scale, self._feedback)
        self._delivery = Delivery(self._parameters, self._feedback)
        self._delivery.look(model)
        check_model(model.module, self._parameters)
        self._excluded = excluded_names(exclude, self._parameters)

    def _flush(self) -> None:
        if self._reducer is not None:
            self._reducer.connection.pipeline.flush()

    def _idle(self) -> None:
        """Wait for what is queued, and for what follows from it."""
        self._flush()
        if self._reducer is not None and self._delivery.pending:
            self._delivery.settle(self._reducer.connection.pipeline)
            self._flush()


def compress_hook(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace a bucket's gradients by their mean over the ranks, compressed on the way.

    Equivalent to DDP's all-reduce followed by a division by the world size, up to what the codec leaves out; that
    stays in `state` and goes with a later step. Register it with `model.register_comm_hook(state, compress_hook)`.

    Args:
        state: made for this model, once.
        bucket: DDP's; float32, float16 or bfloat16.

    Returns:
        A future of `bucket.buffer()`, holding the mean.

    Raises:
        RuntimeError: compression or a peer has failed; later buckets raise it, or else the end of the backward pass.
        TypeError: this is no bucket of DDP's own reducer.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise TypeError(
            f"compress_hook got a {type(bucket).__name__}, expected DDP's GradBucket: under torch.compile set "
            'torch._dynamo.config.optimize_ddp = "ddp_optimizer", as "python_reducer" calls hooks otherwise'
        )
    return state.submit(bucket)


def strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """How DDP lays a gradient into its bucket: with the parameter's strides if they leave no gap, else contiguous."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= size
    return parameter.stride()


def _nothing() -> None: ...


def _registered_at(state: CompressState) -> Callable[[], DistributedDataParallel | None]:
    """The model whose hook has this state: pickling does not tell, and what DDP does with the means must be known."""
    for found in gc.get_objects():
        # No `isinstance`: it asks each object for its class, and some proxies raise.
        if DistributedDataParallel in type(found).__mro__ and any(s is state for _, s in found._comm_hooks):
            return weakref.ref(found)
    warnings.warn(
        "a copied CompressState does not find the model that it is registered at, and cannot keep means that DDP "
        "throws away: register the state itself, or make a new one and load its state_dict()",
        stacklevel=3,
    )
    return lambda: None


def clean_name(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put in front."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _judge(state: weakref.ref[CompressState], optimizer: torch.optim.Optimizer) -> None:
    """`judge`, unless the state is closed, or gone."""
    mine = state()
    if mine is not None and mine._reducer is not None:
        judge(mine._options, optimizer)


def _refuse(state: weakref.ref[CompressState], problem: str) -> None:
    """Tell all ranks; nothing once a state is closed, or gone."""
    mine = state()
    if mine is not None and mine._reducer is not None:
        mine._reducer.connection.refuse(problem)
        raise RuntimeError(f"gradwire: {problem}")
