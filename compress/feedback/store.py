"""What is kept between steps, by parameter: the memory of every strategy of `compress.feedback`.

What is kept belongs to a parameter, by name. It lies in flat vectors, float32 or in fewer bytes, one set for each
*layout*, the order and strides in which a communication bucket holds its parameters, so that one kernel call serves the
bucket. When buckets are rebuilt, the new layout gathers what the old ones hold; nothing depends on a bucket's index.

Some exchanges have further residuals, at the owner of a slice: what its compression of the mean of P ranks left out, or
of the mean of the L ranks inside its node. Adding P or L times that, the *weight*, to the owner's own residual leaves
mean(gradient + residual) what it was, so it can be folded away wherever a slice loses its meaning: in a new layout, in
a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends import Rooms, narrow_vector
from ..formats.layout import Layout, OwnedSlice, Slot, layout_numel
from .base import NOTHING, RESIDUAL, Feedback, Kept, Residual, Vector, plain, total_lost, wide


@dataclass
class Owned:
    """What this rank keeps of elements `start` … for others too: `weight` times it counts as its own."""

    kept: Kept
    start: int
    weight: int

    @staticmethod
    def empty(like: Vector, where: OwnedSlice) -> Owned:
        start, length, weight = where
        return Owned(plain(like.new_zeros(length)), start, weight)

    @property
    def residual(self) -> Vector:
        """As it is kept."""
        return self.kept.held[RESIDUAL]

    @property
    def where(self) -> OwnedSlice:
        return self.start, self.residual.numel(), self.weight

    def fold_into(self, residual: Tensor) -> None:
        mine = self.kept.read(RESIDUAL)
        residual[self.start : self.start + mine.numel()].add_(mine, alpha=self.weight)


def _folded(vector: Vector, owned: Sequence[Owned]) -> Tensor:
    """As float32, with all that is owned added; a copy, where anything is."""
    residual = wide(vector)
    if owned:
        residual = residual.clone() if residual is vector else residual
        for part in owned:
            part.fold_into(residual)
    return residual


@dataclass
class _Saved:
    """A memory as it was before the first of the steps that can still be undone; `valid` while they can."""

    vectors: dict[str, Vector]
    owned: list[Owned]
    lost: Tensor | None
    valid: bool = True


class LayoutMemory(Kept):
    """What is kept of one layout. Made by `Memory.of`.

    Args:
        keep_previous: whether to keep a copy for `undo`.
        layout: in which the vectors hold parameters.
    """

    def __init__(self, strategy: Feedback, vectors: Mapping[str, Vector], keep_previous: bool, layout: Layout) -> None:
        super().__init__(strategy, vectors)
        self.layout = layout
        self.remembers = keep_previous
        self._owned: list[Owned] = []
        self._saved: _Saved | None = None
        #: How many parameters have their place here.
        self.count = 0
        #: Whether the last `take` has emptied the residual, and when that is known, on a GPU.
        self._emptied: tuple[Tensor, torch.cuda.Event | None] | None = None

    # -- one step ----------------------------------------------------------------------------------------------------

    def take(self, grad: Tensor) -> Tensor:
        """`send_all`, with what owners of slices keep folded in, which then are none."""
        self.fold()
        total = self.send_all(grad)
        if self.keeps:
            empty = ~self.held[RESIDUAL].any()
            if empty.is_cuda:
                known = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
                known.copy_(empty, non_blocking=True)
                self._emptied = known, torch.cuda.current_stream(empty.device).record_event()
            else:
                self._emptied = empty, None
        return total

    def owned(self, slices: Sequence[OwnedSlice]) -> list[Kept]:
        """What this rank keeps for others, one for each slice; folded into its own when the slices change."""
        if not self.keeps:
            return [NOTHING] * len(slices)
        if [part.where for part in self._owned] != list(slices):
            self.fold()
            self._owned = [Owned.empty(self.held[RESIDUAL], where) for where in slices]
        return [part.kept for part in self._owned]

    def remember(self) -> None:
        """Before a step changes anything: keep it for `undo`, if that is wanted and nothing is kept since `commit`."""
        if not self.remembers or self.can_undo:
            return
        saved = self._saved
        if saved is None or [part.where for part in saved.owned] != [part.where for part in self._owned]:
            vectors = {name: vector.new_zeros(vector.numel()) for name, vector in self.held.items()}
            saved = self._saved = _Saved(vectors, [Owned.empty(p.residual, p.where) for p in self._owned], None)
        for name, vector in self.held.items():
            _copy(vector, saved.vectors[name])
        for copy, part in zip(saved.owned, self._owned, strict=True):
            _copy(part.residual, copy.residual)
        saved.lost, saved.valid = self.lost, True

    # -- afterwards --------------------------------------------------------------------------------------------------

    @property
    def can_undo(self) -> bool:
        return self._saved is not None and self._saved.valid

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept any more, as far as is known without waiting."""
        if self._emptied is None or self.can_undo or not self.strategy.only_residual:
            return False
        empty, known = self._emptied
        return (known is None or known.query()) and bool(empty)

    def touched(self) -> None:
        """Somebody may write to the vectors."""
        self._emptied = None

    def fold(self) -> None:
        """Add what is owned to the own residual, and empty it. Changes no mean over ranks."""
        if self._owned:
            with self.open():
                for part in self._owned:
                    part.fold_into(self[RESIDUAL])
                    part.residual.zero_()

    def replace(self, where: Tensor, values: Tensor) -> None:
        super().replace(where, values)
        for part in self._owned:
            start, length, _ = part.where
            with part.kept.open():
                part.kept[RESIDUAL].masked_fill_(where[start : start + length], 0.0)

    def commit(self) -> None:
        if self._saved is not None:
            self._saved.valid = False

    def undo(self) -> None:
        saved, self._emptied = self._saved, None
        if saved is None or not saved.valid:
            return
        self.lost = saved.lost
        for name, vector in self.held.items():
            _copy(saved.vectors[name], vector)
        if [part.where for part in saved.owned] == [part.where for part in self._owned]:
            for part, copy in zip(self._owned, saved.owned, strict=True):
                _copy(copy.residual, part.residual)
            return
        # The exchange has changed meanwhile, and with it what this rank owns.
        for part in self._owned:
            part.residual.zero_()
        with self.open():
            for copy in saved.owned:
                copy.fold_into(self[RESIDUAL])

    def rescale(self, factor: float | Tensor) -> None:
        super().rescale(factor)
        for part in self._owned:
            part.kept.rescale(factor)

    def whole(self, vector: str) -> Tensor:
        """A vector as it is now, with all that is owned folded in; not to be changed."""
        return _folded(self.held[vector], self._owned if vector == RESIDUAL else [])

    def before(self, vector: str) -> Tensor:
        """A vector as `undo` would leave it, with all that is owned folded in; not to be changed. `can_undo` holds."""
        assert self._saved is not None
        return _folded(self._saved.vectors[vector], self._saved.owned if vector == RESIDUAL else [])

    def can_go_back_to(self, vectors: dict[str, Vector]) -> None:
        """Let `undo` put back these."""
        self._saved = _Saved(vectors, [], None)


