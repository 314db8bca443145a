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
class _Saved:
    """A memory as it was before the first of the steps that can still be undone; `valid` while they can."""

    residual: Tensor
    owned: list[_Owned]
    valid: bool = True


@dataclass
class _Memory:
    residual: Tensor
    owned: list[_Owned] = field(default_factory=list)
    saved: _Saved | None = None
    #: Whether the last `take` has emptied the residual, and when that is known, on a GPU.
    emptied: tuple[Tensor, torch.cuda.Event | None] | None = None

    def fold(self) -> None:
        for owned in self.owned:
            owned.fold_into(self.residual)
            owned.tensor.zero_()

    @property
    def can_undo(self) -> bool:
        return self.saved is not None and self.saved.valid

    def save(self) -> None:
        saved = self.saved
        if saved is None or _slices(saved.owned) != _slices(self.owned):
            owned = [_Owned(torch.empty_like(o.tensor), o.start, o.weight) for o in self.owned]
            saved = self.saved = _Saved(torch.empty_like(self.residual), owned)
        saved.residual.copy_(self.residual)
        for copy, owned_now in zip(saved.owned, self.owned, strict=True):
            copy.tensor.copy_(owned_now.tensor)
        saved.valid = True

    def undo(self) -> None:
        saved, self.emptied = self.saved, None
        if saved is None or not saved.valid:
            return
        self.residual.copy_(saved.residual)
        if _slices(saved.owned) == _slices(self.owned):
            for owned, copy in zip(self.owned, saved.owned, strict=True):
                owned.tensor.copy_(copy.tensor)
            return
        # The exchange has changed meanwhile, and with it what this rank owns.
        for owned in self.owned:
            owned.tensor.zero_()
        for copy in saved.owned:
            copy.fold_into(self.residual)

    def before(self) -> Tensor:
        """The residual as `undo` would leave it, with all that is owned folded in; not to be changed."""
        if self.saved is None or not self.saved.valid:
            return self.residual
        flat = self.saved.residual.clone()
        for copy in self.saved.owned:
            copy.fold_into(flat)
        return flat


def _slices(owned: Sequence[_Owned]) -> list[OwnedSlice]:
    return [(o.start, o.tensor.numel(), o.weight) for o in owned]


