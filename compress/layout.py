"""Where a flat buffer holds its parameters.

A *layout* is the order in which a communication bucket holds its parameters, and the strides with which it does. What
belongs to a parameter moves by its name from one layout to another.
"""

from __future__ import annotations

from collections.abc import Iterable
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
#: Start and length of what a rank owns, and how many times what it keeps there counts as its own.
OwnedSlice = tuple[int, int, int]


def layout_numel(layout: Layout) -> int:
    return sum(slot.numel for slot in layout)


def end_to_end(slots: Iterable[Slot]) -> Layout:
    """The slots one after the other."""
    result, start = [], 0
    for slot in slots:
        result.append(Slot(slot.name, start, slot.shape, slot.stride))
        start += slot.numel
    return tuple(result)


def pack(slots: Iterable[tuple[Slot, Slot]], source: Tensor, target: Tensor) -> None:
    """Copy parameters between two flat buffers, from the first slot's place to the second's."""
    for here, there in slots:
        there.flat(target).copy_(here.flat(source))
