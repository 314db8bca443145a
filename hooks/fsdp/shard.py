"""FSDP2's own reduce-scatter, compressed, where the links between all shards are slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress.feedback.base import RESIDUAL
from ..auto.planner import Choice, Plan
from ..comm.between_steps import between_steps, undivided
from ..comm.pieces import Started, overlap
from ..comm.ports import saved_by
from ..comm.untraced import untraced
from ..core.bucket import clock
from ..core.checkpoint import MEAN, Vectors
from ..core.options import Exclude
from ..core.reducer import Step
from ..core.report import report, tell
from ..core.session import Session
from ..core.statistics import Statistics
from ..exchanges.reduce_scatter import times_mean
from .front import Part, ShardedFront
from .options import ScatterOptions
from .shard_rows import Unsharded
from .torch_internals import Shards, divide_factor, find_shards, post_divide

UNEQUAL = (
    "gradwire: the ranks reduced gradients of different parameters, or at different steps: let all use the same "
    "parameters in a backward pass, or give unused ones zeros by set_reduce_scatter_unused_params(True)"
)


# It does not use the Reducer, which gives every rank the mean of a whole bucket: FSDP waits in each call for this
# rank's row alone, on its own stream, so that a pipeline, plans and futures would add steps and save none.
class ScatterState(ShardedFront):
    """The state of `compress_fsdp` without `mesh`: gradients are compressed on their way to the owners of the shards.

    Its residual is of this rank's unsharded gradients, in float32: four bytes for each element of the whole model.
    Stochastic codecs (`QSGD()`, `EDEN()`) need none.
    """

    @torch.inference_mode(False)  # a step changes what is made here
    def __init__(self, model: nn.Module, options: ScatterOptions, exclude: Exclude | None, which: Part) -> None:
        super().__init__()
        self._options, self._group, self._statistics = options, dist.group.WORLD, Statistics()
        #: The parts of the pass in progress, by index.
        self._reduced: dict[int, Unsharded] = {}
        self._closed = False
        self._counted = 0, 0  # float32's bytes and the bytes sent, as of the begin of a pass
        self._told: Choice | None = None  # the choice of the last line (`core.report`)
        problem: Exception | None = None
        try:
            self._found(find_shards(model, "set_custom_reduce_scatter", 1, which.groups())[0])
            self._group = self._shards[0].process_group
            _check_comms(self._shards)
            options.check(self._shards[0].size)
            self._exclude(exclude)
            options.prepare(0, (shards.dtype for shards in self._shards), self._device)
        except Exception as error:  # the other ranks must hear of any error
            problem = error
        self._keep(options.strategy)
        self._met = self._meet(problem, entropy_coding=options.entropy_coding)
        ranks, device = self._met.group, self._device
        self._parts = [Unsharded(shards, self._excluded, ranks, self._feedback) for shards in self._shards]
        for part in self._parts:
            part.clock = clock(self._statistics.seconds, part.shards.index, device)
            if part.ranks > 1:
                comm = _ReduceScatter(self, part, part.shards.group._reduce_scatter_comm)
                part.shards.replace_reduce_scatter(comm)
            else:  # FSDP then reduces nothing
                part.shards.attach(partial(self._alone, part))
        self._observe(model)
        #: On a GPU: the stream on which FSDP reduces.
        self._stream: torch.cuda.Stream | None = None
        self._bad = torch.zeros(2, dtype=torch.int64, device=device)  # records not finite, and steps with such records
        self._unequal = _Unequal(device)

    def __repr__(self) -> str:
        return f"<ScatterState of {len(self._parameters)} parameters: {self._options.codec_text}, step {self._step}>"

    @property
    def _session(self) -> Session:
        return self._met

    def _flush(self) -> None:
        """Wait for the device's counts."""
        self._statistics.skipped_entries = int(self._status()[0])
        self._statistics.nonfinite_steps = int(self._bad[1])

    @between_steps
    def close(self) -> None:
        """Give the model back to FSDP's own reduce-scatter. Residuals are dropped: save them before."""
        self._closed = True
        self._by_hand.detach()
        for shards in self._shards:
            shards.detach(None)

    # -- one step, seen from FSDP ------------------------------------------------------------------------------------

    @undivided
    def _reduce(self, part: Unsharded, output: Tensor, grads: Tensor, op: Any, plain: Any) -> None:
        """Replace FSDP's reduce-scatter.

        Args:
            plain: calls FSDP's own, on the same tensors.
        """
        if output.is_cuda:
            self._stream = torch.cuda.current_stream(output.device)
        times = times_mean(op, part.ranks, 1.0 / divide_factor(part.shards.group))
        outside = self._begin_part(part)
        part.use_contribution(times / part.ranks / post_divide(part.shards.group, output.dtype))
        choice, statistics = self._options.choice(self._step), self._statistics
        statistics.elements += output.numel() * part.ranks
        statistics.dense_bytes += 4 * output.numel() * part.ranks
        if choice.exchange == "dense":
            part.flush(grads)
            plain()
            sent = (part.ranks - 1) * output.nbytes
            statistics.bytes_sent += sent
            statistics.bytes_received += sent
            statistics.decisions[part.shards.index] = "FSDP's own: a warm-up"
        else:
            exchange = part.follow(choice, self._options.seed)
            used = sorted(part.shards.used)
            at = "" if exchange.heads.is_cuda else self._step  # on a GPU it would be copied there in every step
            exchange.say(f"{at} {choice.digest} {used}")
            try:
                with self._met.group.failing_together():
                    drive_timed(part.reduce(output, grads, times, self._step), part.clock)
                    self._unequal.look(exchange.unequal())
            except Exception as error:
                where = f"[step {self._step}, module {part.shards.module!r}, {choice.codec}]"
                raise RuntimeError(f"gradwire: {error} {where}") from error
            sent_less, received_less = saved_by(exchange.ports)
            statistics.bytes_sent += exchange.bytes_sent - sent_less
            statistics.bytes_received += exchange.bytes_received - received_less
            statistics.decisions[part.shards.index] = f"{choice.exchange} of {choice.codec}"
        if outside:
            self._finalized()

    @undivided
    def _alone(self, part: Unsharded, shards: Shards, output: Tensor) -> None:
        """Reduce on a single rank, without compression; residuals of a checkpoint are added."""
        outside = self._begin_part(part)
        part.use_contribution(1.0 / post_divide(shards.group, output.dtype))
        part.flush(output)
        if outside:
            self._finalized()

    def _begin_part(self, part: Unsharded) -> bool:
        """Begin a part of a pass, and the pass with its first part. Returns True if no backward pass runs."""
        outside = False
        if self._open is None:
            self._unequal.check()
            self._open = self._announced()
            self._counted = self._statistics.dense_bytes, self._statistics.bytes_sent
            self._met.begin()
            outside = not self._by_hand.active and not self._queue_end(self._open)
        if part.shards.index in self._reduced:
            self._follow_stream()
            part.reduced_again()
        self._reduced[part.shards.index] = part
        return outside

    def _announced(self) -> Step:
        """Compare the pass with those of the other ranks, before any message that these would not expect."""
        step = Step(self._step, self._options.choice(self._step), self._met.history())
        try:
            with self._met.group.failing_together():
                self._met.announce(step.number, step.choice, step.history)
                self._met.compare(step.choice, step.history)
        except Exception as error:
            raise RuntimeError(f"gradwire: {error} [step {step.number}, {step.choice.codec}]") from error
        return step

    def _follow_stream(self) -> None:
        """On a GPU: later kernels on the current stream run after those of the pass."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    @undivided
    def _ended(self, step: Step) -> None:
        if step is not self._open:
            return
        for part in self._reduced.values():
            part.means_before = None
        self._reduced.clear()
        self._open, self._step = None, step.number + 1
        self._follow_stream()
        self._met.post_receives()
        self._met.end()
        self._statistics.steps += 1
        if self._told is not step.choice and self._met.group.rank == 0:
            self._tell(step.choice)
        bad = self._status()[1]
        self._bad[1] += bad > self._bad[0]
        self._bad[0] = bad

    def _tell(self, choice: Choice) -> None:
        """Say what is sent from this step on."""
        self._told, statistics = choice, self._statistics
        if self._met.group.size == 1:
            tell(statistics, "one rank: nothing is sent")
            return
        dense, sent = statistics.dense_bytes - self._counted[0], statistics.bytes_sent - self._counted[1]
        report(statistics, choice, [Plan(choice.codec, choice.exchange, choice.feedback)], (dense, sent))

    def _dropped(self) -> None:
        """Return the means of the pass, except those that an optimizer has applied within backward."""
        self._follow_stream()
        for part in self._reduced.values():
            if not part.shards.hooked:
                part.put_back()
        self._reduced.clear()

    def _status(self) -> Tensor:
        return torch.stack([part.status for part in self._parts]).sum(0)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @between_steps
    def state_dict(self) -> dict[str, Any]:
        """The sum of the ranks' residuals in the optimizer's units, sharded like the parameters (`DTensor`), and a few
        numbers: for `torch.distributed.checkpoint`, which loads it on any number of ranks, and also into the state of
        `compress_fsdp(mesh=…)`. A rank that loads it has the residual of its own shard. Nothing is lost.

        A collective: every rank must call it, after the same step. Saving changes nothing.

        Raises:
            ValueError: another rank is in another call, or at another step; on every rank alike.
            RuntimeError: another rank did not come within 60 s.
        """
        self._met.agree("state_dict()", self._step)
        mine, checkpoint = self._feedback.by_name(), self._checkpoint
        found: dict[str, Tensor] = {}

        def take(part: Unsharded, name: str, arrived: Tensor) -> None:
            found[name] = checkpoint.as_sharded(name, part.outstanding(name, arrived))

        def start(part: Unsharded, name: str) -> Started:
            arrived, work = part.collect(name, mine.get(name))
            return arrived.nbytes, work, partial(take, part, name, arrived)

        parts = self._parts if self._options.may_keep() else ()
        overlap(start(part, name) for part in parts for name in sorted(part.columns))
        return checkpoint.export(MEAN, {RESIDUAL: found})

    def go_on(self, saved: Mapping[str, Any], vectors: Vectors) -> None:
        parts = {name: part for part in self._parts for name in part.columns}
        for part in self._parts:
            part.contribution = part.usual_contribution()
            part.forget()
        rows = {name: parts[name].from_outstanding(x) for name, x in vectors.get(RESIDUAL, {}).items()}
        self._resume(saved, {RESIDUAL: rows})
        self._met.loaded(self._options.seed)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._closed:
            self._options.check_optimizer(optimizer)


class _ReduceScatter:
    """The reduce-scatter that FSDP calls, one for each parameter group, with the methods of FSDP's private class."""

    def __init__(self, state: ScatterState, part: Unsharded, plain: Any) -> None:
        self._state, self._part, self._plain = state, part, plain

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        result: Tensor = self._plain.allocate(size, dtype=dtype, device=device)
        return result

    @untraced
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        plain = partial(self._plain, output_tensor, input_tensor, group, op, async_op)
        self._state._reduce(self._part, output_tensor, input_tensor, op, plain)


