"""Entries of sparse gradients, whatever the backend: how they are packed, unpacked and merged.

*Entries* are int32 indices (their bits: unsigned, ascending) and float32 values of the same length. `compress.entries`
says how they are packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..entries import index_bytes, value_bytes


@dataclass(frozen=True)
class Pieces:
    """A list of entries cut into pieces that are packed one by one, and lie end to end: piece i has `counts[i]` entries
    with indices from `bases[i]` up to `bases[i] + ranges[i]`."""

    counts: Sequence[int]
    bases: Sequence[int]
    ranges: Sequence[int]

    def index_sizes(self) -> list[int]:
        """Bytes of each piece's indices."""
        return [index_bytes(size, n) for size, n in zip(self.ranges, self.counts, strict=True)]

    def value_sizes(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each piece's values."""
        return [value_bytes(n, dtype) for n in self.counts]


class EntryKernels(ABC):
    """What a backend does with entries. Indices on the wire are relative to `base` and below `numel`."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - may be nothing
        """Compile all of this for tensors on `device`, so that no later call has to."""

    @abstractmethod
    def pack_indices(self, indices: Tensor, count: Tensor | None, base: int, numel: int, wire: Tensor) -> None:
        """Write `indices`, int32 [k], of which the first `count` (int32 [1] on the device; None: all) are used."""

    @abstractmethod
    def unpack_indices(self, wires: Tensor, base: int, numel: int, counts: Tensor | None, indices: Tensor) -> None:
        """Read rows of packed indices, uint8 [rows, bytes], into int32 [rows, k] and, unless None, int32 [rows].

        A row has as many entries as bits are set. Those beyond k have no room; where there are fewer, or an index is
        not below `numel`, the index becomes 2^32 - 1, which is never in range.
        """

    @abstractmethod
    def pack_values(
        self,
        values: Tensor,
        dtype: torch.dtype,
        wire: Tensor,
        indices: Tensor | None = None,
        count: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """Write `values`, float32 [k], as `dtype`. With a residual: residual[indices] = value - decoded, for the first
        `count` (int32 [1]; None: all) of them, where the value is finite."""

    @abstractmethod
    def unpack_values(self, wires: Tensor, dtype: torch.dtype, values: Tensor) -> None:
        """Read rows of packed values, uint8 [rows, bytes], into float32 [rows, k]."""

    def pack_index_pieces(self, indices: Tensor, pieces: Pieces, wire: Tensor) -> None:
        """`pack_indices` for each piece of `indices`, all of them used."""
        parts = indices.split(list(pieces.counts)), wire.split(pieces.index_sizes()), pieces.bases, pieces.ranges
        for part, into, base, size in zip(*parts, strict=True):
            if len(part):
                self.pack_indices(part, None, base, size, into)

    def unpack_index_pieces(self, wire: Tensor, pieces: Pieces, indices: Tensor) -> None:
        """`unpack_indices` for each piece."""
        parts = wire.split(pieces.index_sizes()), indices.split(list(pieces.counts)), pieces.bases, pieces.ranges
        for part, into, base, size in zip(*parts, strict=True):
            if len(into):
                self.unpack_indices(part[None], base, size, None, into[None])

    def pack_value_pieces(
        self,
        values: Tensor,
        pieces: Pieces,
        dtype: torch.dtype,
        wire: Tensor,
        indices: Tensor,
        residual: Tensor | None = None,
    ) -> None:
        """`pack_values` for each piece of `values`, all of them used."""
        counts = list(pieces.counts)
        parts = values.split(counts), wire.split(pieces.value_sizes(dtype)), indices.split(counts)
        for part, into, at in zip(*parts, strict=True):
            if len(part):
                self.pack_values(part, dtype, into, at, None, residual)

    def unpack_value_pieces(self, wire: Tensor, pieces: Pieces, dtype: torch.dtype, values: Tensor) -> None:
        """`unpack_values` for each piece."""
        for part, into in zip(wire.split(pieces.value_sizes(dtype)), values.split(list(pieces.counts)), strict=True):
            if len(into):
                self.unpack_values(part[None], dtype, into[None])

    def put_back(self, entries: tuple[Tensor, Tensor], kept: Tensor, residual: Tensor) -> None:
        """residual[index] = value for the entries (indices, values) whose index is not among `kept`, ascending int32,
        and whose value is finite."""
        indices, values = entries
        if len(kept):
            place = torch.searchsorted(kept, indices).clamp_(max=len(kept) - 1)
            rest = (kept[place] != indices) & values.isfinite()
        else:
            rest = values.isfinite()
        residual[indices[rest].long()] = values[rest]

    def merge(
        self,
        indices: Tensor,
        values: Tensor,
        offsets: Sequence[int],
        start: int,
        stop: int,
        out_indices: Tensor,
        out_values: Tensor,
    ) -> tuple[int, int]:
        """Sum lists of entries, in the order of the lists, at the union of their indices.

        Args:
            indices, values: the lists end to end, list i from `offsets[i]` to `offsets[i + 1]`.
            start, stop: an entry counts if its index lies here and above every other of its list that does so before.
            out_indices, out_values: int32 and float32 with room for all entries. May not overlap with the lists.

        Returns:
            How many entries the result has (the host waits for this number), and how many did not count.
        """
        # In torch, for devices without anything better. No index comes twice in a list, so each sum has one order.
        device = indices.device
        total = torch.zeros(stop - start, dtype=torch.float32, device=device)
        present = torch.zeros(stop - start, dtype=torch.bool, device=device)
        skipped = torch.zeros((), dtype=torch.int64, device=device)
        for first, last in pairwise(offsets):
            if first == last:
                continue
            at = (indices[first:last].long() & 0xFFFFFFFF) - start
            inside = (at >= 0) & (at < stop - start)
            highest = torch.where(inside, at, -1).cummax(0).values
            sound = inside & (at > torch.cat([highest.new_full((1,), -1), highest[:-1]]))
            place = at[sound]
            total[place] += values[first:last][sound]
            present[place] = True
            skipped += (~sound).sum()
        found = present.nonzero().view(-1)
        out_indices[: len(found)] = (found + start).int()
        out_values[: len(found)] = total[found]
        return len(found), int(skipped)
