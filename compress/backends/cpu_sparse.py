"""The numba kernels of TopK: selection in one pass over the gradient, and sums of sparse wires.

The pass collects candidates, every element at or above a threshold, and an exact selection looks at those alone.
`Room` is the memory for them: the indices and values of `capacity` candidates, in ascending order of index, a histogram
of 2048 counts, and scratch for a tile. A *key* is a magnitude as an integer: the bits of the float without its sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .cpu_blocks import (
    F32,
    FLOAT32,
    INF_BITS,
    MAGNITUDE,
    NAN_BITS,
    SPARE,
    SUMS,
    TILE,
    ZERO,
    A,
    clear,
    copy,
    end_sum,
    finite,
    read_block,
    residual_block,
)
from .simd import (
    as_i32,
    bits_of,
    compiled,
    get_f32,
    get_i32,
    get_i64,
    get_u32,
    inlined,
    load_f32,
    lowest_bit,
    select,
    store,
)

Source = tuple[int, int]  # kind, address
Room = tuple[int, int, int, int, int]  # index, value, capacity, histogram, scratch
Rows = tuple[int, int]  # address, bytes from one rank's to the next


@inlined
def int_at(address: int) -> Any:
    """An unsigned 32-bit number, for arithmetic."""
    return np.int64(get_u32(address))


@inlined
def key_at(address: int) -> Any:
    return int_at(address) & MAGNITUDE


@inlined
def candidates(v: Any, threshold: int, masks: int, i: int) -> Any:
    """Which of 64 elements from `i` on are at or above the threshold; also as a word among the tile's masks."""
    chosen = (as_i32(v) & MAGNITUDE) >= threshold
    store(masks + (i >> 3), bits_of(chosen))
    return chosen


@compiled
def accumulate(kind: int, x: int, residual: int, start: int, n: int, threshold: int, scratch: int) -> int:
    """Where a lies, a tile from `start` on, with the masks of its candidates in scratch.

    The residual becomes a where that is finite, and 0 where it is a candidate: most candidates are sent, and putting
    back the others, one by one, is less work. If x is 0, the residual holds a already.
    """
    a, masks = scratch + A, scratch + SUMS
    if x and residual and kind == FLOAT32 and n == TILE:
        source, old = x + 4 * start, residual + 4 * start
        for i in range(0, TILE, 64):
            e = load_f32(old + 4 * i)
            v = load_f32(source + 4 * i) + e
            store(a + 4 * i, v)
            rest = select(candidates(v, threshold, masks, i), ZERO, v)
            store(old + 4 * i, select(finite(v), rest, e))
        return a
    if x:
        a = read_block(kind, x, residual, start, n, TILE, scratch)
    else:
        clear(a, 4 * TILE)
        copy(a, residual + 4 * start, 4 * n)
    e = residual_block(residual, start, n, TILE, scratch)
    for i in range(0, TILE, 64):
        v = load_f32(a + 4 * i)
        rest = select(candidates(v, threshold, masks, i), ZERO, v)
        if residual:
            store(e + 4 * i, select(finite(v), rest, load_f32(e + 4 * i)))
    if residual and n < TILE:
        copy(residual + 4 * start, e, 4 * n)
    return a


@inlined
def append(index: int, value: int, count: int, a: int, start: int, j: int) -> None:
    word = get_i32(a + 4 * j)
    store(index + 4 * count, np.int32(start + j))
    store(value + 4 * count, NAN_BITS if word & MAGNITUDE > INF_BITS else word)


@compiled
def gather(index: int, value: int, count: int, a: int, start: int, masks: int) -> int:
    """Append a tile's candidates. A word has one or two as a rule: those take no branch, which would be mispredicted,
    but an entry that is none is written over by the next."""
    for i in range(0, TILE, 64):
        bits = get_i64(masks + (i >> 3))
        for _ in range(2):
            append(index, value, count, a, start, i + lowest_bit(bits | (-1 << 63)))
            count += bits != 0
            bits &= bits - 1
        while bits:
            append(index, value, count, a, start, i + lowest_bit(bits))
            count += 1
            bits &= bits - 1
    return count


