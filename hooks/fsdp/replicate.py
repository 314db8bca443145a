"""FSDP2's all-reduce hook, and its state."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.between_steps import Reentered, between_steps, undivided
from ..comm.pipeline import Pipeline
from ..core.bucket import Bucket
from ..core.checkpoint import Vectors
from ..core.discarded import DiscardedMeans, Means
from ..core.options import Exclude
from ..core.reducer import Step
from ..core.session import Announcement, digest
from ..core.statistics import Statistics
from ..training.autograd_end import raise_at_end, waited
from . import gloo_reduce_scatter as direct
from .front import Part, ShardedFront
from .options import FSDPOptions
from .torch_internals import Shards, find_shards

#: The module of the compressed reduce-scatter.
_SCATTER = f"{__package__}.shard"
#: Raised on all replicas if one has submitted other gradients.
UNEQUAL = (
    "gradwire: in the last backward pass not all replicas had gradients of the same parameters: let all use the "
    "same ones, or give unused ones zeros by set_reduce_scatter_unused_params(True)"
)


@dataclass(frozen=True)
class _Submitted:
    """Shards in flight.

    Attributes:
        names: names of the parameters with gradients in them.
        missing: names of those to whose gradients the mean has still to be added.
    """

    shards: Shards
    names: frozenset[str]
    missing: frozenset[str]
    future: torch.futures.Future[Tensor]


class FSDPState(ShardedFront):
    """The state of `compress_fsdp` with `mesh`; the model's hooks hold it."""

    _closed_text = "this FSDPState is closed: call compress_fsdp again"

    @torch.inference_mode(False)  # a step changes what is made here
    def __init__(
        self, model: nn.Module, options: FSDPOptions, mesh: DeviceMesh, exclude: Exclude | None, part: Part
    ) -> None:
        super().__init__()
        self._options = options
        group: Any = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
        self._group: dist.ProcessGroup = group
        self._frozen = list[Shards]()
        self._submitted: list[_Submitted] = []
        #: Means of steps that ended before the pass did, and the parameters to whose gradients they were added.
        self._earlier: list[tuple[Means, Set[str]]] = []
        self._statistics = Statistics()
        problem: Exception | None = None
        try:
            self._find(model, mesh, part.groups())
            self._options.check(self._group.size())
            self._exclude(exclude)
            options.prepare(0, (shards.bucket_dtype for shards in self._shards), self._device)
        except Exception as error:  # the other ranks must hear of any error
            problem = error
        self._keep(options.strategy)
        self._discarded = DiscardedMeans(self._feedback)
        session = self._meet_to_reduce(
            problem, clean=True, numel=sum(shards.numel for shards in self._shards),
            speaks=all(dist.get_rank(shards.process_group) == 0 for shards in self._shards),
            fallback=options.fallback, probes=options.exchange == "auto",
        ).session  # fmt: skip
        #: The parameters that replicas have used, compared while their gradients are in flight.
        self._uses = Announcement(session.control.channel("used parameters"), 1)
        for shards in self._shards:
            shards.attach(self._reduce)
        for shards in self._frozen:  # if they are trained later on, nothing reduces them among the replicas
            shards.watch()
        direct.install(self._shards)
        self._observe(model)

    def __repr__(self) -> str:
        shards = f"{len(self._parameters)} parameters' shards"
        return f"<FSDPState of {shards}: {self._options.codec_text} by {self._options.exchange!r}, step {self._step}>"

    @between_steps
    def close(self) -> None:
        """Wait for gradients in flight, then release the thread and the connections. A backward pass of the model
        raises from now on, as nothing would reduce its gradients among the replicas; call `compress_fsdp` again.
        """
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
            self._by_hand.detach()
            for shards in self._shards:
                shards.detach(_closed)
            for shards in self._frozen:
                shards.detach(None)

    # -- one step, seen from FSDP ------------------------------------------------------------------------------------

    @undivided
    def _reduce(self, shards: Shards, output: Tensor) -> None:
        """FSDP's hook: replace this rank's shard of a parameter group's gradients by the replicas' mean."""
        reducer = self._running()
        if torch.promote_types(output.dtype, shards.dtype) != shards.dtype:
            raise TypeError(
                f"FSDP reduces {output.dtype}, and its policy says {shards.dtype}: call compress_fsdp again"
            )
        if output.is_cuda:  # FSDP frees it while kernels on this stream still have to read it
            output.record_stream(torch.cuda.current_stream(output.device))
        if not shards.group.all_reduce_grads:  # `set_requires_all_reduce(False)`: later
            shards.hold(output)
            output.zero_()
            return
        if self._open is not None and not self._open.names.isdisjoint(shards.parameters):
            self._ended(self._open, again=True)  # a module that is used twice in a pass is reduced twice
        pipeline = reducer.session.pipeline
        if pipeline.threaded:
            shards.check_hooks()
        buffer = shards.submit(output, in_place=shards.can_wait or not pipeline.threaded)
        bucket = shards.bucket(buffer, self._excluded, self._feedback.strategy)
        step, outside = self._open, False
        if step is None:
            if not self._uses.equal():  # over NCCL, where the host has not waited for the last comparison
                raise RuntimeError(UNEQUAL)
            step = self._begin(reducer)
            outside = not self._by_hand.active and not self._queue_end(step)
            reducer.announce_step(step, bucket)
        step.names |= bucket.names
        future = reducer.reduce(step, bucket, buffer)
        names = shards.held
        missing = frozenset[str]() if buffer is output else names
        if pipeline.threaded:
            if buffer is not output:
                output.zero_()  # FSDP adds it to gradients now; the mean follows
        else:
            future.wait()  # on a GPU: later kernels on this stream wait
            if buffer is not output:
                shards.put_back(output)
                missing -= shards.used
        self._submitted.append(_Submitted(shards, names, missing, future))
        if outside:
            self._ended(step)

    @undivided
    def _ended(self, step: Step, again: bool = False) -> None:
        """End a step: the pass is over, or `again`: the next gradients are of a module that is in this step already."""
        if step is not self._open or self._reducer is None:
            return
        self._close_step(step, self._reducer)
        pipeline, submitted = self._reducer.session.pipeline, self._submitted
        used = repr((step.number, sorted((part.shards.index, sorted(part.names)) for part in submitted)))
        self._uses.start(digest(used))
        interruption = waited(partial(self._agree, step, pipeline), lambda error: isinstance(error, RuntimeError))
        self._deliver(step, pipeline, interruption, again)

    def _agree(self, step: Step, pipeline: Pipeline) -> None:
        """Raise RuntimeError, on all replicas, if not all have submitted the same."""
        assert self._reducer is not None
        try:
            if pipeline.threaded and not self._uses.equal():
                raise RuntimeError(UNEQUAL)
        except RuntimeError as error:
            if not isinstance(error, Reentered):
                self._reducer.session.group.abort()  # some ranks wait for messages that never come
                self._discard(step)
            raise

    def _deliver(self, step: Step, pipeline: Pipeline, interruption: BaseException | None, again: bool) -> None:
        """Wait for the means, and add them as FSDP would; then raise `interruption`, from a signal handler."""
        try:
            interruption = self._await_means() or interruption
        except Exception:
            self._discard(step)
            raise
        step.settled = True
        submitted, self._submitted = self._submitted, []
        unused = set[str]()
        for part in submitted:
            part.future.wait()
            part.shards.deliver(part.missing)
            part.shards.held = frozenset()
            unused |= part.shards.parameters.keys() - part.names
        if unused:
            # No replica has a gradient of these: their mean, of residuals alone, reaches no optimizer.
            pipeline.submit(partial(self._discarded.keep, step, unused)).wait()
        # If the pass raises later on, nobody applies these either.
        applied = step.names - unused
        self._earlier = [*self._earlier, (self._discarded.copied(step), applied)] if again else []
        step.reduced.clear()  # else FSDP's gradients would live as long as the step
        if interruption is not None:
            raise_at_end(interruption)

    def _dropped(self) -> None:
        for part in self._submitted:
            part.shards.held = frozenset()
        self._submitted.clear()
        earlier, self._earlier = self._earlier, []
        pipeline = self._session.pipeline if self._reducer is not None else None
        if earlier and pipeline is not None and not pipeline.failed:
            pipeline.submit(partial(self._return, earlier)).wait()

    def _return(self, earlier: Sequence[tuple[Means, Set[str]]]) -> Tensor:
        """Return copied means to the residuals. Runs on the pipeline."""
        for means, names in earlier:
            for layout, mean in means:
                self._feedback.restore(layout, mean, [(slot, None) for slot in layout if slot.name in names])
        return torch.empty(0, device="cpu")

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @between_steps
    def state_dict(self) -> dict[str, Any]:
        """The mean of the replicas' residuals, sharded like the parameters (`DTensor`), and a few numbers: for
        `torch.distributed.checkpoint`, which loads it on any mesh. Nothing is lost: replicas go on with the mean.

        A collective among replicas: every rank must call it, after the same step. Saving changes nothing. Training
        that loads differs from training that goes on, as its residuals have been averaged.

        Raises:
            ValueError: another replica is in another call, or at another step; on every rank alike.
            RuntimeError: another replica did not come within 60 s, or gradients have been held back.
        """
        reducer = self._running()
        if any(shards.held for shards in self._shards):
            raise RuntimeError(
                "after set_requires_all_reduce(False) gradients wait for the pass that reduces them, and no checkpoint "
                "has them: save after that"
            )
        reducer.flush()
        reducer.session.agree("state_dict()", self._step)
        return self._checkpoint.mean_over_ranks(reducer.session)

    def go_on(self, saved: Mapping[str, Any], vectors: Vectors) -> None:
        self._running().flush()
        self._resume(saved, vectors)

    def _made_buckets(self) -> Iterable[Bucket]:
        return [shards.made_bucket for shards in self._shards if shards.made_bucket is not None]

    # -- what must be right ------------------------------------------------------------------------------------------

    def _find(self, model: nn.Module, mesh: DeviceMesh, only: Container[int] | None) -> None:
        """Find all of the model's shards, and the names of their parameters.

        Raises:
            TypeError, ValueError, RuntimeError: the model cannot be compressed.
        """
        if mesh.ndim != 1:
            dimensions = ", ".join(mesh.mesh_dim_names or ("without names",))
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions, {dimensions}: pass the one over which shards are replicated, as in "
                'compress_fsdp(…, mesh=mesh["replicate"])'
            )
        found, self._frozen = find_shards(model, "set_all_reduce_hook", self._group.size(), only)
        for shards in found:
            hook, comm = shards.group._all_reduce_hook, getattr(shards.group, "_reduce_scatter_comm", None)
            if hook is not None and hook is not _closed:
                raise ValueError(f"module {shards.module!r} has an all-reduce hook already: a model takes one")
            if type(comm).__module__ == _SCATTER:
                raise ValueError(f"module {shards.module!r} has a compressed reduce-scatter: close() that state first")
        self._found(found)

    def _description(self) -> dict[str, Any]:
        return {"shard": self._shards[0].place, **super()._description()}

    def _reductions(self) -> list[str]:
        return [f"{line}, shard {s.place}" for line, s in zip(super()._reductions(), self._shards, strict=True)]


def _closed(output: Tensor) -> None:
    raise RuntimeError(
        "the FSDPState of this model is closed, and nothing reduces its gradients among the replicas: call "
        "compress_fsdp again"
    )
