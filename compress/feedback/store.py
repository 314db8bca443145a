"""The state of a strategy by parameter, as one rank keeps it between steps.

State belongs to a parameter, by name. It lies in flat vectors, one set for each *layout*: the order and strides in
which a communication bucket holds its parameters, so that one kernel call serves the bucket. When buckets are rebuilt,
the new layout gathers what the old ones hold; nothing depends on a bucket's index.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from ..backends import ScratchPool, low_precision_vector
from ..formats.layout import Layout, Slot, layout_numel
from .base import RESIDUAL, Feedback, FeedbackState, Vector, total_dropped
from .bucket import BucketFeedback
from .residual import Residual

#: What owners of slices keep, by the layout's fingerprint and by the slice's start and weight: float32 [2, length], the
#: owner's own residual there, and that of the slice.
Owned = Mapping[str, Mapping[str, Tensor]]

_versions = itertools.count()


class FeedbackStore:
    """The state of one rank, all layouts together. Not for use by two threads at once.

    Args:
        strategy: what is done with it.
        keep_previous: keep a copy of everything as it was before the steps that can still be discarded, for
            `rollback`. `commit` says that those before have been applied.

    Attributes:
        version: changes with what `of` gives for any layout; no two stores ever have the same.
    """

    def __init__(self, strategy: Feedback | None = None, keep_previous: bool = False) -> None:
        self.strategy = Residual() if strategy is None else strategy
        self._keep_previous, self._scratch = keep_previous, ScratchPool()
        self._memories: dict[Layout, BucketFeedback] = {}
        #: Where each parameter lies now.
        self._places: dict[str, tuple[BucketFeedback, Slot]] = {}
        # What no layout has asked for yet, by vector and parameter: just loaded.
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._waiting_owned: dict[str, dict[str, Tensor]] = {}
        self._dropped_l1: float | Tensor = 0.0  # in layouts that are gone
        self.version = next(_versions)

    def __bool__(self) -> bool:
        """True if there is any state."""
        return bool(self._memories) or any(self._waiting.values())

    @property
    def dropped_l1(self) -> float:
        """The sum of the magnitudes that the strategy has dropped. Waits for the device."""
        return float(self._dropped_l1) + total_dropped(self._memories.values())

    def holds(self, layout: Layout) -> bool:
        """True if parameters lie in this layout now and have state."""
        return layout in self._memories

    def of(self, layout: Layout, device: torch.device | str = "cpu") -> BucketFeedback:
        """The state of a layout; at first what its parameters had before."""
        memory = self._memories.get(layout)
        if memory is None:
            memory = self._memories[layout] = self._gather(layout, torch.device(device))
        memory.touched()
        return memory

    def drain(self, layout: Layout, grad: Tensor) -> Tensor:
        """Return what a step sends that sends everything: with plain error feedback grad + residual as float32, and
        the residual is emptied, except where that is not finite. `grad` itself if there is no state.

        Where a residual is all that is kept, its memory is let go once all of it has been delivered.
        """
        self.let_go(layout)
        if self.strategy.only_residual and not (self and self.has_any(layout)):
            return grad
        return self.of(layout, grad.device).drain(grad)

    def deliver(self, layout: Layout, mean: Tensor) -> None:
        """Turn the decoded mean of a layout into what is handed out, in place. Called after every step."""
        memory = self._memories.get(layout)
        if memory is not None:
            memory.deliver(mean)

    def let_go(self, layout: Layout) -> None:
        """Drop the memory of a layout that the `drain` of a step before has emptied, as soon as that is known."""
        memory = self._memories.get(layout)
        if memory is not None and memory.is_empty:
            self._drop(memory)
            for slot in layout:
                if self._lies_in(memory, slot):
                    del self._places[slot.name]

    def commit(self) -> None:
        """Steps delivered so far have been applied: `rollback` goes back to here at most."""
        for memory in self._memories.values():
            memory.commit()

    def rollback(self) -> None:
        """Put back everything as it was at the last `commit`: the steps since then have been discarded."""
        for memory in self._memories.values():
            memory.rollback()

    def restore(self, layout: Layout, mean: Tensor, returned: Sequence[tuple[Slot, Tensor | None]]) -> None:
        """The means of all ranks for some parameters were discarded after the exchange: keep them. When every rank
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
        memory.snapshot()
        with memory.open():
            for slot, gradient in returned:
                again = None if gradient is None else gradient.float()
                self.strategy.on_discarded(memory, slot, slot.view(mean).float(), again)

    def discarding(self, means: Iterable[tuple[Layout, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """`everything`, as if `restore` had kept all of these means, each with its layout; this object stays as it
        is."""
        found = self.everything()
        for layout, mean in means:
            for slot in layout:
                of_slot = {vector: by_name[slot.name] for vector, by_name in found.items() if slot.name in by_name}
                for tensor in list(of_slot.values())[:1]:
                    kept = FeedbackState(self.strategy, {vector: x.view(-1) for vector, x in of_slot.items()})
                    place = replace(slot, start=0, stride=tensor.stride())
                    self.strategy.on_discarded(kept, place, slot.view(mean).float(), None)
        return found

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply everything: gradients are in units of a loss scale, and that has changed.

        Args:
            factor: a number, or a tensor [] on the gradients' device.
        """
        for memory in self._memories.values():
            memory.rescale(factor)
        for waiting in (*self._waiting.values(), *self._waiting_owned.values()):
            for name, tensor in waiting.items():
                here = tensor.to(factor.device) if isinstance(factor, Tensor) else tensor
                waiting[name] = here * factor
        if isinstance(self._dropped_l1, Tensor) or self._dropped_l1:
            self._dropped_l1 = self._dropped_l1 * factor

    def fold(self) -> None:
        """Add what slices' owners keep to their own residuals, and empty it. Changes no mean over ranks."""
        self._waiting_owned = {}
        for memory in self._memories.values():
            memory.fold()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def by_name(self, vector: str = RESIDUAL) -> dict[str, Tensor]:
        """A copy of a vector's part of each parameter that has one, contiguous in the parameter's shape, with what
        owners keep folded in; this object stays as it is."""
        found = {name: tensor.clone() for name, tensor in self._waiting.get(vector, {}).items()}
        for layout, memory in self._memories.items() if vector in self.strategy.state_names else ():
            flat = memory.whole(vector)
            for slot in layout:
                if self._lies_in(memory, slot):
                    found[slot.name] = slot.view(flat).clone(memory_format=torch.contiguous_format)
        return found

    def everything(self) -> dict[str, dict[str, Tensor]]:
        """`by_name` of every vector."""
        return {vector: self.by_name(vector) for vector in self.strategy.state_names}

    def owned(self) -> Owned:
        """Copies of what owners of slices keep, which `everything` has folded in: with it, state that comes to lie in
        an equal layout goes on with the same bits."""
        now = {fingerprint(layout): memory.unfolded() for layout, memory in self._memories.items()}
        return self._waiting_owned | {layout: parts for layout, parts in now.items() if parts}

    def load(self, saved: Mapping[str, Mapping[str, Tensor]], owned: Owned = MappingProxyType({})) -> None:
        """Replace everything by copies of what `everything` and `owned` gave.

        Raises:
            ValueError: the strategy keeps no such vector. Nothing has changed then.
        """
        for vector in saved:
            if saved[vector] and vector not in self.strategy.state_names:
                kept = ", ".join(self.strategy.state_names) or "nothing"
                raise ValueError(f"the checkpoint has {vector} of parameters, and {self.strategy} keeps {kept}")
        self.version = next(_versions)
        self._memories.clear()
        self._places.clear()
        self._dropped_l1 = 0.0
        self._waiting = {
            vector: {name: tensor.detach().float().clone() for name, tensor in found.items()}
            for vector, found in saved.items()
        }
        self._waiting_owned = {
            layout: {where: part.detach().float().clone() for where, part in parts.items()}
            for layout, parts in owned.items()
        }

    def __getstate__(self) -> dict[str, object]:
        options = {"strategy": self.strategy, "keep_previous": self._keep_previous}
        return {**options, "vectors": self.everything(), "lost": self.dropped_l1}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["strategy"], state["keep_previous"])  # type: ignore[misc]
        self.load(state["vectors"])
        self._dropped_l1 = state["lost"]

    # -- layouts -----------------------------------------------------------------------------------------------------

    def _gather(self, layout: Layout, device: torch.device) -> BucketFeedback:
        numel = layout_numel(layout)
        olds = dict.fromkeys(self._places[slot.name][0] for slot in layout if slot.name in self._places)
        # What the steps since `commit` have changed can be undone in the new layout too.
        undoable = [old for old in olds if old.can_roll_back]
        for old in olds:
            old.fold()
        apart = self._waiting_owned.pop(fingerprint(layout), {}) if self._waiting_owned and not olds else {}
        saved: dict[str, Vector] = {}
        vectors: dict[str, Vector] = {}
        for vector in self.strategy.state_names:
            before = {old: old.before(vector) for old in undoable}
            now = {old: old.read(vector) for old in olds}
            target = torch.zeros(numel, dtype=torch.float32, device=device)
            self._fill(target, vector, layout, now)
            for where, (own, _) in apart.items() if vector == RESIDUAL else ():
                target[int(where.split()[0]) :][: len(own)] = own
            vectors[vector] = self._kept_as(vector, target)
            if before:
                target = target.clone()
                self._fill(target, vector, layout, before)
                saved[vector] = self._kept_as(vector, target)
        memory = BucketFeedback(self.strategy, vectors, self._keep_previous, layout, apart)
        self.version = next(_versions)
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
        self._scratch.clear()
        return memory

    def _kept_as(self, vector: str, flat: Tensor) -> Vector:
        """Store float32 numbers as the strategy wants them."""
        dtype = self.strategy.storage_dtype(vector)
        if dtype == torch.float32:
            return flat
        found = low_precision_vector(flat.numel(), dtype, flat.device, self._scratch)
        found.write(flat)
        return found

    def _fill(self, target: Tensor, vector: str, layout: Layout, olds: Mapping[BucketFeedback, Tensor]) -> None:
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

    def has_any(self, layout: Layout) -> bool:
        """True if something is kept of a layout's parameters, in this layout or another one, or loaded."""
        known: list[Collection[str]] = [self._places.keys(), *(found.keys() for found in self._waiting.values())]
        return any(slot.name in names for names in known for slot in layout)

    def _lies_in(self, memory: BucketFeedback, slot: Slot) -> bool:
        place = self._places.get(slot.name)
        return place is not None and place[0] is memory

    def _drop(self, memory: BucketFeedback) -> None:
        self.version = next(_versions)
        self._dropped_l1 += total_dropped([self._memories.pop(memory.layout)])


def fingerprint(layout: Layout) -> str:
    """Equal for equal layouts, in any process."""
    return hashlib.sha256(repr([(s.name, s.start, s.shape, s.stride) for s in layout]).encode()).hexdigest()[:16]