def _copy(source: Vector, target: Vector) -> None:
    """Of two that are kept alike."""
    target.copy_(source)  # type: ignore[arg-type]


class Memory:
    """What one rank keeps between steps. Not for use by two threads at once.

    Args:
        strategy: what is done with it.
        keep_previous: keep a copy of everything as it was before the steps that can still be thrown away, for `undo`.
            `commit` says that those before have been applied.

    Attributes:
        version: changes with what `of` gives for any layout.
    """

    def __init__(self, strategy: Feedback | None = None, keep_previous: bool = False) -> None:
        self.strategy = Residual() if strategy is None else strategy
        self._keep_previous, self._rooms = keep_previous, Rooms()
        self._memories: dict[Layout, LayoutMemory] = {}
        #: Where each parameter lies now.
        self._places: dict[str, tuple[LayoutMemory, Slot]] = {}
        # What no layout has asked for yet, by vector and parameter: just loaded.
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._lost: float | Tensor = 0.0  # in layouts that are gone
        self.version = 0

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return bool(self._memories) or any(self._waiting.values())

    @property
    def lost(self) -> float:
        """The sum of the magnitudes that the strategy has given up. Waits for the device."""
        return float(self._lost) + total_lost(self._memories.values())

    def holds(self, layout: Layout) -> bool:
        """Whether parameters lie in this layout now, with something kept."""
        return layout in self._memories

    def of(self, layout: Layout, device: torch.device | str = "cpu") -> LayoutMemory:
        """What is kept of a layout; at first what its parameters had before."""
        memory = self._memories.get(layout)
        if memory is None:
            memory = self._memories[layout] = self._gather(layout, torch.device(device))
        memory.touched()
        return memory

    def take(self, layout: Layout, grad: Tensor) -> Tensor:
        """What a step sends that sends everything, or keeps nothing: with plain error feedback grad + residual as
        float32, and the residual emptied, except where that is not finite. `grad` itself where nothing is kept.

        Where a residual is all that is kept, its memory is let go once all of it has been delivered.
        """
        self.let_go(layout)
        if self.strategy.only_residual and not (self and self._has_any(layout)):
            return grad
        return self.of(layout, grad.device).take(grad)

    def deliver(self, layout: Layout, mean: Tensor) -> None:
        """Turn the decoded mean of a layout into what is handed out, in place. Called after every step."""
        memory = self._memories.get(layout)
        if memory is not None:
            memory.deliver(mean)

    def let_go(self, layout: Layout) -> None:
        """Drop the memory of a layout that the `take` of a step before has emptied, as soon as that is known."""
        memory = self._memories.get(layout)
        if memory is not None and memory.is_empty:
            self._drop(memory)
            for slot in layout:
                if self._lies_in(memory, slot):
                    del self._places[slot.name]

    def commit(self) -> None:
        """What has been delivered so far has been applied: `undo` goes no further back than here."""
        for memory in self._memories.values():
            memory.commit()

    def undo(self) -> None:
        """Put back everything as it was at the last `commit`: the steps since then have been thrown away."""
        for memory in self._memories.values():
            memory.undo()

    def give_back(self, layout: Layout, mean: Tensor, returned: Sequence[tuple[Slot, Tensor | None]]) -> None:
        """The means of all ranks for some parameters were thrown away after the exchange: keep them. When every rank
        does so, the mean of the residuals is what it was, plus that of the gradients that had gone in.

        What is not finite is left out.

        Args:
            layout: in which the parameters were reduced; `holds` it.
            mean: flat, in that layout: what was handed out.
            returned: each parameter's slot, of `layout`, and what had gone in on this rank, in the parameter's shape,
                where it will go in again.
        """
        if not returned:
            return
        memory = self.of(layout, mean.device)
        memory.remember()
        with memory.open():
            for slot, gradient in returned:
                again = None if gradient is None else gradient.float()
                self.strategy.thrown_away(memory, slot, slot.view(mean).float(), again)

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply everything: gradients are in units of a loss scale, and that has changed.

        Args:
            factor: a number, or a tensor [] on the gradients' device.
        """
        for memory in self._memories.values():
            memory.rescale(factor)
        for waiting in self._waiting.values():
            for name, tensor in waiting.items():
                here = tensor.to(factor.device) if isinstance(factor, Tensor) else tensor
                waiting[name] = here * factor
        if isinstance(self._lost, Tensor) or self._lost:
            self._lost = self._lost * factor

    def fold(self) -> None:
        """Add what slices' owners keep to their own residuals, and empty it. Changes no mean over ranks."""
        for memory in self._memories.values():
            memory.fold()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def by_name(self, vector: str = RESIDUAL) -> dict[str, Tensor]:
        """A copy of a vector's part of each parameter that has one, contiguous in the parameter's shape, with what
        owners keep folded in; this object stays as it is."""
        found = {name: tensor.clone() for name, tensor in self._waiting.get(vector, {}).items()}
        for layout, memory in self._memories.items() if vector in self.strategy.vectors else ():
            flat = memory.whole(vector)
            for slot in layout:
                if self._lies_in(memory, slot):
                    found[slot.name] = slot.view(flat).clone(memory_format=torch.contiguous_format)
        return found

    def everything(self) -> dict[str, dict[str, Tensor]]:
        """`by_name` of every vector."""
        return {vector: self.by_name(vector) for vector in self.strategy.vectors}

    def load(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace everything by copies of what `everything` gave.

        Raises:
            ValueError: the strategy keeps no such vector. Nothing has changed then.
        """
        for vector in saved:
            if saved[vector] and vector not in self.strategy.vectors:
                kept = ", ".join(self.strategy.vectors) or "nothing"
                raise ValueError(f"the checkpoint has {vector} of parameters, and {self.strategy} keeps {kept}")
        self.version += 1
        self._memories.clear()
        self._places.clear()
        self._lost = 0.0
        self._waiting = {
            vector: {name: tensor.detach().float().clone() for name, tensor in found.items()}
            for vector, found in saved.items()
        }

    def __getstate__(self) -> dict[str, object]:
        options = {"strategy": self.strategy, "keep_previous": self._keep_previous}
        return {**options, "vectors": self.everything(), "lost": self.lost}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["strategy"], state["keep_previous"])  # type: ignore[misc]
        self.load(state["vectors"])
        self._lost = state["lost"]

    # -- layouts -----------------------------------------------------------------------------------------------------

    def _gather(self, layout: Layout, device: torch.device) -> LayoutMemory:
        numel = layout_numel(layout)
        olds = dict.fromkeys(self._places[slot.name][0] for slot in layout if slot.name in self._places)
        # What the steps since `commit` have changed can be undone in the new layout too.
        undoable = [old for old in olds if old.can_undo]
        for old in olds:
            old.fold()
        saved: dict[str, Vector] = {}
        vectors: dict[str, Vector] = {}
        for vector in self.strategy.vectors:
            before = {old: old.before(vector) for old in undoable}
            now = {old: old.read(vector) for old in olds}
            target = torch.zeros(numel, dtype=torch.float32, device=device)
            self._fill(target, vector, layout, now)
            vectors[vector] = self._kept_as(vector, target)
            if before:
                target = target.clone()
                self._fill(target, vector, layout, before)
                saved[vector] = self._kept_as(vector, target)
        memory = LayoutMemory(self.strategy, vectors, self._keep_previous, layout)
        self.version += 1
        if saved:
            memory.can_go_back_to(saved)
        for slot in layout:
            for waiting in self._waiting.values():
                waiting.pop(slot.name, None)
            if slot.name in self._places:
                self._places[slot.name][0].count -= 1
            self._places[slot.name] = memory, slot
        memory.count = len(layout)
        for old in olds:
            if not old.count:
                self._drop(old)
        return memory

    def _kept_as(self, vector: str, flat: Tensor) -> Vector:
        """What the strategy wants of float32 numbers."""
        dtype = self.strategy.stored_as(vector)
        if dtype == torch.float32:
            return flat
        found = narrow_vector(flat.numel(), dtype, flat.device, self._rooms)
        found.write(flat)
        return found

    def _fill(self, target: Tensor, vector: str, layout: Layout, olds: Mapping[LayoutMemory, Tensor]) -> None:
        """Copy what `olds` have of the layout's parameters, or what is waiting for them."""
        waiting = self._waiting.get(vector, {})
        for slot in layout:
            loaded = waiting.get(slot.name)
            old, place = self._places.get(slot.name, (None, slot))
            if loaded is not None:
                if loaded.is_cuda:  # made on the stream on which it was loaded
                    loaded.record_stream(torch.cuda.current_stream(loaded.device))
                slot.view(target).copy_(loaded)
            elif old is not None and old in olds:
                slot.view(target).copy_(place.view(olds[old]))

    def _has_any(self, layout: Layout) -> bool:
        """True if something is kept of a layout's parameters, in whatever layout, or loaded."""
        known: list[Collection[str]] = [self._places.keys(), *(found.keys() for found in self._waiting.values())]
        return any(slot.name in names for names in known for slot in layout)

    def _lies_in(self, memory: LayoutMemory, slot: Slot) -> bool:
        place = self._places.get(slot.name)
        return place is not None and place[0] is memory

    def _drop(self, memory: LayoutMemory) -> None:
        self.version += 1
        self._lost += total_lost([self._memories.pop(memory.layout)])
