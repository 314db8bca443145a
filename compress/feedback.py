"""Error feedback: what compression left out, kept by parameter and added to the next gradient.

A residual belongs to a parameter, by name. The memory is one flat float32 buffer per *layout*, the order and strides in
which a communication bucket holds its parameters, so that one kernel call serves the bucket. When buckets are
rebuilt, the new layout gathers what the old ones hold; nothing depends on a bucket's index.

Some exchanges have further residuals, at the owner of a slice: what its compression of the mean of P ranks left out, or
of the mean of the L ranks inside its node. Adding P or L times that, the *weight*, to the owner's first residual leaves
mean(gradient + residual) what it was, so it can be folded away wherever a slice loses its meaning: in a new layout, in
a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where a flat buffer holds one parameter: `shape` with `stride`, from element `start` on."""

    name: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's elements in `flat`, in the parameter's own shape, without a copy."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)

    def flat(self, buffer: Tensor) -> Tensor:
        """The same elements in the order in which they lie in `buffer`."""
        return buffer[self.start : self.start + self.numel]


Layout = tuple[Slot, ...]
#: Start and length of what a rank owns, and how many times what it keeps there counts as its own.
OwnedSlice = tuple[int, int, int]


def layout_numel(layout: Layout) -> int:
    return sum(slot.numel for slot in layout)


@dataclass
class _Owned:
    """A residual of elements `start` … that this rank keeps for others too: `weight` times it counts as its own."""

    tensor: Tensor
    start: int
    weight: int

    def fold_into(self, residual: Tensor) -> None:
        residual[self.start : self.start + self.tensor.numel()].add_(self.tensor, alpha=self.weight)


@dataclass
class _Memory:
    residual: Tensor
    owned: list[_Owned] = field(default_factory=list)
    saved: tuple[Tensor, list[Tensor]] | None = None  # as it was before the last step, when steps can be skipped

    def fold(self) -> None:
        for owned in self.owned:
            owned.fold_into(self.residual)
            owned.tensor.zero_()


class ErrorFeedback:
    """The residuals of one rank. Not for use by two threads at once.

    Args:
        keep_previous: keep a copy of every residual as it was before the current step, for `undo`.
    """

    def __init__(self, keep_previous: bool = False) -> None:
        self._keep_previous = keep_previous
        self._memories: dict[Layout, _Memory] = {}
        self._layout_of: dict[str, Layout] = {}
        # Residuals that no layout has asked for yet: just loaded.
        self._waiting: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return bool(self._memories or self._waiting)

    def residual(self, layout: Layout, device: torch.device | str = "cpu") -> Tensor:
        """The flat float32 residual of a layout, to be updated in place; at first what its parameters held before."""
        memory = self._memories.get(layout)
        if memory is None:
            memory = self._memories[layout] = self._gather(layout, torch.device(device))
        return memory.residual

    def owned(self, layout: Layout, slices: Sequence[OwnedSlice]) -> list[Tensor]:
        """Further residuals that this rank keeps for others, float32, one for each slice; emptied into the first
        residual when the slices change.

        `residual(layout)` must have been called.
        """
        memory = self._memories[layout]
        if [(owned.start, owned.tensor.numel(), owned.weight) for owned in memory.owned] != list(slices):
            memory.fold()
            memory.owned = [_Owned(memory.residual.new_zeros(n), start, weight) for start, n, weight in slices]
        return [owned.tensor for owned in memory.owned]

    def remember(self, layout: Layout) -> None:
        """Before a step changes the residuals of a layout: keep them for `undo`, if this object keeps any."""
        memory = self._memories[layout]
        if not self._keep_previous:
            return
        now = [owned.tensor for owned in memory.owned]
        if memory.saved is None or [t.shape for t in memory.saved[1]] != [t.shape for t in now]:
            memory.saved = torch.empty_like(memory.residual), [torch.empty_like(tensor) for tensor in now]
        for copy, tensor in zip((memory.saved[0], *memory.saved[1]), (memory.residual, *now), strict=True):
            copy.copy_(tensor)

    def undo(self) -> None:
        """Put back every residual as `remember` saw it last: the step in between has been thrown away."""
        for memory in self._memories.values():
            if memory.saved is not None:
                before = memory.saved[0], *memory.saved[1]
                for tensor, copy in zip(_tensors(memory), before, strict=True):
                    tensor.copy_(copy)

    def rescale(self, factor: float) -> None:
        """Multiply every residual: gradients are in units of a loss scale, and that has changed."""
        for memory in self._memories.values():
            for tensor in _tensors(memory):
                tensor.mul_(factor)
        for tensor in self._waiting.values():
            tensor.mul_(factor)

    def take(self, layout: Layout, grad: Tensor) -> Tensor:
        """grad + residual as float32, with the residual emptied: for a step that sends everything, or keeps nothing.

        Where the sum is not finite the residual stays.
        """
        if not any(slot.name in self._layout_of or slot.name in self._waiting for slot in layout):
            return grad
        residual = self.residual(layout, grad.device)
        self._memories[layout].fold()
        self.remember(layout)
        total = grad.float() + residual
        residual.masked_fill_(total.isfinite(), 0.0)
        return total

    def fold(self) -> None:
        """Add every second residual to the first, and empty it. Changes no mean over ranks."""
        for memory in self._memories.values():
            memory.fold()

    def by_name(self) -> dict[str, Tensor]:
        """A copy of the residual of each parameter that has one, contiguous in the parameter's shape, second residuals
        folded in; this object stays as it is."""
        found = {name: tensor.clone() for name, tensor in self._waiting.items()}
        for layout, memory in self._memories.items():
            flat = memory.residual
            if memory.owned:
                flat = flat.clone()
                for owned in memory.owned:
                    owned.fold_into(flat)
            for slot in layout:
                if self._layout_of.get(slot.name) == layout:
                    found[slot.name] = slot.view(flat).clone(memory_format=torch.contiguous_format)
        return found

    def load(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace everything by `residuals`, copied, in the form that `by_name` gives."""
        self._memories.clear()
        self._layout_of.clear()
        self._waiting = {name: tensor.detach().float().clone() for name, tensor in residuals.items()}

    def __getstate__(self) -> dict[str, object]:
        return {"keep_previous": self._keep_previous, "residuals": self.by_name()}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["keep_previous"])  # type: ignore[misc]
        self.load(state["residuals"])

    def _gather(self, layout: Layout, device: torch.device) -> _Memory:
        residual = torch.zeros(layout_numel(layout), dtype=torch.float32, device=device)
        for old in dict.fromkeys(self._layout_of[s.name] for s in layout if s.name in self._layout_of):
            self._memories[old].fold()
        for slot in layout:
            target = slot.view(residual)
            if slot.name in self._waiting:
                target.copy_(self._waiting.pop(slot.name))
            elif slot.name in self._layout_of:
                old = self._layout_of[slot.name]
                place = next(s for s in old if s.name == slot.name)
                target.copy_(place.view(self._memories[old].residual))
            self._layout_of[slot.name] = layout
        self._drop_unused()
        return _Memory(residual)

    def _drop_unused(self) -> None:
        used = set(self._layout_of.values())
        self._memories = {layout: memory for layout, memory in self._memories.items() if layout in used}


def _tensors(memory: _Memory) -> tuple[Tensor, ...]:
    return memory.residual, *(owned.tensor for owned in memory.owned)


def pack(slots: Iterable[tuple[Slot, Slot]], source: Tensor, target: Tensor) -> None:
    """Copy parameters between two flat buffers, from the first slot's place to the second's."""
    for here, there in slots:
        there.flat(target).copy_(here.flat(source))
