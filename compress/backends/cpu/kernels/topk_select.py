"""The numba kernels of TopK: selection in one pass over the gradient.

The pass collects candidates, every element at or above a threshold, and an exact selection looks at those alone.
Threads share the tiles of a gradient: each collects from its own into a `Room` of its own, one finds the k-th largest
of all candidates, and each sends its own. `Room` is memory: the indices and values of `capacity` candidates, in
ascending order of index, a histogram of 2048 counts, and scratch for a tile. A *key* is a magnitude as an integer: the
bits of the float without its sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.blocks import SUMS, A, Span, clear, copy, read_ahead, read_block, residual_block
from ..runtime.dtypes import FLOAT32, INF_BITS, MAGNITUDE, NAN_BITS, TILE, Source, finite, int_at, key_at
from ..runtime.simd import (
    as_i32,
    bits_of,
    compiled,
    count_ones,
    get_f32,
    get_i32,
    get_i64,
    inlined,
    load_f32,
    lowest_bit,
    select,
    store,
    word_of,
)

Room = tuple[int, int, int, int, int]  # index, value, capacity, histogram, scratch

Pointers = tuple[int, int]  # of indices, and of values

#: Tiles that are searched before what is found in them is listed. Listing takes branches that nobody can foresee, and
#: each that is guessed wrong also stops the fetching of what comes next.
BATCH = 16

MASKS = TILE // 64 * 8

#: How many elements ahead a pass asks for. Mostly in the same page, which the hardware fetches by itself, and faster:
#: what is farther ahead it would be asked for all the time.
AHEAD = 384


@inlined
def candidates(v: Any, threshold: int, masks: int, i: int) -> Any:
    """Which of 64 elements from `i` on are at or above the threshold, as a word among the tile's masks. Returns that
    word's own bit if there are any."""
    bits = bits_of((as_i32(v) & MAGNITUDE) >= threshold)
    store(masks + (i >> 3), bits)
    return np.int64(bits != 0) << (i >> 6)


@compiled
def accumulate(
    kind: int, x: int, residual: int, start: int, n: int, threshold: int, masks: int, scratch: int
) -> tuple[int, int, int]:
    """Let a tile of n elements from `start` on enter the residual e, and mark its candidates.

    a = x + e; e = a where that is finite; bit i of `masks` (64 bits a word) = |a_i| ≥ threshold.

    Args:
        kind, x: how the gradient is stored, and where; x = 0: the residual holds a already.
        residual: the address of e, float32; 0: there is none, a = x.
        masks: room for TILE / 64 words.
        scratch: `scratch_bytes(TILE)`.

    Returns:
        The addresses of a, float32 [TILE], and of the tile of e, or 0; and bit j set if word j of the masks is not 0.
    """
    a, old = scratch + A, residual + 4 * start
    words: Any = 0
    if x and residual and kind == FLOAT32 and n == TILE:
        source, kept = x + 4 * start, 0
        for i in range(0, TILE, 64):
            e = load_f32(old + 4 * i)
            v = load_f32(source + 4 * i) + e
            words |= candidates(v, threshold, masks, i)
            good = finite(v)
            if bits_of(good) == -1:
                store(old + 4 * i, v)
            else:  # a and the residual differ: a in scratch then, all of it
                store(old + 4 * i, select(good, v, e))
                store(a + 4 * i, v)
                kept |= 1 << (i >> 6)
            read_ahead(source + 4 * (i + AHEAD))
            read_ahead(old + 4 * (i + AHEAD))
        if not kept:
            return old, old, words
        for i in range(0, TILE, 64):
            if not (kept >> (i >> 6)) & 1:
                store(a + 4 * i, load_f32(old + 4 * i))
        return a, old, words
    if x:
        a = read_block(kind, x, residual, start, n, TILE, scratch)
    else:
        clear(a, 4 * TILE)
        copy(a, old, 4 * n)
    if not residual:
        for i in range(0, TILE, 64):
            words |= candidates(load_f32(a + 4 * i), threshold, masks, i)
        return a, 0, words
    e_block = residual_block(residual, start, n, TILE, scratch)
    sound: Any = -1
    for i in range(0, TILE, 64):
        v = load_f32(a + 4 * i)
        words |= candidates(v, threshold, masks, i)
        sound &= bits_of(finite(v))
        store(e_block + 4 * i, select(finite(v), v, load_f32(e_block + 4 * i)))
    return e_block if sound == -1 else a, e_block, words


