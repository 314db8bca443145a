"""A bucket: gradients that are reduced as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress.codec import new_draw
from ...compress.feedback.base import Feedback, FeedbackState
from ...compress.feedback.residual import NOTHING
from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Layout, Packing, end_to_end, layout_numel, runs_between
from ..auto.planner import Choice, Plan, Planner
from ..comm.pipeline import Clock
from ..comm.ports import Collective, PersistentMessage, Stages
from ..comm.readback import Readback
from ..exchanges import Dense, Exchange, ExchangeArgs


class Bucket:
    """What is reduced as one, a bucket of DDP for example: its layout, and the exchange that serves it now, with its
    buffers.

    Args:
        index: tells it from the others, alike on all ranks.
        parameters: whose gradients these are.
        slots: where they lie.
        excluded: names of those that stay as they are, inside the same messages.
        like: a flat gradient.
        strategy: what is kept between steps, where that is more than a residual.
    """

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
        self.layout, self.beside = end_to_end(kept), end_to_end(rest)
        self.extra = torch.zeros(layout_numel(rest), dtype=torch.float32, device=like.device)
        #: Whether what stays as it is goes through the strategy too.
        self.keeps_beside = bool(rest) and strategy is not None and not strategy.only_residual
        # Where some parameters stay dense, the others have to move together first. What adds up means would add up
        # their rounding too.
        wide = strategy is not None and not strategy.only_residual
        dtype = torch.float32 if wide else like.dtype
        moves = bool(rest) or dtype != like.dtype
        self.packed = torch.zeros(layout_numel(kept), dtype=dtype, device=like.device) if moves else None
        if self.packed is not None:
            compressed = runs_between(zip(kept, self.layout, strict=True), self.packed)
            dense = runs_between(zip(rest, self.beside, strict=True), self.extra)
            self.packing = Packing(self.numel, [*compressed, *dense])
        self.choice: Choice | None = None
        self.plan: Plan | None = None
        self.clock: Clock | None = None
        self.exchange: Exchange
        #: What has served before, until ranks are known to have replaced it alike: a rank that has not sends to it, and
        #: a message for memory that is gone would stop those behind it, which say so.
        self.replaced: Exchange | None = None
        self.operands: ExchangeArgs
        #: What is kept of it, and as of which version of the feedback; None where nothing is, or that is not known.
        self.kept: FeedbackState | None = None
        self.kept_version = -1
        #: How many elements any rank has selected, where a sparse codec's exchange has seen that; else 0.
        self.union = 0
        #: The same, on its way to the host.
        self.counting: Readback | None = None
        self.device = like.device
        #: The result of what has none.
        self.nothing = torch.empty(0, device="cpu")
        #: Whether the last mean was not finite, as DDP gets it, so alike on all ranks; where that is asked for.
        self.overflow: Tensor | None = None

    @property
    def ports(self) -> Sequence[PersistentMessage | Collective]:
        """Messages to announce between two steps."""
        return self.exchange.ports

    def serves(self, parameters: list[Tensor], like: Tensor) -> bool:
        """Whether DDP's bucket of these parameters still is this one; after a rebuild it may not be."""
        return (
            self.numel == like.numel()
            and self.dtype == like.dtype
            and self.device == like.device
            and len(self.parameters) == len(parameters)
            and all(a is b for a, b in zip(self.parameters, parameters, strict=True))
        )

    def use(self, exchange: Exchange, seed: int, rank: int) -> None:
        """Let an exchange serve from now on."""
        stream = 2 * rank << 32 | self.index
        draws = torch.stack([new_draw(seed, 0, number, self.device) for number in (stream, stream | 1 << 32)])
        self.exchange, self.operands = exchange, ExchangeArgs(self.extra, self.extra, self.extra, NOTHING, (), *draws)
        stochastic = exchange.codec.stochastic or exchange.codec.second_pass().stochastic
        #: Where the draws have their step; None where nothing is drawn.
        self.steps = draws[:, 1] if stochastic else None
        self.kept = None  # nor what owners keep, whose slices are the exchange's
        self.seen = [0, 0]  # of its counts

    def follow(self, plan: Plan, planner: Planner, seed: int) -> None:
        """Let the exchange serve that a plan wants."""
        if self.plan != plan:
            numel, extra = layout_numel(self.layout), self.extra.numel()
            exchange = planner.make(plan, f"{self.index} {numel} {extra} {plan}", self.layout, extra, self.device)
            self.replaced = getattr(self, "exchange", None)
            self.use(exchange, seed, planner.topology.all.rank)
            self.plan = plan

    def reduce(self, buffer: Tensor, feedback: FeedbackStore, keeps: bool, step: int) -> Stages:
        """Stages: replace the gradients by their mean.

        Args:
            buffer: where they lie.
            feedback: what compression has left out so far.
            keeps: whether what it leaves out now is kept there; what is there goes out in any case.
            step: of the draws.
        """
        operands = self.operands
        if self.steps is not None:
            self.steps.fill_(step)
        if self.packed is not None:
            self.packing.take(buffer)
        operands.out = grad = buffer if self.packed is None else self.packed
        operands.grad = self._feed(grad, feedback, keeps)
        if self.keeps_beside:
            self.extra.copy_(feedback.drain(self.beside, self.extra))
        yield from self.exchange.reduce(operands)
        operands.grad = operands.out = self.extra  # holds nothing between steps
        for port in self.exchange.ports:
            port.post_receives()
        if self.kept is not None:
            self.kept.deliver(grad)
        else:
            feedback.deliver(self.layout, grad)
        if self.keeps_beside:
            feedback.deliver(self.beside, self.extra)
        if self.packed is not None:
            self.packing.put(buffer)

    def _feed(self, grad: Tensor, feedback: FeedbackStore, keeps: bool) -> Tensor:
        """What is to be encoded; puts what is kept, and what this rank keeps for others, among the operands."""
        operands = self.operands
        if not keeps:
            self.kept, operands.feedback, operands.owned = None, NOTHING, ()
            return feedback.drain(self.layout, grad)
        if self.kept is None or self.kept_version != feedback.version:
            self.kept = operands.feedback = kept = feedback.of(self.layout, grad.device)
            operands.owned = kept.owned(self.exchange.owned_slices)
            self.kept_version = feedback.version
        return grad

    def goes_dense(self, choice: Choice, clean: bool) -> bool:
        """Whether nothing but a float32 all-reduce of the buffer serves it, for good by this choice.

        Args:
            clean: whether no rank can have kept anything back; else the last mean tells.
        """
        if self.dtype != torch.float32 or self.choice != choice or not isinstance(self.exchange, Dense):
            return False
        return clean or self.exchange.settled

    def forget(self) -> None:
        """Draws and predictions begin again."""
        self.plan = self.choice = None