class ErrorFeedback:
    """The residuals of one rank. Not for use by two threads at once.

    Args:
        keep_previous: keep a copy of every residual as it was before the steps that can still be thrown away, for
            `undo`. `commit` says that those before have been applied.
    """

    def __init__(self, keep_previous: bool = False) -> None:
        self._keep_previous = keep_previous
        self._memories: dict[Layout, _Memory] = {}
        self._layout_of: dict[str, Layout] = {}
        # Residuals that no layout has asked for yet: just loaded.
        self._waiting: dict[str, Tensor] = {}

    @staticmethod
    def invariant(gradients: Tensor, applied: Tensor, residual: Tensor) -> Tensor:
        """What error feedback must keep at zero, for one parameter: nothing is lost.

        Args:
            gradients: the sum, over the steps that were applied, of the ranks' mean gradients.
            applied: the sum of the means that were applied in their place.
            residual: the mean over the ranks of what they keep.
        """
        return gradients - applied - residual

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return bool(self._memories or self._waiting)

    def holds(self, layout: Layout) -> bool:
        """Whether parameters lie in this layout now, with residuals."""
        return layout in self._memories

    def residual(self, layout: Layout, device: torch.device | str = "cpu") -> Tensor:
        """The flat float32 residual of a layout, to be updated in place; at first what its parameters held before."""
        memory = self._memories.get(layout)
        if memory is None:
            memory = self._memories[layout] = self._gather(layout, torch.device(device))
        memory.emptied = None
        return memory.residual

    def owned(self, layout: Layout, slices: Sequence[OwnedSlice]) -> list[Tensor]:
        """Further residuals that this rank keeps for others, float32, one for each slice; emptied into the first
        residual when the slices change.

        `residual(layout)` must have been called.
        """
        memory = self._memories[layout]
        if _slices(memory.owned) != list(slices):
            memory.fold()
            memory.owned = [_Owned(memory.residual.new_zeros(n), start, weight) for start, n, weight in slices]
        return [owned.tensor for owned in memory.owned]

    def remember(self, layout: Layout) -> None:
        """Before a step changes the residuals of a layout: keep them for `undo`, if this object keeps any, and none is
        kept since the last `commit`."""
        memory = self._memories[layout]
        if self._keep_previous and not memory.can_undo:
            memory.save()

    def commit(self) -> None:
        """What has been delivered so far has been applied: `undo` goes no further back than here."""
        for memory in self._memories.values():
            if memory.saved is not None:
                memory.saved.valid = False

    def undo(self) -> None:
        """Put back every residual as it was at the last `commit`: the steps since then have been thrown away."""
        for memory in self._memories.values():
            memory.undo()

    def give_back(self, layout: Layout, slot: Slot, mean: Tensor, gradient: Tensor | None = None) -> None:
        """Add the mean of all ranks to a parameter's residual: it was thrown away after the exchange. When every rank
        does so, the mean of the residuals is what it was, plus that of the gradients that had gone in.

        What is not finite is left out.

        Args:
            layout: in which the parameter was reduced; `holds` it.
            slot: the parameter's, of `layout`.
            mean: flat, in that layout.
            gradient: what had gone in on this rank, in the parameter's shape, where that is to be thrown away too.
        """
        residual = self.residual(layout, mean.device)
        self.remember(layout)
        part = slot.view(mean).float()
        if gradient is not None:
            part = part - gradient
        slot.view(residual).add_(torch.where(part.isfinite(), part, 0.0))

    def rescale(self, factor: float) -> None:
        """Multiply every residual: gradients are in units of a loss scale, and that has changed."""
        for memory in self._memories.values():
            for tensor in (memory.residual, *(owned.tensor for owned in memory.owned)):
                tensor.mul_(factor)
        for tensor in self._waiting.values():
            tensor.mul_(factor)

    def take(self, layout: Layout, grad: Tensor) -> Tensor:
        """grad + residual as float32, with the residual emptied: for a step that sends everything, or keeps nothing.

        Where the sum is not finite the residual stays. Once all of it has been delivered its memory is let go.
        """
        self.let_go(layout)
        if not any(slot.name in self._layout_of or slot.name in self._waiting for slot in layout):
            return grad
        residual = self.residual(layout, grad.device)
        memory = self._memories[layout]
        memory.fold()
        self.remember(layout)
        total = grad.float() + residual
        finite = total.isfinite()
        residual.masked_fill_(finite, 0.0)
        if finite.is_cuda:
            known = torch.empty((), dtype=torch.bool, pin_memory=True)
            known.copy_(finite.all(), non_blocking=True)
            memory.emptied = known, torch.cuda.current_stream(finite.device).record_event()
        else:
            memory.emptied = finite.all(), None
        return total

    def let_go(self, layout: Layout) -> None:
        """Drop the memory of a layout that the `take` of a step before has emptied, as soon as that is known."""
        memory = self._memories.get(layout)
        if memory is None or memory.emptied is None or memory.can_undo:
            return
        empty, known = memory.emptied
        if (known is None or known.query()) and bool(empty):
            del self._memories[layout]
            self._layout_of = {name: where for name, where in self._layout_of.items() if where != layout}

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
        olds = dict.fromkeys(self._layout_of[s.name] for s in layout if s.name in self._layout_of)
        # What the steps since `commit` have changed can be undone in the new layout too.
        before = {old: self._memories[old].before() for old in olds if self._memories[old].can_undo}
        saved = torch.zeros_like(residual) if before else None
        for old in olds:
            self._memories[old].fold()
        for slot in layout:
            target = slot.view(residual)
            if slot.name in self._waiting:
                loaded = self._waiting.pop(slot.name)
                if loaded.is_cuda:  # made on the stream of whoever loaded it
                    loaded.record_stream(torch.cuda.current_stream(loaded.device))
                target.copy_(loaded)
            elif slot.name in self._layout_of:
                old = self._layout_of[slot.name]
                place = next(s for s in old if s.name == slot.name)
                target.copy_(place.view(self._memories[old].residual))
            if saved is not None:
                known = before.get(self._layout_of.get(slot.name, ()))
                slot.view(saved).copy_(target if known is None else place.view(known))
            self._layout_of[slot.name] = layout
        self._drop_unused()
        return _Memory(residual, saved=None if saved is None else _Saved(saved, []))

    def _drop_unused(self) -> None:
        used = set(self._layout_of.values())
        self._memories = {layout: memory for layout, memory in self._memories.items() if layout in used}


def pack(slots: Iterable[tuple[Slot, Slot]], source: Tensor, target: Tensor) -> None:
    """Copy parameters between two flat buffers, from the first slot's place to the second's."""
    for here, there in slots:
        there.flat(target).copy_(here.flat(source))
