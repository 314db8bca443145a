"""A bucket: gradients that are reduced as one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from ...compress.codec import new_draw
from ...compress.feedback.base import Feedback, FeedbackState
from ...compress.feedback.residual import NOTHING
from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Layout, Packing, end_to_end, layout_numel, runs_between
from ..auto.planner import Choice, Plan, Planner
from ..comm.ports import Port, Stages
from ..comm.readback import Readback
from ..comm.tasks import Clock
from ..exchanges import Dense, Exchange, ExchangeArgs
from ..network.cost import Decision

#: Threads add to the same numbers.
_adding = threading.Lock()
#: The name of a bucket's phase in profilers.
RANGE = "gradwire:{phase} bucket {bucket}"
#: Environment variables that Nsight and other tools for NVTX's ranges set for the programs that they start.
NVTX_TOOLS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")


class Bucket:
    """Gradients that are reduced as one, for example those of a DDP bucket: their layout, and their current exchange.

    Args:
        index: identifies the bucket, alike on all ranks.
        parameters: the owners of the gradients.
        slots: the place of each gradient in the buffer.
        excluded: names of the parameters that travel uncompressed, inside the same messages.
        like: a flat gradient.
        strategy: the feedback strategy, where it keeps more than a residual.
    """

    #: DDP's buffer, if this bucket has been compared with it, and it still is there.
    buffer: Callable[[], Tensor | None] = staticmethod(lambda: None)
    #: False for what is no gradient: it has no part in gradients' norm, and float32 would not send it.
    of_gradients = True

    def __init__(
        self,
        index: int,
        parameters: list[Tensor],
        slots: Layout,
        excluded: frozenset[str],
        like: Tensor,
        strategy: Feedback | None = None,
    ) -> None:
        self.index, self.parameters, self.numel, self.dtype = index, parameters, like.numel(), like.dtype
        self.slots, self.names = slots, frozenset(slot.name for slot in slots)
        kept = tuple(slot for slot in slots if slot.name not in excluded)
        rest = tuple(slot for slot in slots if slot.name in excluded)
        self.layout, self.uncompressed_layout = end_to_end(kept), end_to_end(rest)
        self.uncompressed = torch.zeros(layout_numel(rest), dtype=torch.float32, device=like.device)
        #: True if uncompressed gradients pass through the strategy, too.
        self.keeps_uncompressed = bool(rest) and strategy is not None and not strategy.only_residual
        # Where some parameters stay uncompressed, the others are moved together first. A strategy that adds up means
        # would add up their rounding, too.
        wide = strategy is not None and not strategy.only_residual
        dtype = torch.float32 if wide else like.dtype
        moves = bool(rest) or dtype != like.dtype
        self.packed = torch.zeros(layout_numel(kept), dtype=dtype, device=like.device) if moves else None
        if self.packed is not None:
            compressed = runs_between(zip(kept, self.layout, strict=True), self.packed)
            dense = runs_between(zip(rest, self.uncompressed_layout, strict=True), self.uncompressed)
            self.packing = Packing(self.numel, [*compressed, *dense])
        self.choice: Choice | None = None
        self.plan: Plan | None = None
        self.why: Decision | str = ""
        self.clock: Clock | None = None
        self.exchange: Exchange
        #: The former exchange, until all ranks are known to have replaced it: a rank that has not still sends to it,
        #: and a message without memory would block the messages behind it, which report the difference.
        self.replaced: Exchange | None = None
        self.operands: ExchangeArgs
        #: This bucket's part of the feedback, and the feedback's version then; None: nothing is kept, or not known.
        self.kept: FeedbackState | None = None
        self.kept_version = -1
        #: Number of elements that any rank has selected, where a sparse codec's exchange has counted it; else 0.
        self.union = 0
        #: That number on its way to the host.
        self.counting: Readback | None = None
        self.device = like.device
        #: True if the last mean, as DDP gets it, was not finite; alike on all ranks. None where nobody asks.
        self.overflow: Tensor | None = None

    @property
    def ports(self) -> Sequence[Port]:
        """Messages to announce between two steps."""
        return self.exchange.ports

    def serves(self, parameters: list[Tensor], like: Tensor) -> bool:
        """True if DDP's bucket of these parameters still is this one; after a rebuild it may not be."""
        return (
            self.numel == like.numel()
            and self.dtype == like.dtype
            and self.device == like.device
            and len(self.parameters) == len(parameters)
            and all(a is b for a, b in zip(self.parameters, parameters, strict=True))
        )

    def use(self, exchange: Exchange, seed: int, rank: int) -> None:
        """Reduce by this exchange from now on."""
        stream = 2 * rank << 32 | self.index
        draws = torch.stack([new_draw(seed, 0, number, self.device) for number in (stream, stream | 1 << 32)])
        self.exchange, self.operands = (
            exchange,
            ExchangeArgs(self.uncompressed, self.uncompressed, self.uncompressed, NOTHING, (), *draws),
        )
        reads = exchange.codec.stochastic or exchange.codec.second_pass().stochastic or exchange.reads_step
        #: The draws' step numbers; None where nobody reads them.
        self.steps = draws[:, 1] if reads else None
        self.kept = None  # owners' slices depend on the exchange
        self.counts = exchange.counts()
        self.seen = [0, 0]  # their sum as of the last step

    def follow(self, plan: Plan, planner: Planner, seed: int) -> None:
        """Reduce by the exchange of this plan from now on."""
        if self.plan != plan:
            numel, extra = layout_numel(self.layout), self.uncompressed.numel()
            exchange = planner.make(plan, f"{self.index} {numel} {extra} {plan}", self.layout, extra, self.device)
            self.replaced = getattr(self, "exchange", None)
            self.use(exchange, seed, planner.topology.all.rank)
            self.plan = plan

    def reduce(self, buffer: Tensor, feedback: FeedbackStore, keeps: bool, step: int) -> Stages:
        """Stages: replace the gradients by their mean.

        Args:
            buffer: holds the gradients.
            feedback: the residuals.
            keeps: keep the residual of this step there; the residual of earlier steps is sent in any case.
            step: number for the draws.
        """
        operands = self.operands
        operands.step = step
        if self.steps is not None:
            self.steps.fill_(step)
        if self.packed is not None:
            self.packing.take(buffer)
        operands.out = grad = buffer if self.packed is None else self.packed
        operands.grad = self._feed(grad, feedback, keeps)
        if self.keeps_uncompressed:
            self.uncompressed.copy_(feedback.drain(self.uncompressed_layout, self.uncompressed))
        yield from self.exchange.reduce(operands)
        if operands.grad.is_cuda:
            operands.read_on_this_stream()
        operands.grad = operands.out = self.uncompressed  # holds nothing between steps
        for port in self.exchange.ports:
            port.post_receives()
        if self.kept is not None:
            self.kept.deliver(grad)
        else:
            feedback.deliver(self.layout, grad)
        if self.keeps_uncompressed:
            feedback.deliver(self.uncompressed_layout, self.uncompressed)
        if self.packed is not None:
            self.packing.put(buffer)

    def _feed(self, grad: Tensor, feedback: FeedbackStore, keeps: bool) -> Tensor:
        """The gradient to encode; sets the operands' feedback, this rank's own and that of the slices it owns."""
        operands = self.operands
        if not keeps:
            self.kept, operands.feedback, operands.owned = None, NOTHING, ()
            return feedback.drain(self.layout, grad)
        if self.kept is None or self.kept_version != feedback.version:
            self.kept = operands.feedback = kept = feedback.of(self.layout, grad.device)
            operands.owned = kept.owned(self.exchange.owned_slices)
            self.kept_version = feedback.version
        return grad

    def conclude(self, mean: Tensor) -> None:
        """Bring residuals to where they are after a step with this mean, of which only this rank lacks the last
        messages."""
        if self.kept is not None:
            if self.packed is not None:
                self.packing.take(mean)
            self.exchange.conclude(mean if self.packed is None else self.packed, self.operands)

    def goes_dense(self, choice: Choice, clean: bool) -> bool:
        """True if a float32 all-reduce of the buffer is all that this choice needs, in every step from now on.

        Args:
            clean: no rank can hold a residual; if False, the last mean decides.
        """
        if self.dtype != torch.float32 or self.choice != choice or not isinstance(self.exchange, Dense):
            return False
        return clean or self.exchange.settled

    def forget(self) -> None:
        """Begin draws and predictions again."""
        self.plan = self.choice = None

    def disconnect(self) -> None:
        """`forget`, and let go of the exchange: its ranks are gone."""
        self.forget()
        self.replaced = self.kept = self.counting = None
        self.union = 0
        if hasattr(self, "exchange"):
            del self.exchange


