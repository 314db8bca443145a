"""The numba kernels of TopK: selection in one pass over the gradient, and sums of sparse wires.

The pass collects candidates, every element at or above a threshold, and an exact selection looks at those alone.
Threads share the tiles of a gradient: each collects from its own into a `Room` of its own, one finds the k-th largest
of all candidates, and each sends its own. `Room` is memory: the indices and values of `capacity` candidates, in
ascending order of index, a histogram of 2048 counts, and scratch for a tile. A *key* is a magnitude as an integer: the
bits of the float without its sign.
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
    count_ones,
    get_f32,
    get_i32,
    get_i64,
    get_u32,
    inlined,
    load_f32,
    lowest_bit,
    prefetch,
    select,
    store,
)

Source = tuple[int, int]  # kind, address
Room = tuple[int, int, int, int, int]  # index, value, capacity, histogram, scratch
Rows = tuple[int, int]  # address, bytes from one rank's to the next
Entries = tuple[int, int]  # where indices are, and where values are
Span = tuple[int, int, int]  # elements, first tile, last tile

#: How many candidates ahead to fetch the residual of those that are not sent.
AHEAD = 32


@inlined
def int_at(address: int) -> Any:
    """An unsigned 32-bit number, for arithmetic."""
    return np.int64(get_u32(address))


@inlined
def key_at(address: int) -> Any:
    return int_at(address) & MAGNITUDE


@inlined
def candidates(v: Any, threshold: int, masks: int, i: int) -> None:
    """Which of 64 elements from `i` on are at or above the threshold, as a word among the tile's masks."""
    store(masks + (i >> 3), bits_of((as_i32(v) & MAGNITUDE) >= threshold))


@inlined
def unlikely(v: Any, likely: int) -> Any:
    return select((as_i32(v) & MAGNITUDE) >= likely, ZERO, v)


@compiled
def accumulate(kind: int, x: int, residual: int, start: int, n: int, threshold: int, likely: int, scratch: int) -> int:
    """Where a lies, a tile from `start` on, with the masks of its candidates in scratch.

    The residual becomes a where that is finite, and 0 where the key is `likely` or more, which most likely is sent: to
    mend the others later, one by one and far apart, is less work. If x is 0, the residual holds a already.
    """
    a, masks = scratch + A, scratch + SUMS
    if x and residual and kind == FLOAT32 and n == TILE:
        source, old = x + 4 * start, residual + 4 * start
        for i in range(0, TILE, 64):
            e = load_f32(old + 4 * i)
            v = load_f32(source + 4 * i) + e
            store(a + 4 * i, v)
            candidates(v, threshold, masks, i)
            store(old + 4 * i, select(finite(v), unlikely(v, likely), e))
        return a
    if x:
        a = read_block(kind, x, residual, start, n, TILE, scratch)
    else:
        clear(a, 4 * TILE)
        copy(a, residual + 4 * start, 4 * n)
    e = residual_block(residual, start, n, TILE, scratch)
    for i in range(0, TILE, 64):
        v = load_f32(a + 4 * i)
        candidates(v, threshold, masks, i)
        if residual:
            store(e + 4 * i, select(finite(v), unlikely(v, likely), load_f32(e + 4 * i)))
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
def collect(x: Source, residual: int, span: Span, k: int, threshold: int, likely: int, room: Room) -> tuple[int, int]:
    """One pass: every element whose key is `threshold` or more becomes a candidate. Returns how many there are, and
    from which key on they are 0 in the residual.

    When the candidates no longer fit, all but the k largest go, and from then on only what is above them is collected:
    among equals the earlier stay. So the k largest are always found, if there are k at or above the first threshold.
    """
    kind, source = x
    numel, first, last = span
    index, value, capacity, histogram, scratch = room
    count = 0
    for start in range(first * TILE, min(last * TILE, numel), TILE):
        n = min(TILE, numel - start)
        if count + TILE > capacity:
            store(scratch, np.int64(value))
            store(scratch + 8, np.int64(count))
            key, ties = kth_largest(scratch, 1, k, histogram)
            count = keep(index, value, count, key, ties, likely, residual, scratch)
            threshold, likely = key + 1, 0  # those kept are 0 in the residual, whatever their key
        a = accumulate(kind, source, residual, start, n, threshold, max(threshold, likely), scratch)
        count = gather(index, value, count, a, start, scratch + SUMS)
    return count, likely


@compiled
def collect_again(
    x: Source, residual: int, span: Span, k: int, count: int, spare: Entries, room: Room
) -> tuple[int, int]:
    """Once more, for all there is, after a threshold that was too high; `spare` has room for `count` entries."""
    index, value = room[0], room[1]
    kept_index, kept_value = spare
    kept = 0
    if residual:
        # With every candidate put back, the residual holds a.
        kept = put_back(residual, index, value, count, kept_index, kept_value)
        x = (FLOAT32, 0)
    result = collect(x, residual, span, k, 1, 1, room)
    for i in range(0, 4 * kept, 4):
        store(residual + 4 * int_at(kept_index + i), get_i32(kept_value + i))
    return result


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
        inside = -1 if count - i >= 64 else (1 << (count - i)) - 1
        keys = as_i32(load_f32(value + 4 * i)) & MAGNITUDE
        above += count_ones(bits_of(keys > key) & inside)
        equal += count_ones(bits_of(keys == key) & inside)
    return above, equal


@compiled
def keep(index: int, value: int, count: int, key: int, ties: int, likely: int, residual: int, spare: int) -> int:
    """Drop the candidates below `key`, and all but the first `ties` that are equal to it. In the residual, which has 0
    for those from `likely` on, what is dropped comes back, and what stays becomes 0."""
    kept: Any = 0
    left: Any = ties
    for i in range(0, 4 * count, 4):
        # What has to be mended lies far apart in memory: asked for in time, it is there. Beyond the last is anything.
        later = i + 4 * AHEAD
        next_key = key_at(value + later)
        mend = residual != 0 and (next_key >= key) != (next_key >= likely)
        prefetch(residual + 4 * int_at(index + later) if mend else spare)
        at, word = int_at(index + i), get_i32(value + i)
        this = np.int64(word) & MAGNITUDE
        equal = this == key
        good = this > key or (equal and left > 0)
        left -= int(equal)
        mend = residual != 0 and good != (this >= likely) and this < INF_BITS
        store(residual + 4 * at if mend else spare, np.int32(0) if good else word)
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
def send(room: Room, found: tuple[int, int], key: int, ties: int, residual: int, target: Entries) -> None:
    """Write the candidates above `key` and the first `ties` equal to it: indices and values to `target`. `found` is
    what `collect` returned."""
    index, value, _, _, scratch = room
    count, likely = found
    count = keep(index, value, count, key, ties, likely, residual, scratch)
    copy(target[0], index, 4 * count)
    copy(target[1], value, 4 * count)


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
