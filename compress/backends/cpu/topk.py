"""TopK and lists of entries on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats.entries import index_layout
from .. import Entering, Workspace, kernel_cache
from ..addresses import address, rows_at
from ..sparse import EntryKernels, Pieces, SparseKernels, typed_rows
from . import packing, sparse
from .blocks import scratch_bytes
from .formats import BFLOAT16, TILE
from .kernels import KINDS, CpuKernels, inverse, note, pieces_of, reserved, run, source_of, whole_lines
from .sources import PEEK

I32, F32, BYTES = torch.int32, torch.float32, torch.uint8
#: Of one piece.
SCRATCH = whole_lines(scratch_bytes(TILE))
#: How many elements are about as much work as an entry that is unpacked.
ENTRY_COST = 8

PACK = {
    torch.float32: packing.pack_floats,
    torch.bfloat16: packing.pack_bfloat,
    torch.int8: packing.pack_bytes,
}
VALUE_KINDS = {
    torch.float32: packing.FLOAT32_VALUES,
    torch.bfloat16: packing.BFLOAT16_VALUES,
    torch.int8: packing.INT8_VALUES,
}


class Entries(EntryKernels):
    def prepare(self, device: torch.device) -> None:
        indices = torch.zeros(1, dtype=I32, device="cpu")
        values, residual = torch.zeros(2, 1, dtype=F32, device="cpu")
        pieces, wire = Pieces([1], [0], [1]), torch.zeros(64, dtype=torch.uint8, device="cpu")
        counts = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.pack_indices(indices, None, 0, 1, wire)
        self.unpack_indices(wire[None], 0, 1, counts, indices[None])
        self.pack_index_pieces(indices, pieces, wire)
        self.unpack_index_pieces(wire, pieces, indices)
        for dtype in VALUE_KINDS:
            self.pack_values(values, dtype, wire, indices, None, residual)
            self.pack_value_pieces(values, pieces, dtype, wire, indices, residual)
            self.unpack_value_pieces(wire, pieces, dtype, values)
            if dtype != torch.float32:
                self.unpack_values(wire[None], dtype, values[None])
        self.put_back((indices, values), indices, residual)
        self.merge(indices, values, [0, 1], 0, 1, torch.zeros_like(indices), torch.zeros_like(values))

    def pack_indices(self, indices: Tensor, count: Tensor | None, base: int, numel: int, wire: Tensor) -> None:
        used = len(indices) if count is None else int(count)
        layout = _layout(numel, len(indices))
        packing.pack_indices(address(indices, I32), used, base, layout, address(wire, BYTES))

    def unpack_indices(self, wires: Tensor, base: int, numel: int, counts: Tensor | None, indices: Tensor) -> None:
        k = indices.shape[1]
        layout = _layout(numel, k)
        (wire, pitch), (index, row) = rows_at(wires, BYTES), rows_at(indices, I32)

        def job(first: int, last: int, piece: int) -> None:
            for i in range(first, last):
                found = packing.unpack_indices(wire + i * pitch, base, numel, layout, k, index + i * row)
                if counts is not None:
                    counts[i] = found

        run(job, len(wires), pieces_of(ENTRY_COST * k * len(wires), len(wires)))

    def pack_values(
        self,
        values: Tensor,
        dtype: torch.dtype,
        wire: Tensor,
        indices: Tensor | None = None,
        count: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        pack = PACK[dtype]
        used = len(values) if count is None else int(count)
        rest = (0, 0, 0)
        if residual is not None and indices is not None:
            rest = address(indices, I32), used, address(residual, F32)
        pack(address(values, F32), len(values), address(wire, BYTES), *rest)

    def unpack_values(self, wires: Tensor, dtype: torch.dtype, values: Tensor) -> None:
        if dtype == torch.float32:
            values.copy_(typed_rows(wires, dtype))
            return
        unpack = packing.unpack_bfloat if dtype == torch.bfloat16 else packing.unpack_bytes
        for wire, row in zip(wires, values, strict=True):
            unpack(address(wire, BYTES), len(row), address(row, F32))

    def pack_index_pieces(
        self, indices: Tensor, pieces: Pieces, wire: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.index_sizes() if begins is None else None, begins)
        packing.pack_index_pieces(table.ctypes.data, len(table), address(indices, I32), begin)

    def unpack_index_pieces(
        self, wire: Tensor, pieces: Pieces, indices: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.index_sizes() if begins is None else None, begins)
        packing.unpack_index_pieces(table.ctypes.data, len(table), begin, address(indices, I32))

    def pack_value_pieces(
        self,
        values: Tensor,
        pieces: Pieces,
        dtype: torch.dtype,
        wire: Tensor,
        indices: Tensor,
        residual: Tensor | None = None,
        begins: Sequence[int] | None = None,
    ) -> None:
        table, begin = _table(pieces, wire, pieces.value_sizes(dtype) if begins is None else None, begins)
        rest = address(indices, I32), 0 if residual is None else address(residual, F32)
        where = table.ctypes.data, len(table), address(values, F32), begin
        packing.pack_value_pieces(VALUE_KINDS[dtype], *where, *rest)

    def unpack_value_pieces(
        self, wire: Tensor, pieces: Pieces, dtype: torch.dtype, values: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.value_sizes(dtype) if begins is None else None, begins)
        where = table.ctypes.data, len(table), begin, address(values, F32)
        packing.unpack_value_pieces(VALUE_KINDS[dtype], *where)

    def put_back(self, entries: tuple[Tensor, Tensor], kept: Tensor, residual: Tensor) -> None:
        indices, values = entries
        where = address(indices, I32), address(values, F32), len(indices)
        packing.put_back(*where, address(kept, I32), len(kept), address(residual, F32))

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
        lists = len(offsets) - 1
        bounds = np.asarray(offsets, np.int64)
        cursors = np.empty(2 * lists, np.int64)
        scratch = np.empty(packing.MERGE_SCRATCH, np.uint8)
        result: tuple[int, int] = packing.merge(
            address(indices, I32),
            address(values, F32),
            bounds.ctypes.data,
            lists,
            (start, stop),
            address(out_indices, I32),
            address(out_values, F32),
            cursors.ctypes.data,
            scratch.ctypes.data,
        )
        return result


def _table(pieces: Pieces, wire: Tensor, sizes: Sequence[int] | None, begins: Sequence[int] | None) -> Any:
    """Of each piece: entries, base, range, and bytes from its begin to the next one's; and where the first begins."""
    steps = sizes if begins is None else [*(b - a for a, b in pairwise(begins)), 0]
    table = np.array([pieces.counts, pieces.bases, pieces.ranges, steps], np.int64).T.copy()
    return table, address(wire, BYTES) + (0 if begins is None else begins[0])