def clock(seconds: dict[str, float], bucket: int, device: torch.device) -> Clock:
    """A bucket's clock: adds each phase's wall time to `seconds`, and shows it to profilers."""
    nvtx = device.type == "cuda" and any(name in os.environ for name in NVTX_TOOLS)
    return partial(_Phase, seconds, bucket, nvtx)


class _Phase:
    """Adds the time spent inside to `seconds`. Opens a profiler range only while somebody profiles, as on small models
    that takes as long as the phase.

    Args:
        nvtx: a tool reads NVTX's ranges; torch.profiler's become such only under `emit_nvtx`.
    """

    __slots__ = ("_bucket", "_nvtx", "_phase", "_ranges", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], bucket: int, nvtx: bool, phase: str) -> None:
        self._seconds, self._bucket, self._nvtx, self._phase = seconds, bucket, nvtx, phase
        self._ranges: ExitStack | None = None

    def __enter__(self) -> None:
        profiled = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        if profiled or self._nvtx:
            name, self._ranges = RANGE.format(phase=self._phase, bucket=self._bucket), ExitStack()
            if profiled:
                self._ranges.enter_context(record_function(name))
            if self._nvtx:
                self._ranges.enter_context(torch.cuda.nvtx.range(name))
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        with _adding:
            self._seconds[self._phase] += time.perf_counter() - self._start
        if self._ranges is not None:
            self._ranges.close()
