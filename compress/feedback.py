"""Error feedback: what compression left out, kept by parameter and added to the next gradient.

A residual belongs to a parameter, by name. The memory is one flat float32 buffer per *layout*, the order and strides in
which a communication bucket holds its parameters, so that one kernel call serves the bucket. When buckets are
rebuilt, the new layout gathers what the old ones hold; nothing depends on a bucket's index.

A two-pass exchange has a second residual: the owner of a slice keeps what its own compression of the mean left out.
With P ranks, adding P times that to the owner's first residual leaves mean(gradient + residual) what it was, so it can
be folded away wherever a slice loses its meaning: in a new layout, in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


def layout_numel(layout: Layout) -> int:
    return sum(slot.numel for slot in layout)


@dataclass
class _Memory:
    residual: Tensor
    owned: Tensor | None = None  # the second residual, of elements owned_start … of this layout
    owned_start: int = 0
    world_size: int = 1
    saved: tuple[Tensor, Tensor | None] | None = None  # as it was before the last step, when steps can be skipped

    def owned_target(self) -> Tensor:
        assert self.owned is not None
        return self.residual[self.owned_start : self.owned_start + self.owned.numel()]

    def fold(self) -> None:
        if self.owned is not None:
            self.owned_target().add_(self.owned, alpha=self.world_size)
            self.owned.zero_()


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

    def owned(self, layout: Layout, start: int, numel: int, world_size: int) -> Tensor:
        """The second residual: float32 of `numel` elements, for elements `start` … of the layout, which this rank owns.

        `residual(layout)` must have been called.
        """
        memory = self._memories[layout]
        if memory.owned is None or (memory.owned_start, memory.owned.numel()) != (start, numel):
            memory.fold()
            memory.owned, memory.owned_start = memory.residual.new_zeros(numel), start
            memory.world_size = world_size
        return memory.owned

    def remember(self, layout: Layout) -> None:
        """Before a step changes the residuals of a layout: keep them for `undo`, if this object keeps any."""
        memory = self._memories[layout]
        if not self._keep_previous:
            return
        if memory.saved is None:
            owned = None if memory.owned is None else memory.owned.clone()
            memory.saved = (memory.residual.clone(), owned)
            return
        residual, owned = memory.saved
        residual.copy_(memory.residual)
        if memory.owned is not None and owned is not None and owned.shape == memory.owned.shape:
            owned.copy_(memory.owned)
        else:
            memory.saved = (residual, None if memory.owned is None else memory.owned.clone())

    def undo(self) -> None:
        """Put back every residual as `remember` saw it last: the step in between has been thrown away."""
        for memory in self._memories.values():
            if memory.saved is not None:
                residual, owned = memory.saved
                memory.residual.copy_(residual)
                if memory.owned is not None:
                    memory.owned.copy_(owned) if owned is not None else memory.owned.zero_()

    def rescale(self, factor: float) -> None:
        """Multiply every residual: gradients are in units of a loss scale, and that has changed."""
        for memory in self._memories.values():
            memory.residual.mul_(factor)
            if memory.owned is not None:
                memory.owned.mul_(factor)
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
            if memory.owned is not None:
                flat = flat.clone()
                flat[memory.owned_start : memory.owned_start + memory.owned.numel()].add_(
                    memory.owned, alpha=memory.world_size
                )
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


def pack(slots: Iterable[tuple[Slot, Slot]], source: Tensor, target: Tensor) -> None:
    """Copy parameters between two flat buffers, from the first slot's place to the second's."""
    for here, there in slots:
        there.flat(target).copy_(here.flat(source))