def _layout(numel: int, k: int) -> tuple[int, int, int]:
    layout = index_layout(numel, k)
    return layout.low_bits, layout.upper_words, layout.low_words


@dataclass(frozen=True)
class Estimate:
    """Keys predicted from a sample: every element from `threshold` on is a candidate, the k-th largest is about
    `likely`, and hardly above `high`. The first two are the lowest that may be selected if there is no telling."""

    threshold: int
    likely: int
    high: int = 1 << 31


class TopK(SparseKernels, CpuKernels):
    """Exact selection among the candidates of one pass, whose threshold is predicted from a sample of the gradient."""

    entries = Entries()

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
            self.entries.prepare(device)  # exchanges pack and merge entries even where the codec does not
            # A second pass is rare.
            (x, residual), workspace = torch.ones(2, 1, dtype=F32, device="cpu"), Workspace.on(device)
            source, spare = (KINDS[x.dtype], address(x)), torch.zeros(2, dtype=F32, device="cpu")
            places = address(spare), address(spare) + 4
            (room,) = self._rooms(1, 1, workspace)
            take = sparse.TAKE, 0
            sparse.collect_again(source, address(residual, F32), take, (1, 0, 1), 1, 1, 0, places, room)

    #: One run of 64 elements in 8 is sampled at most, and one in 128 at least. In between, some 64 of the k are seen.
    strides = 8, 128
    #: Standard deviations (of a count of so many, if they fell anywhere) to allow for. Elements that lie together are
    #: alike, so there may be more: the allowance widens when it was too narrow, and comes back slowly.
    allowance = 3.5
    widen, narrow = 1.5, 0.99
    #: How far below the last threshold to look in a sample, in keys: an eighth of a binade, as residuals crowd just
    #: below, and then a binade.
    outlooks = 1 << 20, 1 << 23

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        self._rooms(codec.k(numel), numel, workspace)
        return workspace

    def _rooms(self, k: int, numel: int, workspace: Workspace) -> list[tuple[int, int, int, int, int]]:
        """For each piece, memory to select in: it may come to hold all that is sent."""
        tiles = -(-numel // TILE)
        pieces = pieces_of(numel, tiles)
        capacity = min(k + 3 * k // pieces, -(-tiles // pieces) * TILE) + sparse.BATCH * TILE
        # Past the last entry, 64 are read and one is written before it is known that it was the last.
        list_size, histogram_size = 4 * (capacity + 64), 4 << 11
        size = 2 * list_size + histogram_size + SCRATCH
        memory = reserved(workspace, "rooms", pieces * size)
        rooms = []
        for index in range(memory, memory + pieces * size, size):
            value, histogram = index + list_size, index + 2 * list_size
            rooms.append((index, value, capacity, histogram, histogram + histogram_size))
        if len(workspace.buffers.get("lists", ())) < pieces:
            workspace.buffers["lists"] = np.empty((pieces, 2), np.int64)
        sampled = max(1, numel // self._stride(k))
        if len(workspace.buffers.get("sample", ())) < sampled:
            workspace.buffers["sample"] = np.empty(sampled, np.int32)
        return rooms

    def encode_entering(
        self, codec: Any, entering: Entering, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        """In the same pass, as `Blocks` does."""
        if entering.source is None:
            super().encode_entering(codec, entering, residual, wire, draw, workspace)
        else:
            self.encode_from(codec, entering, residual, wire, draw, workspace)

    def encode_plain(
        self,
        codec: Any,
        x: Tensor | Entering,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        self.choose(codec, x, residual, row, values, workspace, update=True)

    def choose(
        self,
        codec: Any,
        x: Tensor | Entering,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        workspace: Workspace,
        update: bool,
        sums: int = 0,
    ) -> None:
        """`encode_plain`; unless `update`, the residual is only read, or, with a record of `sources.SUMMED`, becomes
        the sum of both."""
        change = (sparse.SUM, sums) if sums else (sparse.TAKE if update else sparse.READ, 0)
        k, lowest = len(values), self.lowest(codec)
        source, numel = source_of(x), x.numel()
        rooms = self._rooms(k, numel, workspace)
        pieces, tiles = len(rooms), -(-numel // TILE)
        kept = 0 if residual is None else address(residual, F32)
        indices, numbers = address(row[1:], I32), address(values, F32)
        guess = self._estimate(source, kept, numel, k, lowest, rooms[0][4], workspace)

        def collect(first: int, last: int, piece: int) -> Any:
            span = numel, first, last
            return sparse.collect(source, kept, change, span, k, guess.threshold, guess.likely, rooms[piece])

        found = run(collect, tiles, pieces)
        counts = [count for count, _ in found]
        failed = sum(counts) < k and guess.threshold > lowest
        if failed:
            # The target, not written yet, has room for what this has to set aside.
            before = list(accumulate(counts, initial=0))

            def again(first: int, last: int, piece: int) -> Any:
                spare = indices + 4 * before[piece], numbers + 4 * before[piece]
                what = source, kept, change, (numel, first, last), k, lowest
                return sparse.collect_again(*what, counts[piece], spare, rooms[piece])

            found = run(again, tiles, pieces)
            counts = [count for count, _ in found]
        spread = workspace.buffers.get("spread", self.allowance)
        workspace.buffers["spread"] = spread * self.widen if failed else max(spread * self.narrow, self.allowance)
        key, shares = self._select(rooms, counts, k, guess.high, numbers, workspace)
        places = list(accumulate((sent for _, sent in shares), initial=0))

        def send(first: int, last: int, piece: int) -> None:
            for i in range(first, last):
                (index, value, *_), (count, likely), place = rooms[i], found[i], 4 * places[i]
                there = indices + place, numbers + place
                sparse.keep(index, value, count, key, shares[i][0], likely, kept if update else 0, there)

        run(send, pieces, pieces_of(ENTRY_COST * k, pieces))
        row[0] = places[-1]
        row[1 + places[-1] :].zero_()
        values[places[-1] :].zero_()

    def lowest(self, codec: Any) -> int:
        """The lowest key that may be selected: not that of zero."""
        return 1

    def _stride(self, k: int) -> int:
        least, most = self.strides
        return max(least, min(k // 64, most))

    def _estimate(
        self,
        source: tuple[int, int],
        residual: int,
        numel: int,
        k: int,
        lowest: int,
        scratch: int,
        workspace: Workspace,
    ) -> Estimate:
        """Where the k-th largest key lies, from `lowest` on, by what is found among a sample's: so many as are expected
        of k, plus and minus what chance may add and take."""
        memory, stride = workspace.buffers, self._stride(k)
        if source[0] > BFLOAT16:
            source = source[0] | PEEK, source[1]
        strata = numel // (64 * stride)
        expected = k * 64 * strata / numel
        spread = memory.get("spread", self.allowance) * math.sqrt(expected) + 2
        wanted = round(expected + spread)
        keys: np.ndarray = memory["sample"]
        last = memory.get("threshold", lowest)
        # First a little below the last threshold; where too few are found, farther down.
        for begin in dict.fromkeys((*(max(lowest, last - outlook) for outlook in self.outlooks), lowest)):
            count = sparse.sample(source, residual, (strata, stride), begin, keys.ctypes.data, scratch)
            if count >= wanted:
                ranks = wanted, max(1, round(expected)), max(1, round(expected - spread))
                places = [count - rank for rank in ranks]
                keys[:count].partition(places)
                threshold, likely, high = keys[places].tolist()
                memory["threshold"] = threshold
                return Estimate(threshold, likely, high)
        memory["threshold"] = lowest
        return Estimate(lowest, lowest)

    @staticmethod
    def _select(
        rooms: Sequence[tuple[int, int, int, int, int]],
        counts: Sequence[int],
        k: int,
        high: int,
        spare: int,
        workspace: Workspace,
    ) -> tuple[int, list[tuple[int, int]]]:
        """The k-th largest key, 0 if there are fewer, and for each piece how many ties and how many in all it sends.

        Among equal keys the lower index goes first, and so does the earlier piece. `spare` is room for k keys.
        """
        if sum(counts) < k:
            return 0, [(0, count) for count in counts]
        above = inside = 0
        for place, count in zip(rooms, counts, strict=True):
            more, fewer = sparse.near(place[1], count, high, spare + 4 * inside, k - inside)
            above, inside = above + more, inside + fewer
            if inside > k:
                break
        lists: np.ndarray = workspace.buffers["lists"]
        if above < k <= above + inside and inside <= k:
            lists[0] = spare, inside
            key, left = sparse.kth_largest(lists.ctypes.data, 1, k - above, rooms[0][3])
        else:
            for row, place, count in zip(lists, rooms, counts, strict=False):
                row[:] = place[1], count
            key, left = sparse.kth_largest(lists.ctypes.data, len(rooms), k, rooms[0][3])
        shares = []
        for place, count in zip(rooms, counts, strict=True):
            above, equal = sparse.tally(place[1], count, key)
            ties = min(equal, left)
            left -= ties
            shares.append((ties, above + ties))
        return int(key), shares

    def add_plain(
        self, codec: Any, row: Tensor, values: Tensor, out: Tensor, alpha: float, workspace: Workspace
    ) -> None:
        k, numel = len(values), out.numel()
        where = address(row, I32), address(values, F32), address(out, F32)
        note(workspace, [packing.topk_add(*where, numel, k, float(alpha))])

    def mean_plain(self, codec: Any, rows: Tensor, values: Tensor, out: Tensor, workspace: Workspace) -> None:
        numel, ranks = out.numel(), len(rows)
        count = -(-numel // TILE)
        pieces = pieces_of(numel, count)
        scratch = reserved(workspace, "scratch", pieces * SCRATCH)
        cursors = reserved(workspace, "cursors", pieces * ranks * 16)
        target = KINDS[out.dtype], address(out)
        lists = rows_at(rows, I32), rows_at(values, F32)
        k, scale = values.shape[1], inverse(ranks)

        def job(first: int, last: int, piece: int) -> tuple[int, int]:
            memory = cursors + piece * ranks * 16, scratch + piece * SCRATCH
            result: tuple[int, int] = packing.topk_mean(target, *lists, ranks, (numel, first, last), k, scale, *memory)
            return result

        note(workspace, run(job, count, pieces))


class Threshold(TopK):
    """The largest of what exceeds the threshold, in the same pass: nothing below it becomes a candidate."""

    def lowest(self, codec: Any) -> int:
        return int(np.float32(codec.threshold).view(np.int32)) + 1
