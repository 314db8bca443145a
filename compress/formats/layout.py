"""Where a flat buffer holds its parameters.

A *layout* is the order in which a communication bucket holds its parameters, and the strides with which it does. What
belongs to a parameter moves by its name from one layout to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

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


class _Hashed(tuple[Slot, ...]):
    """A layout that computes its hash once: of thousands of slots it takes milliseconds."""

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = self._hash = super().__hash__()
        return found

    def __reduce__(self) -> tuple[type[_Hashed], tuple[Layout]]:
        return _Hashed, (tuple(self),)  # another process hashes names otherwise


#: Start and length of what a rank owns, and how many times what it keeps there counts as its own.
OwnedSlice = tuple[int, int, int]


def layout_numel(layout: Layout) -> int:
    return sum(slot.numel for slot in layout)


def end_to_end(slots: Iterable[Slot]) -> Layout:
    """The slots one after the other, in a layout that is quick to look up."""
    result, start = [], 0
    for slot in slots:
        result.append(Slot(slot.name, start, slot.shape, slot.stride))
        start += slot.numel
    return _Hashed(result)


#: Where a run of elements lies in a flat buffer, and the memory that it is copied to and from.
Run = tuple[int, Tensor]


def runs_between(places: Iterable[tuple[Slot, Slot]], inside: Tensor) -> Iterator[Run]:
    """What moves parameters between a flat buffer and another one, `inside`: as few runs as there are parameters that
    do not lie next to each other in both.

    Args:
        places: of each, in the buffer and in the other one; ascending in the first.
    """
    start = there = length = 0
    for here, slot in places:
        if (here.start, slot.start) != (start + length, there + length):
            yield start, inside[there : there + length]
            start, there, length = here.start, slot.start, 0
        length += here.numel
    yield start, inside[there : there + length]


class Packing:
    """Moves parts of a flat buffer elsewhere and back, in one launch where all have the same dtype.

    Args:
        numel: of the buffer.
        runs: which parts, and where to.
    """

    def __init__(self, numel: int, runs: Iterable[Run]) -> None:
        ordered = sorted((run for run in runs if run[1].numel()), key=lambda run: run[0])
        self._outside = [memory for _, memory in ordered]
        # Every other part of the buffer is between two runs.
        edges = [0, *(edge for start, part in ordered for edge in (start, start + part.numel())), numel]
        self._sizes = [end - start for start, end in pairwise(edges)]

    def take(self, buffer: Tensor) -> None:
        """Copy from the buffer."""
        if self._outside:
            torch._foreach_copy_(self._outside, self._inside(buffer))

    def put(self, buffer: Tensor) -> None:
        """Copy to the buffer."""
        if self._outside:
            torch._foreach_copy_(self._inside(buffer), self._outside)

    def _inside(self, buffer: Tensor) -> list[Tensor]:
        return list(buffer.split_with_sizes(self._sizes)[1::2])
