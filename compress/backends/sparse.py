"""What sparse codecs need of a backend, whichever it is: entries are packed, unpacked and merged (`EntryKernels`), and
selected and summed as they are (`SparseKernels`).

*Entries* are int32 indices (their bits: unsigned, ascending) and float32 values of the same length.
`compress.formats.entries` says how they are packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..formats.entries import index_bytes, value_bytes
from .kernels import CodecLike, Kernels, Workspace, divide, parts_of
from .partition import Dealer, Partition
from .places import add_at, sound_places, used_places
from .union import Union


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

    @staticmethod
    def parts(wire: Tensor, sizes: Sequence[int], begins: Sequence[int] | None) -> list[Tensor]:
        """Where pieces of such sizes lie."""
        begins = list(accumulate(sizes, initial=0))[:-1] if begins is None else begins
        return [wire[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


class EntryKernels(ABC):
    """Entries on one backend, packed, unpacked and merged. Indices on the wire are relative to `base` and below
    `numel`."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - may be nothing
        """Compile all of this for tensors on `device`, so that no later call has to."""

    def union(self, numel: int, capacity: int, device: torch.device) -> Union:
        """Make a `Union`."""
        return Union(numel, capacity, device)

    def dealer(self, partition: Partition, k: int, share: int, codec: Any, sent: tuple[Tensor, Tensor]) -> Dealer:
        """Make a `Dealer`, which sends entries to owners."""
        return Dealer(self, partition, k, share, codec, sent)

    def add(self, out: Tensor, places: Tensor, values: Tensor) -> None:
        """out[places] += values, where those are finite: float32 [numel], int32 or int64 [k], and float32 [k]. Where a
        place comes twice, all values but one are -0.0."""
        add_at(out, places, values)

    def take(self, residual: Tensor, indices: Tensor, values: Tensor, count: Tensor | None) -> None:
        """values += residual[indices], and zero there where that is finite: of the first `count` (int32 [1] on the
        device; None: all) indices, int32 or int64. Those of finite values come once."""
        at, used = indices.long(), None
        if count is not None:
            at, used = used_places(indices, count)
        rest = residual[at]
        values += rest if used is None else rest.masked_fill(~used, -0.0)
        stays = ~values.isfinite() if used is None else ~(values.isfinite() & used)
        # Added, so that what is not used changes nothing, wherever it points: not even the sign of a zero.
        self.add(residual, at, (-rest).masked_fill_(stays, -0.0))

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

    def pack_index_pieces(
        self, indices: Tensor, pieces: Pieces, wire: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        """`pack_indices` for each piece of `indices`, all of them used.

        Args:
            begins: where each piece lies in `wire`; None: end to end.
        """
        parts = indices.split(list(pieces.counts)), pieces.parts(wire, pieces.index_sizes(), begins)
        for part, into, base, size in zip(*parts, pieces.bases, pieces.ranges, strict=True):
            if len(part):
                self.pack_indices(part, None, base, size, into)

    def unpack_index_pieces(
        self, wire: Tensor, pieces: Pieces, indices: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        """`unpack_indices` for each piece."""
        parts = pieces.parts(wire, pieces.index_sizes(), begins), indices.split(list(pieces.counts))
        for part, into, base, size in zip(*parts, pieces.bases, pieces.ranges, strict=True):
            if len(into):
                self.unpack_indices(part[None], base, size, None, into[None])

    def pack_value_pieces(
        self, values: Tensor, pieces: Pieces, dtype: torch.dtype, wire: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        """`pack_values` for each piece of `values`, all of them used."""
        parts = values.split(list(pieces.counts)), pieces.parts(wire, pieces.value_sizes(dtype), begins)
        for part, into in zip(*parts, strict=True):
            if len(part):
                self.pack_values(part, dtype, into)

    def unpack_value_pieces(
        self, wire: Tensor, pieces: Pieces, dtype: torch.dtype, values: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        """`unpack_values` for each piece."""
        parts = pieces.parts(wire, pieces.value_sizes(dtype), begins), values.split(list(pieces.counts))
        for part, into in zip(*parts, strict=True):
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
            at = indices[first:last].long() & 0xFFFFFFFF
            sound = sound_places(at, at >= 0, start, stop)
            place = at[sound] - start
            total[place] += values[first:last][sound]
            present[place] = True
            skipped += (~sound).sum()
        found = present.nonzero().view(-1)
        out_indices[: len(found)] = (found + start).int()
        out_values[: len(found)] = total[found]
        return len(found), int(skipped)


class SparseLike(CodecLike, Protocol):
    """A sparse codec, as far as kernels know it: see `compress.sparse_codec`."""

    @property
    def packs_indices(self) -> bool: ...

    @property
    def value_dtype(self) -> torch.dtype: ...

    def k(self, numel: int) -> int: ...

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor: ...


S = TypeVar("S", bound=SparseLike)


class SparseKernels(Kernels[S]):
    """A sparse codec: a backend selects plain entries (`encode_raw`) and sums wires; packing entries is done here.

    A row of plain entries is int32 [1 + k]: how many are used, then their indices.
    """

    entries: EntryKernels

    @abstractmethod
    def encode_raw(
        self,
        codec: S,
        x: Tensor,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """Select, and write the entries to `row` and `values`, zero behind them. What is selected leaves the residual,
        where it is finite."""

    def encode(self, codec: S, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self.encode_from(codec, x, None, wire, draw, workspace)

    def encode_feedback(
        self, codec: S, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        self.encode_from(codec, grad, residual, wire, draw, workspace)

    def encode_from(
        self,
        codec: S,
        x: Any,
        residual: Tensor | None,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """`encode`, or `encode_feedback`, of anything that the backend's `encode_raw` reads."""
        numel = x.numel()
        indices, values = wire.split(codec.part_bytes(numel))
        room, values_room = self._room(codec, 1, numel, wire.device, workspace)
        packed_indices, packed_values = room.shape[1] > 0, values_room.shape[1] > 0
        row = room[0] if packed_indices else indices.view(torch.int32)
        plain = values_room[0] if packed_values else values.view(torch.float32)
        self.encode_raw(codec, x, residual, row, plain, draw, workspace)
        if packed_indices:
            self.entries.pack_indices(row[1:], row[:1], 0, numel, indices)
        if packed_values:
            self.entries.pack_values(plain, codec.value_dtype, values, row[1:], row[:1], residual)

    def entries_of(self, codec: S, wire: Tensor, numel: int, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        rows, values = self._plain(codec, parts_of(codec, wire, numel), numel, workspace)
        return rows[0, 1:], values[0], rows[0, :1]

    def _plain(self, codec: S, wires: Sequence[Tensor], numel: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """The ranks' entries as they are, unpacked into the workspace where they are packed."""
        (indices, values), ranks = wires, wires[0].shape[0]
        rows, plain = self._room(codec, ranks, numel, indices.device, workspace)
        if rows.shape[1]:
            self.entries.unpack_indices(indices, 0, numel, rows[:, 0], rows[:, 1:])
        else:
            rows = typed_rows(indices, torch.int32)
        if plain.shape[1]:
            self.entries.unpack_values(values, codec.value_dtype, plain)
        else:
            plain = typed_rows(values, torch.float32)
        return rows, plain

    @staticmethod
    def _room(codec: S, ranks: int, numel: int, device: torch.device, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Room for plain entries, int32 [ranks, 1 + k] and float32 [ranks, k]; [ranks, 0] for what is not packed."""
        room: tuple[Tensor, Tensor] | None = workspace.buffers.get("plain")
        if room is None or len(room[0]) < ranks:
            k = codec.k(numel)
            room = (
                torch.zeros(ranks, 1 + k if codec.packs_indices else 0, dtype=torch.int32, device=device),
                torch.zeros(ranks, k if codec.value_dtype != torch.float32 else 0, dtype=torch.float32, device=device),
            )
            workspace.buffers["plain"] = room
        return room[0][:ranks], room[1][:ranks]


class PlainSums(SparseKernels[S]):
    """Wires are unpacked, and a backend sums plain entries."""

    @abstractmethod
    def add_raw(
        self, codec: S, row: Tensor, values: Tensor, out: Tensor, alpha: float, workspace: Workspace
    ) -> None: ...

    def mean_raw(self, codec: S, rows: Tensor, values: Tensor, out: Tensor, workspace: Workspace) -> None:
        """`rows` int32 [P, 1 + k], `values` float32 [P, k]."""
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for row, numbers in zip(rows, values, strict=True):
            self.add_raw(codec, row, numbers, total, 1.0, workspace)
        divide(total, len(rows), out)

    def decode_add(self, codec: S, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        rows, values = self._plain(codec, parts_of(codec, wire, out.numel()), out.numel(), workspace)
        self.add_raw(codec, rows[0], values[0], out, alpha, workspace)

    def decode_mean(self, codec: S, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        rows, values = self._plain(codec, wires, out.numel(), workspace)
        self.mean_raw(codec, rows, values, out, workspace)


class GenericSparseKernels(SparseKernels[SparseLike]):
    """A sparse codec that has no kernels but its `select`, in torch: the backend packs and adds up what that finds."""

    def __init__(self, entries: EntryKernels, sums: SparseKernels) -> None:
        self.entries, self._sums = entries, sums

    def prepare(self, codec: SparseLike, dtype: torch.dtype, device: torch.device) -> None:
        self.entries.prepare(device)  # exchanges pack entries even where the codec does not
        super().prepare(codec, dtype, device)

    def encode_raw(
        self,
        codec: SparseLike,
        x: Tensor,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        x = x.float()
        chosen = codec.select(x, draw)
        _check_selected(codec, chosen, len(x))
        count = len(chosen)
        row.zero_()
        values.zero_()
        row[0] = count
        row[1 : 1 + count] = chosen
        found = x[chosen]
        values[:count] = found.masked_fill_(found.isnan(), torch.nan)  # one NaN for all

    def encode_feedback(
        self, codec: SparseLike, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        Kernels.encode_feedback(self, codec, grad, residual, wire, draw, workspace)

    def decode_add(self, codec: SparseLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self._sums.decode_add(codec, wire, out, alpha, workspace)

    def decode_mean(self, codec: SparseLike, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        self._sums.decode_mean(codec, wires, out, workspace)


def _check_selected(codec: SparseLike, chosen: Tensor, numel: int) -> None:
    """Raises ValueError where `select` breaks its contract: what it selects would be lost, or lie outside of `x`.

    On other devices than CPUs the order is taken for granted, as the host would have to wait for it.
    """
    most = codec.k(numel)
    if chosen.dtype not in (torch.int64, torch.int32) or chosen.ndim != 1 or len(chosen) > most:
        raise ValueError(
            f"{codec} selected {chosen.dtype} {list(chosen.shape)} of {numel} elements: expected indices, int64, flat, "
            f"and no more than its k({numel}) = {most}"
        )
    if chosen.device.type != "cpu" or not len(chosen):
        return
    if chosen[0] < 0 or chosen[-1] >= numel or not bool((chosen[1:] > chosen[:-1]).all()):
        raise ValueError(
            f"{codec} selected {chosen[:3].tolist()} … {chosen[-3:].tolist()} of {numel} elements: expected ascending "
            f"indices, each once, from 0 to {numel - 1}; sort() them"
        )


def typed_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes, which may lie apart, as rows of 4-byte numbers, without a copy."""
    return whole_rows(rows).view(dtype).as_strided((rows.shape[0], rows.shape[1] // 4), (rows.stride(0) // 4, 1))


def whole_rows(rows: Tensor) -> Tensor:
    """All the memory from the first row's begin to the last row's end: a tensor without gaps, flat if it has to be."""
    if rows.is_contiguous():
        return rows
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ValueError(
            f"rows of shape {tuple(rows.shape)} and strides {rows.stride()} have gaps: make them contiguous"
        )
    return rows.as_strided(((rows.shape[0] - 1) * rows.stride(0) + rows.shape[1],), (1,))
