"""Parameters that are exchanged together, with their optimizer's state in flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks.core.bucket import Bucket
from ..hooks.local_sgd.outer_sgd import layout_of

NOTHING: Mapping[str, Any] = {}


class FlatState:
    """Some parameters of one group. Flat tensors hold their state, and each parameter's state is a view: a step is a
    few passes over the bucket, for any number of parameters.

    Args:
        index: identifies the bucket, alike on all ranks.
        group: the index of the parameters' group.
        parameters: the parameters by name.
        state: the dtypes of the state's tensors by name; they begin with zeros.

    Attributes:
        flat, views: the bucket's tensor and each parameter's part in its shape, by name of a state.
        exchanged: flat float32, the tensor that ranks exchange, where that is none of the state.
        divisor_of: `OneBitAdam`'s: the version of the variance, and eps, from which `exchanged` has been made.
    """

    def __init__(
        self, index: int, group: int, parameters: Mapping[str, nn.Parameter], state: Mapping[str, torch.dtype]
    ) -> None:
        self.group, self.names, self.parameters = group, list(parameters), list(parameters.values())
        self._layout, device = layout_of(parameters), self.parameters[0].device
        numel = sum(p.numel() for p in self.parameters)
        self.flat = {name: torch.zeros(numel, dtype=dtype, device=device) for name, dtype in state.items()}
        self.views = {name: self.parts(flat) for name, flat in self.flat.items()}
        self._addresses = {name: [view.data_ptr() for view in views] for name, views in self.views.items()}
        self.exchanged = torch.zeros(numel, dtype=torch.float32, device=device)
        self.divisor_of: tuple[int, float] | None = None
        self.exchanged_views = self.parts(self.exchanged)
        self.bucket = Bucket(index, list[Tensor](self.parameters), self._layout, frozenset(), self.exchanged)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor, in the parameter's shape."""
        return [slot.view(flat) for slot in self._layout]

    def replaced(self, state: Mapping[Tensor, Mapping[str, Any]]) -> Iterator[tuple[int, str, Any]]:
        """Where an optimizer's `state` shows something else than the bucket's tensors: place, name, and what it shows
        there, None if nothing."""
        for place, p in enumerate(self.parameters):
            shown = state.get(p, NOTHING)
            for name, views in self.views.items():
                found = shown.get(name)
                if found is not views[place] or found.data_ptr() != self._addresses[name][place]:
                    yield place, name, found

    def take(self, place: int, name: str, values: Tensor | None) -> None:
        """Set a parameter's part of a state's tensor, to zero if `values` is None, and make its view anew."""
        view = self.views[name][place] = self._layout[place].view(self.flat[name])
        view.zero_() if values is None else view.copy_(values)

    def add_gradients(self, views: Sequence[Tensor], share: float) -> None:
        """views += share · gradients; that of a parameter without one is zero."""
        pairs = [(v, p.grad) for v, p in zip(views, self.parameters, strict=True) if p.grad is not None]
        if pairs:
            torch._foreach_add_([v for v, _ in pairs], [grad for _, grad in pairs], alpha=share)

    def decay(self, direction: Tensor, moving: Tensor, share: float) -> None:
        """direction += share · parameters, where `moving` (bool); all flat."""
        for part, moves, p in zip(self.parts(direction), self.parts(moving), self.parameters, strict=True):
            part.add_(torch.where(moves, p, 0.0), alpha=share)

    def move(self, direction: Tensor, lr: float) -> None:
        """parameters -= lr · direction, flat float32."""
        torch._foreach_add_(list[Tensor](self.parameters), self.parts(direction), alpha=-lr)
