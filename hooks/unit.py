"""One flat gradient: where its parameters lie, and the exchange that serves it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..compress.codec import new_draw
from ..compress.layout import Layout, end_to_end, layout_numel, pack
from .auto.planner import Choice, Plan
from .comm.topology import Topology
from .exchanges import Dense, Exchange, all_finite


class Unit:
    """What is reduced as one, a bucket of DDP for example: its layout, and the exchange that serves it now, with its
    buffers.

    Args:
        index: tells it from the others, alike on all ranks.
        parameters: whose gradients these are.
        slots: where they lie.
        excluded: names of those that stay as they are, inside the same messages.
        like: a flat gradient.
    """

    def __init__(self, index: int, parameters: list[Tensor], slots: Layout, excluded: frozenset[str], like: Tensor):
        self.index, self.parameters, self.numel, self.dtype = index, parameters, like.numel(), like.dtype
        self.names = frozenset(slot.name for slot in slots)
        kept = tuple(slot for slot in slots if slot.name not in excluded)
        rest = tuple(slot for slot in slots if slot.name in excluded)
        self.layout = end_to_end(kept)
        self.compressed = tuple(zip(kept, self.layout, strict=True))
        self.dense = tuple(zip(rest, end_to_end(rest), strict=True))
        self.extra = torch.zeros(layout_numel(rest), dtype=torch.float32, device=like.device)
        # Where some parameters stay dense, the others have to move together first.
        self.packed = torch.zeros(layout_numel(kept), dtype=like.dtype, device=like.device) if rest else None
        self.choice: Choice | None = None
        self.plan: Plan | None = None
        #: How many elements any rank has selected, where a sparse codec's exchange has seen that; else 0.
        self.union = 0
        self.device = like.device
        #: The result of what has none.
        self.nothing = torch.empty(0)
        self._overflow: Tensor | bool = False

    def serves(self, parameters: list[Tensor], like: Tensor) -> bool:
        """Whether DDP's bucket of these parameters still is this one; after a rebuild it may not be."""
        return (
            self.numel == like.numel()
            and self.dtype == like.dtype
            and len(self.parameters) == len(parameters)
            and all(a is b for a, b in zip(self.parameters, parameters, strict=True))
        )

    def prepare(self, plan: Plan, topology: Topology, seed: int) -> Exchange:
        """The exchange for a step, with every buffer it needs."""
        if self.plan != plan:
            numel, extra = layout_numel(self.layout), self.extra.numel()
            name = f"{self.index} {numel} {extra} {plan}"
            self.exchange = plan.make(name, numel, extra, self.extra.device, topology)
            stream = 2 * topology.all.rank << 32 | self.index
            self.draw = new_draw(seed, 0, stream, self.extra.device)
            self.owner_draw = new_draw(seed, 0, stream | 1 << 32, self.extra.device)
            self.seen = [0, 0]
            self.arrived = torch.zeros(2, dtype=torch.int64, pin_memory=self.extra.is_cuda)
            self.copied: torch.cuda.Event | None = None
            self.plan = plan
        return self.exchange

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

    def gather(self, buffer: Tensor) -> Tensor:
        """What is to be compressed, flat; fills `extra` with what is not."""
        if self.packed is None:
            return buffer
        pack(self.compressed, buffer, self.packed)
        pack(self.dense, buffer, self.extra)
        return self.packed

    def scatter(self, buffer: Tensor) -> None:
        """Put both back where DDP looks for them."""
        if self.packed is not None:
            pack(((there, here) for here, there in self.compressed), self.packed, buffer)
            pack(((there, here) for here, there in self.dense), self.extra, buffer)

    def look_for_overflow(self, buffer: Tensor) -> None:
        """Note whether the mean is finite, for `overflowed`: as DDP gets it, so alike on all ranks."""
        self._overflow = ~all_finite(buffer)

    def overflowed(self) -> bool:
        """Whether the last mean that was looked at was not finite. Waits for the device."""
        return bool(self._overflow)

    def new_status(self) -> tuple[int, int]:
        """Entries skipped and records not finite since the last call; on a GPU as of the call before, since by then the
        numbers have long been copied."""
        status = self.exchange.status()
        if status.is_cuda:
            if self.copied is not None:
                self.copied.synchronize()
            counted = self.arrived.tolist()
            self.arrived.copy_(status, non_blocking=True)
            self.copied = torch.cuda.current_stream(status.device).record_event()
        else:
            counted = status.tolist()
        skipped, not_finite = (now - before for now, before in zip(counted, self.seen, strict=True))
        self.seen = counted
        return skipped, not_finite


def strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """How DDP lays a gradient into its bucket: with the parameter's strides if they leave no gap, else contiguous."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= size
    return parameter.stride()