class _Unequal:
    """Detects that ranks have reduced different gradients: at once on CPUs, and before the next pass on GPUs, where the
    host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._seen = torch.zeros((), dtype=torch.bool, device=device)
        self._known = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda", device="cpu")
        self._copied: torch.cuda.Event | None = None

    def look(self, unequal: Tensor) -> None:
        if not unequal.is_cuda:
            if unequal:
                raise RuntimeError(UNEQUAL)
            return
        self._seen |= unequal
        self._known.copy_(self._seen, non_blocking=True)
        self._copied = torch.cuda.current_stream(unequal.device).record_event()

    def check(self) -> None:
        if self._copied is not None and self._copied.query() and self._known:
            raise RuntimeError(UNEQUAL)


def _check_comms(parts: Sequence[Shards]) -> None:
    """Raise ValueError if the model has another hook or reduce-scatter."""
    for shards in parts:
        comm = shards.group._reduce_scatter_comm
        if type(comm).__name__ != "DefaultReduceScatter" or shards.group._all_reduce_hook is not None:
            what = f"the reduce-scatter {type(comm).__name__}" if shards.group._all_reduce_hook is None else "a hook"
            raise ValueError(
                f"module {shards.module!r} has {what} already, and a model takes one: close() that state first, and do "
                "not call set_custom_reduce_scatter, set_symm_mem_for_comm or set_allocate_memory_from_process_group"
            )


def drive_timed(stages: Any, clock: Any) -> None:
    """`drive`, with the time of each phase."""
    phase = "encode"
    while True:
        with clock(phase):
            work = next(stages, None)
        if work is None:
            return
        with clock("exchange"):
            work.wait()
        phase = "decode"
