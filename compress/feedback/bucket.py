"""The state of one layout, with snapshots, and with the residuals of the slices that a rank owns.

Some exchanges have further residuals, at the owner of a slice: what its compression of the mean of P ranks dropped, or
of the mean of the L ranks inside its node. Adding P or L times that, the *weight*, to the owner's own residual leaves
mean(gradient + residual) what it was. So it can be folded away wherever a slice loses its meaning: in a new layout, in
a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..formats.layout import Layout, OwnedSlice
from .base import RESIDUAL, Feedback, FeedbackState, Vector, wide
from .residual import NOTHING, server_state


@dataclass
class ServerResidual:
    """The residual of a slice that this rank compresses for all: `weight` times it counts as the rank's own."""

    kept: FeedbackState
    start: int
    weight: int

    @staticmethod
    def empty(like: Vector, where: OwnedSlice) -> ServerResidual:
        start, length, weight = where
        return ServerResidual(server_state(like.new_zeros(length)), start, weight)

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


def _folded(vector: Vector, owned: Sequence[ServerResidual]) -> Tensor:
    """As float32, with all that is owned added; a copy, where anything is."""
    residual = wide(vector)
    if owned:
        residual = residual.clone() if residual is vector else residual
        for part in owned:
            part.fold_into(residual)
    return residual


@dataclass
class _Saved:
    """A state as it was before the first of the steps that can still be rolled back; `valid` while they can."""

    vectors: dict[str, Vector]
    owned: list[ServerResidual]
    dropped_l1: Tensor | None
    valid: bool = True


class BucketFeedback(FeedbackState):
    """The state of one layout. Made by `FeedbackStore.of`.

    Args:
        keep_previous: whether to keep a copy for `rollback`.
        layout: in which the vectors hold parameters.
        owned: what `unfolded` gave; `vectors` have the rank's own residuals.
    """

    def __init__(
        self,
        strategy: Feedback,
        vectors: Mapping[str, Vector],
        keep_previous: bool,
        layout: Layout,
        owned: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        super().__init__(strategy, vectors)
        self.layout = layout
        self.snapshots = keep_previous
        self._owned: list[ServerResidual] = []
        for where, (_, kept) in owned.items():
            start, weight = map(int, where.split())
            part = ServerResidual.empty(self.held[RESIDUAL], (start, len(kept), weight))
            with part.kept.open():
                part.kept[RESIDUAL].copy_(kept)
            self._owned.append(part)
        self._saved: _Saved | None = None
        #: How many parameters have their place here.
        self.count = 0
        #: Whether the last `drain` has emptied the residual, and on a GPU the event after which that is known.
        self._emptied: tuple[Tensor, torch.cuda.Event | None] | None = None

    # -- one step ----------------------------------------------------------------------------------------------------

    def drain(self, grad: Tensor) -> Tensor:
        """`flush`, with what owners of slices keep folded in, which then are none."""
        self.fold()
        total = self.flush(grad)
        if self.keeps:
            empty = ~self.held[RESIDUAL].any()
            if empty.is_cuda:
                known = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
                known.copy_(empty, non_blocking=True)
                self._emptied = known, torch.cuda.current_stream(empty.device).record_event()
            else:
                self._emptied = empty, None
        return total

    def owned(self, slices: Sequence[OwnedSlice]) -> list[FeedbackState]:
        """The residuals of the slices that this rank owns; folded into its own when the slices change."""
        if not self.keeps:
            return [NOTHING] * len(slices)
        if [part.where for part in self._owned] != list(slices):
            self.fold()
            self._owned = [ServerResidual.empty(self.held[RESIDUAL], where) for where in slices]
        return [part.kept for part in self._owned]

    def snapshot(self) -> None:
        """Copy the state for `rollback` before a step changes it, once after each `commit`, if `snapshots`."""
        if not self.snapshots or self.can_roll_back:
            return
        saved = self._saved
        if saved is None or [part.where for part in saved.owned] != [part.where for part in self._owned]:
            vectors = {name: vector.new_zeros(vector.numel()) for name, vector in self.held.items()}
            saved = self._saved = _Saved(
                vectors, [ServerResidual.empty(p.residual, p.where) for p in self._owned], None
            )
        for name, vector in self.held.items():
            _copy(vector, saved.vectors[name])
        for copy, part in zip(saved.owned, self._owned, strict=True):
            _copy(part.residual, copy.residual)
        saved.dropped_l1, saved.valid = self.dropped_l1, True

    # -- afterwards --------------------------------------------------------------------------------------------------

    @property
    def can_roll_back(self) -> bool:
        return self._saved is not None and self._saved.valid

    @property
    def is_empty(self) -> bool:
        """True if the state is known to be zero, without waiting for the device."""
        if self._emptied is None or self.can_roll_back or not self.strategy.only_residual:
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

    def rollback(self) -> None:
        saved, self._emptied = self._saved, None
        if saved is None or not saved.valid:
            return
        self.dropped_l1 = saved.dropped_l1
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

    def unfolded(self) -> dict[str, Tensor]:
        """Copies of the own residual and that of each slice that is owned, float32 [2, length], by start and weight."""
        found = {}
        own = self.read(RESIDUAL) if self._owned else torch.empty(0, device="cpu")
        for part in self._owned:
            start, length, weight = part.where
            found[f"{start} {weight}"] = torch.stack([own[start : start + length], wide(part.residual)])
        return found

    def before(self, vector: str) -> Tensor:
        """A vector as `rollback` would leave it, with all that is owned folded in; not to be changed. Requires
        `can_roll_back`."""
        assert self._saved is not None
        return _folded(self._saved.vectors[vector], self._saved.owned if vector == RESIDUAL else [])

    def can_go_back_to(self, vectors: dict[str, Vector]) -> None:
        """Let `rollback` put back these."""
        self._saved = _Saved(vectors, [], None)


def _copy(source: Vector, target: Vector) -> None:
    """Of two that are kept alike."""
    target.copy_(source)  # type: ignore[arg-type]