@compiled
def collect(x: Source, residual: int, numel: int, k: int, threshold: int, room: Room) -> int:
    """One pass: every element whose key is `threshold` or more becomes a candidate; returns how many there are.

    When the candidates no longer fit, all but the k largest go, and from then on only what is above them is collected:
    among equals the earlier stay. So the k largest are always found, if there are k at or above the first threshold.
    """
    kind, source = x
    index, value, capacity, histogram, scratch = room
    count = 0
    for start in range(0, numel, TILE):
        n = min(TILE, numel - start)
        if count + TILE > capacity:
            key, ties = kth_largest(value, count, k, histogram)
            count = keep(index, value, count, key, ties, residual, scratch)
            threshold = key + 1
        a = accumulate(kind, source, residual, start, n, threshold, scratch)
        count = gather(index, value, count, a, start, scratch + SUMS)
    return count


@compiled
def count_digits(value: int, count: int, prefix: int, shift: int, bits: int, histogram: int) -> None:
    """How often each value of a digit of the keys occurs, among the keys that begin with `prefix`."""
    clear(histogram, 4 << bits)
    for i in range(0, 4 * count, 4):
        key = key_at(value + i)
        if key >> (shift + bits) == prefix:
            slot = histogram + 4 * ((key >> shift) & ((1 << bits) - 1))
            store(slot, np.int32(get_i32(slot) + 1))


@compiled
def kth_largest(value: int, count: int, k: int, histogram: int) -> tuple[int, int]:
    """The k-th largest of `count` ≥ k keys, digit by digit, and how many of those equal to it are among the k."""
    key, left = 0, k
    for digit in range(3):
        bits, shift = 11 if digit == 0 else 10, 20 - 10 * digit
        count_digits(value, count, key, shift, bits, histogram)
        d = (1 << bits) - 1
        while d > 0 and int_at(histogram + 4 * d) < left:
            left -= int_at(histogram + 4 * d)
            d -= 1
        key = key << bits | d
    return key, left


@compiled
def keep(index: int, value: int, count: int, key: int, ties: int, residual: int, spare: int) -> int:
    """Drop the candidates below `key`, and all but the first `ties` that are equal to it, back into the residual."""
    kept: Any = 0
    left: Any = ties
    for i in range(0, 4 * count, 4):
        at, word = int_at(index + i), get_i32(value + i)
        this = np.int64(word) & MAGNITUDE
        equal = this == key
        good = this > key or (equal and left > 0)
        left -= int(equal)
        store(residual + 4 * at if residual and not good and this < INF_BITS else spare, word)
        store(index + kept, np.int32(at))
        store(value + kept, word)
        kept += 4 * int(good)
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
def topk_encode(
    x: Source, residual: int, target: tuple[int, int], numel: int, k: int, threshold: int, room: Room
) -> tuple[int, int]:
    """`target`: where the count and k indices go, and where k values. Returns how many candidates there were, and the
    k-th largest key, 0 if there are fewer."""
    index, value, _, histogram, scratch = room
    row, values = target
    indices = row + 4
    count = collect(x, residual, numel, k, threshold, room)
    if count < k and threshold > 1:
        # The prediction was too high: once more, for all there is. With every candidate put back, the residual holds
        # a. The target, not written yet, has room for the residuals that must stay.
        kept = 0
        if residual:
            kept = put_back(residual, index, value, count, indices, values)
            x = (FLOAT32, 0)
        count = collect(x, residual, numel, k, 1, room)
        for i in range(0, 4 * kept, 4):
            store(residual + 4 * int_at(indices + i), get_i32(values + i))
    found, key = count, 0
    if count >= k:
        key, ties = kth_largest(value, count, k, histogram)
        count = keep(index, value, count, key, ties, residual, scratch)
    store(row, np.int32(count))
    copy(indices, index, 4 * count)
    copy(values, value, 4 * count)
    clear(indices + 4 * count, 4 * (k - count))
    clear(values + 4 * count, 4 * (k - count))
    return found, key


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
    span: tuple[int, int, int],
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
