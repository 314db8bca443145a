"""The numba kernels of TopK: selection among candidates, and sums of sparse wires.

`collecting` finds the candidates. One thread finds the k-th largest of all of them, and each sends its own. `Room` is
memory: the indices and values of `capacity` candidates, in ascending order of index, a histogram of 2048 counts, and
scratch for a tile. A *key* is a magnitude as an integer: the bits of the float without its sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import SPARE, A, clear, end_sum
from .formats import F32, INF_BITS, MAGNITUDE, TILE
from .simd import (
    as_i32,
    bits_of,
    compiled,
    count_ones,
    get_f32,
    get_i32,
    get_i64,
    get_u32,
    inlined,
    load_f32,
    lowest_bit,
    store,
)

Source = tuple[int, int]  # kind, address
Room = tuple[int, int, int, int, int]  # index, value, capacity, histogram, scratch
Rows = tuple[int, int]  # address, bytes from one rank's to the next
Entries = tuple[int, int]  # where indices are, and where values are
Span = tuple[int, int, int]  # elements, first tile, last tile


@inlined
def int_at(address: int) -> Any:
    """An unsigned 32-bit number, for arithmetic."""
    return np.int64(get_u32(address))


@inlined
def key_at(address: int) -> Any:
    return int_at(address) & MAGNITUDE


@compiled
def count_digits(value: int, count: int, prefix: int, shift: int, bits: int, histogram: int) -> None:
    """Add how often each value of a digit of the keys occurs, among the keys that begin with `prefix`."""
    for i in range(0, 4 * count, 4):
        key = key_at(value + i)
        if key >> (shift + bits) == prefix:
            slot = histogram + 4 * ((key >> shift) & ((1 << bits) - 1))
            store(slot, np.int32(get_i32(slot) + 1))


@compiled
def kth_largest(lists: int, pieces: int, k: int, histogram: int) -> tuple[int, int]:
    """The k-th largest of at least k keys, digit by digit, and how many of those equal to it are among the k.

    `lists` holds, for each piece, where its values are, and how many.
    """
    key, left = 0, k
    for digit in range(3):
        bits, shift = 11 if digit == 0 else 10, 20 - 10 * digit
        clear(histogram, 4 << bits)
        for row in range(lists, lists + 16 * pieces, 16):
            count_digits(get_i64(row), get_i64(row + 8), key, shift, bits, histogram)
        d = (1 << bits) - 1
        while d > 0 and int_at(histogram + 4 * d) < left:
            left -= int_at(histogram + 4 * d)
            d -= 1
        key = key << bits | d
    return key, left


@compiled
def tally(value: int, count: int, key: int) -> tuple[int, int]:
    """How many keys are above `key`, and how many equal to it. May read 63 values beyond the last."""
    above = equal = 0
    for i in range(0, count, 64):
        inside = used_of(count, i)
        keys = as_i32(load_f32(value + 4 * i)) & MAGNITUDE
        above += count_ones(bits_of(keys > key) & inside)
        equal += count_ones(bits_of(keys == key) & inside)
    return above, equal


@inlined
def used_of(count: int, i: int) -> Any:
    """Which of 64 candidates from `i` on there are."""
    return -1 if count - i >= 64 else (1 << (count - i)) - 1


@compiled
def near(value: int, count: int, high: int, target: int, capacity: int) -> tuple[int, int]:
    """How many keys are `high` or more, and how many are not, which go to `target`; if there is no room for all of
    those, (0, `count`). May read 63 values beyond the last."""
    inside = 0
    for i in range(0, count, 64):
        bits = bits_of((as_i32(load_f32(value + 4 * i)) & MAGNITUDE) < high) & used_of(count, i)
        while bits and inside < capacity:
            store(target + 4 * inside, get_i32(value + 4 * (i + lowest_bit(bits))))
            inside += 1
            bits &= bits - 1
        if bits:
            return 0, count
    return count - inside, inside


@compiled
def first_of(bits: int, n: int) -> int:
    """The lowest n of the bits that are set, or all."""
    rest: Any = bits
    for _ in range(n):
        rest &= rest - 1
        if not rest:
            break
    return bits ^ rest


@compiled
def keep(index: int, value: int, count: int, key: int, ties: int, likely: int, residual: int, target: Entries) -> int:
    """Copy the candidates above `key`, and the first `ties` equal to it, to `target`, which may be where they are. In
    the residual, which has 0 for those from `likely` on, what is dropped comes back, and what stays becomes 0."""
    kept: Any = 0
    left: Any = ties
    for i in range(0, count, 64):
        keys, inside = as_i32(load_f32(value + 4 * i)) & MAGNITUDE, used_of(count, i)
        good, equal = bits_of(keys > key) & inside, bits_of(keys == key) & inside
        if equal:
            equal = first_of(equal, left)
            left -= count_ones(equal)
            good |= equal
        if residual:
            mend = (good ^ bits_of(keys >= likely)) & bits_of(keys < INF_BITS) & inside
            while mend:
                j = lowest_bit(mend)
                at = 4 * (i + j)
                word = np.int32(0) if (good >> j) & 1 else get_i32(value + at)
                store(residual + 4 * int_at(index + at), word)
                mend &= mend - 1
        while good:
            at = 4 * (i + lowest_bit(good))
            store(target[0] + kept, get_i32(index + at))
            store(target[1] + kept, get_i32(value + at))
            kept += 4
            good &= good - 1
    return kept >> 2


@compiled
def put_back(residual: int, index: int, value: int, count: int, kept_index: int, kept_value: int) -> int:
    """Put every candidate into the residual. What was there is kept if it must come back, because the candidate is not
    finite; returns how often."""
    kept = 0
    for i in range(0, 4 * count, 4):
        place = residual + 4 * int_at(index + i)
        if key_at(value + i) >= INF_BITS:
            store(kept_index + kept, get_i32(index + i))
            store(kept_value + kept, get_i32(place))
            kept += 4
        store(place, get_i32(value + i))
    return kept >> 2


@compiled
def topk_add(indices: int, values: int, out: int, numel: int, k: int, alpha: float) -> tuple[int, int]:
    """out += alpha · values. An entry counts if its index is in range and above every index in range before it."""
    claimed = int_at(indices)
    count, before, unsound, times = min(claimed, k), -1, 0, F32(alpha)
    skipped = claimed - count
    for i in range(0, 4 * count, 4):
        at = int_at(indices + 4 + i)
        if before < at < numel:
            v = get_f32(values + i)
            unsound += not np.isfinite(v)
            store(out + 4 * at, get_f32(out + 4 * at) + times * v)
            before = at
        else:
            skipped += 1
    return skipped, unsound


@compiled
def topk_mean(
    out: Source,
    indices: Rows,
    values: Rows,
    ranks: int,
    span: Span,
    k: int,
    scale: float,
    cursors: int,
    scratch: int,
) -> tuple[int, int]:
    """Tile by tile, so that sums stay in cache. `cursors` holds, for each rank, the next entry and the largest index
    so far. A span that does not start at the first tile reads what lies before it, and leaves counting it to others.
    """
    kind, target = out
    numel, first, last = span
    skipped = unsound = 0
    clear(cursors, 16 * ranks)
    for r in range(ranks):
        store(cursors + 16 * r + 8, np.int64(-1))
        if first == 0:
            skipped += max(int_at(indices[0] + r * indices[1]) - k, 0)
    total = scratch + A
    for t in range(first, last):
        start = t * TILE
        n = min(TILE, numel - start)
        clear(total, 4 * TILE)
        for r in range(ranks):
            row, numbers = indices[0] + r * indices[1], values[0] + r * values[1]
            count = min(int_at(row), k)
            i, before = get_i64(cursors + 16 * r), get_i64(cursors + 16 * r + 8)
            while i < count:
                at = int_at(row + 4 + 4 * i)
                if before < at < numel:
                    if at >= start + n:
                        break
                    before = at
                    if at >= start:
                        v = get_f32(numbers + 4 * i)
                        unsound += not np.isfinite(v)
                        place = total + 4 * (at - start)
                        store(place, get_f32(place) + v)
                elif before >= start or t == 0:
                    skipped += 1
                i += 1
            store(cursors + 16 * r, i)
            store(cursors + 16 * r + 8, before)
        end_sum(kind, total, target, start, n, TILE, 0, scale, scratch + SPARE)
    return skipped, unsound
