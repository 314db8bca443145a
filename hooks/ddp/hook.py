"""DDP's communication hook, and its state during a step.

Annotations stay evaluated here: `register_comm_hook` compares the hook's with its own.
"""

import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress.codec import Codec
from ...compress.feedback.base import Feedback
from ...compress.formats.layout import Slot
from ..auto.planner import Fallback
from ..comm.between_steps import part_of_step, undivided
from ..comm.untraced import untraced
from ..core.bucket import Bucket
from ..core.dense_path import DensePath
from ..core.options import ExchangeName, Exclude, Options
from ..core.reducer import DENSE_CHECK_INTERVAL, Reducer, Step
from ..core.sparse_gradient import SparseGradient
from ..timeouts import HANDSHAKE_TIMEOUT
from ..training.autograd_end import AtEnd, at_end, current_pass, raise_at_end, waited
from ..training.grad_scaler import LossScale
from .ddp_options import finalized_by_hand, frees_buckets, join_mode, strides_in_bucket
from .discarded import UnusedMeans
from .model_lookup import find_owner
from .state import State
from .untrained import Untrained

Schedule = Callable[[int], Codec]

BIND = (
    "call state.bind(ddp_model) on every rank, once the model is wrapped in DistributedDataParallel and before the "
    "first backward pass"
)


FOREIGN = (
    "this CompressState was made for another model, and would add that one's residuals to the gradients of this one: "
    "make a CompressState for each model, or call state.bind(ddp_model) on every rank before training to begin anew"
)


class CompressState(State):
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
        super().__init__(options, exclude, grad_scaler, process_group)
        if model is not None:
            self.bind(model)  # type: ignore[arg-type]

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
            scaling = self._scaler_sync.loss_scale.scaling(read=joins) if step.own else None
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
        if frees_buckets(model):
            at_end(step.let_go)
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
