"""Lists of entries on the CPU: the numba kernels that pack, unpack, merge and add up the entries of sparse gradients,
and their launches. `formats.entries` has the format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, float32, int32, uint8

from ...formats.entries import LARGEST_UNIT, VALUE_BLOCK
from ..memory import address, rows_at
from ..sparse import EntryKernels, Pieces
from .runtime.blocks import clear, copy
from .runtime.dtypes import F32, INF_BITS, LOW, MAGNITUDE, NAN_BITS, TINY, ZERO, int_at, key_at
from .runtime.simd import compiled, get_f32, get_i64, get_u8, inlined, lowest_bit, store
from .runtime.threads import pieces_of, run

#: How many elements are about as much work as an entry that is unpacked.
ENTRY_COST = 8

#: Elements whose sums lie in cache while lists are merged, and the scratch for that: sums, then a bit for each.
MERGE_TILE = 4096

MERGE_SCRATCH = 4 * MERGE_TILE + MERGE_TILE // 8

UNIT_LIMIT = F32(LARGEST_UNIT)

LEVELS = F32(127)

Layout = tuple[int, int, int]  # low bits, words of `upper`, words of `low`

FLOAT32_VALUES, BFLOAT16_VALUES, INT8_VALUES = 0, 1, 2
VALUE_KINDS = {float32: FLOAT32_VALUES, torch.bfloat16: BFLOAT16_VALUES, torch.int8: INT8_VALUES}


@inlined
def set_bits(place: int, bits: Any) -> None:
    store(place, np.uint32(int_at(place) | bits))


@inlined
def low_of(low: int, entry: Any, width: int) -> Any:
    """The low bits of an entry, which may lie in two words."""
    found: Any = 0
    if width == 0:
        return found  # then there is no word to read
    bit = entry * width
    place, shift = low + 4 * (bit >> 5), bit & 31
    found = int_at(place) >> shift
    if shift + width > 32:
        found |= int_at(place + 4) << (32 - shift)
    return found & ((1 << width) - 1)


@compiled
def take_at(residual: int, index: int, count: int, value: int) -> None:
    """values += residual[indices], and zero there where that is finite."""
    for i in range(0, 4 * count, 4):
        place = residual + 4 * int_at(index + i)
        total = get_f32(value + i) + get_f32(place)
        store(value + i, total)
        if np.isfinite(total):
            store(place, ZERO)


@compiled
def layout_of(numel: int, k: int) -> Layout:
    """`compress.formats.entries.index_layout`."""
    low: Any = 0
    highest = numel - 1
    while (highest >> low) - (highest >> (low + 1)) > k:
        low += 1
    return low, ((highest >> low) + k + 31) >> 5, (k * low + 31) >> 5


@compiled
def pack_indices(index: int, count: int, base: int, layout: Layout, wire: int) -> None:
    width, upper_words, low_words = layout
    low = wire + 4 * upper_words
    clear(wire, 4 * (upper_words + low_words))
    word: Any = 0  # low bits that are not written yet, and how many
    filled: Any = 0
    for i in range(count):
        at = int_at(index + 4 * i) - base
        place = (at >> width) + i
        set_bits(wire + 4 * (place >> 5), 1 << (place & 31))
        word |= (at & ((1 << width) - 1)) << filled
        filled += width
        if filled >= 32:
            store(low, np.uint32(word & LOW))
            low += 4
            word >>= 32
            filled -= 32
    if filled:
        store(low, np.uint32(word))


@compiled
def unpack_indices(wire: int, base: int, numel: int, layout: Layout, k: int, index: int) -> int:
    width, upper_words, _ = layout
    low = wire + 4 * upper_words
    entry: Any = 0
    for i in range(upper_words):
        bits: Any = int_at(wire + 4 * i)
        while bits:
            if entry < k:
                at = ((32 * i + lowest_bit(bits) - entry) << width) + low_of(low, entry, width)
                store(index + 4 * entry, np.uint32(at + base if at < numel else LOW))
            entry += 1
            bits &= bits - 1
    for i in range(entry, k):
        store(index + 4 * i, np.uint32(LOW))
    return entry


@inlined
def keep_rest(residual: int, index: int, i: int, value: Any, decoded: Any) -> None:
    store(residual + 4 * int_at(index + 4 * i), value - decoded)


@compiled
def pack_floats(value: int, k: int, wire: int, index: int, count: int, residual: int) -> None:
    for i in range(k):
        key = key_at(value + 4 * i)
        store(wire + 4 * i, np.uint32(NAN_BITS if key > INF_BITS else int_at(value + 4 * i)))
        if residual and i < count and key < INF_BITS:
            keep_rest(residual, index, i, ZERO, ZERO)


@compiled
def pack_bfloat(value: int, k: int, wire: int, index: int, count: int, residual: int) -> None:
    if k & 1:
        store(wire + 2 * k, np.uint16(0))
    for i in range(k):
        word = int_at(value + 4 * i)
        rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        if word & MAGNITUDE > INF_BITS:
            rounded = 0x7FC0
        elif word & MAGNITUDE < INF_BITS:
            rounded -= int(rounded & 0x7FFF == 0x7F80)
            if residual and i < count:
                keep_rest(residual, index, i, get_f32(value + 4 * i), np.int32(rounded << 16).view(F32))
        store(wire + 2 * i, np.uint16(rounded))


@compiled
def pack_bytes(value: int, k: int, wire: int, index: int, count: int, residual: int) -> None:
    units = (k + VALUE_BLOCK - 1) // VALUE_BLOCK
    codes = wire + 4 * units
    for i in range(k, (k + 3) & -4):
        store(codes + i, np.int8(0))
    for block in range(units):
        first = block * VALUE_BLOCK
        last = min(first + VALUE_BLOCK, k)
        largest: Any = 0
        for i in range(first, last):
            key = key_at(value + 4 * i)
            largest = max(largest, key if key < INF_BITS else 0)
        unit = min(np.int32(largest).view(F32) / LEVELS, UNIT_LIMIT)
        if largest and unit == ZERO:
            unit = TINY
        store(wire + 4 * block, unit)
        for i in range(first, last):
            if key_at(value + 4 * i) >= INF_BITS:
                store(codes + i, np.int8(-128))
                continue
            v = get_f32(value + 4 * i)
            # + 0 turns -0 into 0
            level = min(max(np.rint(v / unit), -LEVELS), LEVELS) + ZERO if unit > ZERO else ZERO
            store(codes + i, np.int8(level))
            if residual and i < count:
                keep_rest(residual, index, i, v, level * unit)


@compiled
def pack_values(kind: int, value: int, k: int, wire: int, index: int, count: int, residual: int) -> None:
    if kind == FLOAT32_VALUES:
        pack_floats(value, k, wire, index, count, residual)
    elif kind == BFLOAT16_VALUES:
        pack_bfloat(value, k, wire, index, count, residual)
    else:
        pack_bytes(value, k, wire, index, count, residual)


@compiled
def unpack_bfloat(wire: int, k: int, value: int) -> None:
    for i in range(k):
        word = int(get_u8(wire + 2 * i)) | int(get_u8(wire + 2 * i + 1)) << 8
        store(value + 4 * i, np.uint32(word << 16))


@compiled
def unpack_bytes(wire: int, k: int, value: int) -> None:
    codes = wire + 4 * ((k + VALUE_BLOCK - 1) // VALUE_BLOCK)
    for i in range(k):
        code = int(get_u8(codes + i))
        if code == 128:
            store(value + 4 * i, NAN_BITS)
        else:
            store(value + 4 * i, F32(code - 256 * (code >> 7)) * get_f32(wire + 4 * (i // VALUE_BLOCK)))


@compiled
def unpack_values(kind: int, wire: int, k: int, value: int) -> None:
    if kind == FLOAT32_VALUES:
        copy(value, wire, 4 * k)
    elif kind == BFLOAT16_VALUES:
        unpack_bfloat(wire, k, value)
    else:
        unpack_bytes(wire, k, value)


@compiled
def merge_lists(
    index: int,
    value: int,
    offsets: int,
    lists: int,
    span: tuple[int, int],
    out_index: int,
    out_value: int,
    cursors: int,
    scratch: int,
) -> tuple[int, int]:
    """Tile by tile. `offsets` holds lists + 1 numbers of 64 bits; `cursors` has room for two of each list."""
    start, stop = span
    bits_at = scratch + 4 * MERGE_TILE
    found: Any = 0
    skipped: Any = 0
    for r in range(lists):
        store(cursors + 16 * r, get_i64(offsets + 8 * r))
        store(cursors + 16 * r + 8, np.int64(start - 1))
    tile = start
    while tile < stop:
        end = min(tile + MERGE_TILE, stop)
        clear(scratch, MERGE_SCRATCH)
        any_entry: Any = 0
        for r in range(lists):
            i, before = get_i64(cursors + 16 * r), get_i64(cursors + 16 * r + 8)
            last = get_i64(offsets + 8 * r + 8)
            while i < last:
                at = int_at(index + 4 * i)
                if before < at < stop:
                    if at >= end:
                        break
                    before = at
                    j = at - tile
                    place = scratch + 4 * j
                    store(place, get_f32(place) + get_f32(value + 4 * i))
                    set_bits(bits_at + 4 * (j >> 5), 1 << (j & 31))
                    any_entry = 1
                else:
                    skipped += 1
                i += 1
            store(cursors + 16 * r, i)
            store(cursors + 16 * r + 8, before)
        if any_entry:
            for w in range(MERGE_TILE // 32):
                bits: Any = int_at(bits_at + 4 * w)
                while bits:
                    j = 32 * w + lowest_bit(bits)
                    store(out_index + 4 * found, np.uint32(tile + j))
                    store(out_value + 4 * found, get_f32(scratch + 4 * j))
                    found += 1
                    bits &= bits - 1
        tile = end
    return found, skipped


@compiled
def put_back_rest(index: int, value: int, n: int, kept: int, kept_n: int, residual: int) -> None:
    j: Any = 0
    for i in range(n):
        at = int_at(index + 4 * i)
        while j < kept_n and int_at(kept + 4 * j) < at:
            j += 1
        if (j == kept_n or int_at(kept + 4 * j) != at) and key_at(value + 4 * i) < INF_BITS:
            store(residual + 4 * at, get_f32(value + 4 * i))


@compiled
def pack_index_table(table: int, pieces: int, index: int, wire: int) -> None:
    for row in range(table, table + 32 * pieces, 32):
        k = get_i64(row)
        if k:
            pack_indices(index, k, get_i64(row + 8), layout_of(get_i64(row + 16), k), wire)
        index += 4 * k
        wire += get_i64(row + 24)


@compiled
def unpack_index_table(table: int, pieces: int, wire: int, index: int) -> None:
    for row in range(table, table + 32 * pieces, 32):
        k, numel = get_i64(row), get_i64(row + 16)
        if k:
            unpack_indices(wire, get_i64(row + 8), numel, layout_of(numel, k), k, index)
        index += 4 * k
        wire += get_i64(row + 24)


@compiled
def pack_value_table(kind: int, table: int, pieces: int, value: int, wire: int) -> None:
    for row in range(table, table + 32 * pieces, 32):
        k = get_i64(row)
        pack_values(kind, value, k, wire, 0, 0, 0)
        value += 4 * k
        wire += get_i64(row + 24)


@compiled
def unpack_value_table(kind: int, table: int, pieces: int, wire: int, value: int) -> None:
    for row in range(table, table + 32 * pieces, 32):
        k = get_i64(row)
        unpack_values(kind, wire, k, value)
        value += 4 * k
        wire += get_i64(row + 24)


class Entries(EntryKernels):
    def prepare(self, device: torch.device) -> None:
        indices = torch.zeros(1, dtype=int32, device="cpu")
        values, residual = torch.zeros(2, 1, dtype=float32, device="cpu")
        pieces, wire = Pieces([1], [0], [1]), torch.zeros(64, dtype=uint8, device="cpu")
        counts = torch.zeros(1, dtype=int32, device="cpu")
        self.pack_indices(indices, None, 0, 1, wire)
        self.unpack_indices(wire[None], 0, 1, counts, indices[None])
        self.pack_index_pieces(indices, pieces, wire)
        self.unpack_index_pieces(wire, pieces, indices)
        for dtype in VALUE_KINDS:
            self.pack_values(values, dtype, wire, indices, None, residual)
            self.pack_value_pieces(values, pieces, dtype, wire)
            self.unpack_value_pieces(wire, pieces, dtype, values)
            self.unpack_values(wire[None], dtype, values[None])
        self.put_back((indices, values), indices, residual)
        self.take(residual, indices, values, None)
        self.merge(indices, values, [0, 1], 0, 1, torch.zeros_like(indices), torch.zeros_like(values))

    def take(self, residual: Tensor, indices: Tensor, values: Tensor, count: Tensor | None) -> None:
        used, at = len(indices) if count is None else int(count), indices.int()
        take_at(address(residual, float32), address(at, int32), used, address(values, float32))

    def pack_indices(self, indices: Tensor, count: Tensor | None, base: int, numel: int, wire: Tensor) -> None:
        used = len(indices) if count is None else int(count)
        pack_indices(address(indices, int32), used, base, layout_of(numel, len(indices)), address(wire, uint8))

    def unpack_indices(self, wires: Tensor, base: int, numel: int, counts: Tensor | None, indices: Tensor) -> None:
        k = indices.shape[1]
        layout = layout_of(numel, k)
        (wire, pitch), (index, row) = rows_at(wires, uint8), rows_at(indices, int32)

        def job(first: int, last: int, piece: int) -> None:
            for i in range(first, last):
                found = unpack_indices(wire + i * pitch, base, numel, layout, k, index + i * row)
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
        used = len(values) if count is None else int(count)
        rest = (0, 0, 0)
        if residual is not None and indices is not None:
            rest = address(indices, int32), used, address(residual, float32)
        pack_values(VALUE_KINDS[dtype], address(values, float32), len(values), address(wire, uint8), *rest)

    def unpack_values(self, wires: Tensor, dtype: torch.dtype, values: Tensor) -> None:
        for wire, row in zip(wires, values, strict=True):
            unpack_values(VALUE_KINDS[dtype], address(wire, uint8), len(row), address(row, float32))

    def pack_index_pieces(
        self, indices: Tensor, pieces: Pieces, wire: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.index_sizes() if begins is None else None, begins)
        pack_index_table(table.ctypes.data, len(table), address(indices, int32), begin)

    def unpack_index_pieces(
        self, wire: Tensor, pieces: Pieces, indices: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.index_sizes() if begins is None else None, begins)
        unpack_index_table(table.ctypes.data, len(table), begin, address(indices, int32))

    def pack_value_pieces(
        self, values: Tensor, pieces: Pieces, dtype: torch.dtype, wire: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.value_sizes(dtype) if begins is None else None, begins)
        pack_value_table(VALUE_KINDS[dtype], table.ctypes.data, len(table), address(values, float32), begin)

    def unpack_value_pieces(
        self, wire: Tensor, pieces: Pieces, dtype: torch.dtype, values: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.value_sizes(dtype) if begins is None else None, begins)
        where = table.ctypes.data, len(table), begin, address(values, float32)
        unpack_value_table(VALUE_KINDS[dtype], *where)

    def put_back(self, entries: tuple[Tensor, Tensor], kept: Tensor, residual: Tensor) -> None:
        indices, values = entries
        where = address(indices, int32), address(values, float32), len(indices)
        put_back_rest(*where, address(kept, int32), len(kept), address(residual, float32))

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
        scratch = np.empty(MERGE_SCRATCH, np.uint8)
        result: tuple[int, int] = merge_lists(
            address(indices, int32),
            address(values, float32),
            bounds.ctypes.data,
            lists,
            (start, stop),
            address(out_indices, int32),
            address(out_values, float32),
            cursors.ctypes.data,
            scratch.ctypes.data,
        )
        return result


def _table(pieces: Pieces, wire: Tensor, sizes: Sequence[int] | None, begins: Sequence[int] | None) -> Any:
    """Of each piece: entries, base, range, and bytes from its begin to the next one's; and where the first begins."""
    steps = sizes if begins is None else [*(b - a for a, b in pairwise(begins)), 0]
    table = np.array([pieces.counts, pieces.bases, pieces.ranges, steps], np.int64).T.copy()
    return table, address(wire, uint8) + (0 if begins is None else begins[0])