Tile = tuple[int, int]  # where a lies, and the residual to change, or 0


@inlined
def append(index: int, value: int, count: int, tile: Tile, start: int, j: int, likely: int) -> None:
    a, e = tile
    word = word_of(get_f32(a + 4 * j))
    key = np.int64(word) & MAGNITUDE
    store(index + 4 * count, np.int32(start + j))
    store(value + 4 * count, NAN_BITS if key > INF_BITS else word)
    if e:
        store(e + 4 * j, np.int32(0) if likely <= key < INF_BITS else get_i32(e + 4 * j))


@compiled
def gather(index: int, value: int, count: int, tile: Tile, start: int, likely: int, masks: int, words: int) -> int:
    """Append a tile's candidates. The residual becomes 0 where the key is `likely` or more, which most likely is sent:
    to mend the others later, one by one and far apart, is less work.

    A word has one or two candidates as a rule: those take no branch, which would be mispredicted, but an entry that is
    none is written over by the next."""
    rest: Any = words
    while rest:
        i = lowest_bit(rest) << 6
        rest &= rest - 1
        bits = get_i64(masks + (i >> 3))
        for _ in range(2):
            append(index, value, count, tile, start, i + lowest_bit(bits | (-1 << 63)), likely)
            count += bits != 0
            bits &= bits - 1
        while bits:
            append(index, value, count, tile, start, i + lowest_bit(bits), likely)
            count += 1
            bits &= bits - 1
    return count


@compiled
def collect(x: Source, residual: int, span: Span, k: int, threshold: int, likely: int, room: Room) -> tuple[int, int]:
    """One pass: every element whose key is `threshold` or more becomes a candidate. Returns how many there are, and
    from which key on they are 0 in the residual, if there is one.

    When the candidates no longer fit, all but the k largest go, and from then on only what is above them is collected:
    among equals the earlier stay. So the k largest are always found, if there are k at or above the first threshold.
    """
    kind, source = x
    numel, first, last = span
    index, value, capacity, histogram, scratch = room
    masks, found = scratch + SUMS, scratch + A + 8 * TILE
    tile: Any = first
    count: Any = 0
    while tile < last:
        if count + TILE > capacity:
            store(scratch, np.int64(value))
            store(scratch + 8, np.int64(count))
            key, ties = kth_largest(scratch, 1, k, histogram)
            count = keep(index, value, count, key, ties, likely, residual, (index, value))
            threshold, likely = key + 1, 0  # those kept are 0 in the residual, whatever their key
        end, at = min(tile + BATCH, tile + (capacity - count) // TILE, last), tile
        while at < end:
            start, mask = at * TILE, masks + (at - tile) * MASKS
            n = min(TILE, numel - start)
            a, e, words = accumulate(kind, source, residual, start, n, threshold, mask, scratch)
            row = found + 24 * (at - tile)
            store(row, a)
            store(row + 8, e)
            store(row + 16, words)
            at += 1
            if a == scratch + A:
                end = at  # before the next one is there
        for t in range(tile, end):
            row, mask = found + 24 * (t - tile), masks + (t - tile) * MASKS
            where = get_i64(row), get_i64(row + 8)
            count = gather(index, value, count, where, t * TILE, max(threshold, likely), mask, get_i64(row + 16))
        if residual and end * TILE > numel:
            start = (end - 1) * TILE
            copy(residual + 4 * start, get_i64(found + 24 * (end - 1 - tile) + 8), 4 * (numel - start))
        tile = end
    return count, likely


@compiled
def collect_again(
    x: Source, residual: int, span: Span, k: int, lowest: int, count: int, spare: Pointers, room: Room
) -> tuple[int, int]:
    """Once more, from `lowest` on, after a threshold that was too high; `spare` has room for `count` entries."""
    index, value = room[0], room[1]
    kept_index, kept_value = spare
    kept = 0
    if residual:
        # With every candidate put back, the residual holds a.
        kept = put_back(residual, index, value, count, kept_index, kept_value)
        x = (FLOAT32, 0)
    result = collect(x, residual, span, k, lowest, lowest, room)
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
def keep(index: int, value: int, count: int, key: int, ties: int, likely: int, residual: int, target: Pointers) -> int:
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
