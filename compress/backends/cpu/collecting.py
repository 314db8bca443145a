"""The numba kernels of TopK that collect: one pass over a gradient, in which every element at or above a threshold
becomes a candidate. An exact selection looks at those alone (`sparse`).

Threads share the tiles of a gradient, and each collects from its own into a `Room` of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import SUMS, A, clear, copy, read_ahead, read_block, residual_block
from .formats import BFLOAT16, FLOAT32, INF_BITS, LOW, MAGNITUDE, NAN_BITS, SUMMABLE, TILE, finite
from .simd import (
    as_i32,
    bits_of,
    compiled,
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
from .sources import SUMMED, gradient_at, momentum_at, sum_at
from .sparse import Entries, Room, Source, Span, int_at, keep, key_at, kth_largest, put_back

#: What a pass does to the residual: nothing; what is selected leaves it, and all else comes in; or it becomes the sum
#: of both (`sources.SUMMED`), and what is selected stays.
READ, TAKE, SUM = 0, 1, 2
Change = tuple[int, int]  # one of these, and the record of `SUMMED`

#: How many sampled runs ahead to ask for what they hold, which lies too far apart for the hardware to foresee.
RUNS_AHEAD = 8
#: Tiles that are searched before what is found in them is listed. Listing takes branches that nobody can foresee, and
#: each that is guessed wrong also stops the fetching of what comes next.
BATCH = 16
MASKS = TILE // 64 * 8
#: How many elements ahead a pass that only reads asks for. Mostly in the same page, which the hardware fetches by
#: itself, and faster: what is farther ahead it would be asked for all the time.
AHEAD = 384


@inlined
def candidates(v: Any, threshold: int, masks: int, i: int) -> Any:
    """Which of 64 elements from `i` on are at or above the threshold, as a word among the tile's masks. Returns that
    word's own bit if there are any."""
    bits = bits_of((as_i32(v) & MAGNITUDE) >= threshold)
    store(masks + (i >> 3), bits)
    return np.int64(bits != 0) << (i >> 6)


@inlined
def sampled_run(stratum: int, stride: int) -> Any:
    """The first element of the run of 64 that stands for a stratum: any of its `stride` runs, since always the same
    one would be the same columns of many a matrix. Multiplicative hashing (Knuth, The Art of Computer Programming,
    volume 3, section 6.4)."""
    mixed = ((stratum * 0x9E3779B1) & LOW) >> 8
    return 64 * (stratum * stride + mixed % stride)


@compiled
def sample(x: Source, residual: int, strata: tuple[int, int], threshold: int, keys: int, scratch: int) -> int:
    """The keys at or above `threshold` in one run of 64 elements of each stratum, of which there are so many, of so
    many runs each, as if nothing were above infinity; returns how many. Changes nothing."""
    kind, source = x
    strata_count, stride = strata
    count = 0
    for stratum in range(strata_count):
        later = sampled_run(stratum + RUNS_AHEAD, stride)
        read_ahead(gradient_at(kind, source, later))
        if kind > BFLOAT16:
            read_ahead(momentum_at(kind, source, later))
        if residual:
            read_ahead(residual + 4 * later)
        a = read_block(kind, source, residual, sampled_run(stratum, stride), 64, 64, scratch)
        bits = bits_of((as_i32(load_f32(a)) & MAGNITUDE) >= threshold)
        while bits:
            store(keys + 4 * count, np.int32(min(key_at(a + 4 * lowest_bit(bits)), INF_BITS)))
            count += 1
            bits &= bits - 1
    return count


@compiled
def accumulate(
    kind: int, x: int, residual: int, update: int, start: int, n: int, threshold: int, masks: int, scratch: int
) -> tuple[int, int, int]:
    """Where a lies, a tile from `start` on, and where the residual does, which becomes a where that is finite. The
    masks of the candidates go to `masks`: a word for 64 elements; and which words are not 0 is returned too. If x is
    0, the residual holds a already. Unless `update`, the residual stays, and is said to lie at 0."""
    a, old = scratch + A, residual + 4 * start
    words: Any = 0
    if x and residual and update and kind == FLOAT32 and n == TILE:
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
    if not (residual and update):
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


@compiled
def sum_up(
    kind: int, x: int, residual: int, record: int, start: int, n: int, threshold: int, masks: int, scratch: int
) -> tuple[int, int]:
    """Where a lies, a tile from `start` on, after it became the residual, or went beside it if it is too large; and
    words as `accumulate` has them."""
    words: Any = 0
    large: Any = 0
    if kind == FLOAT32 and n == TILE:
        source, old, kept = x + 4 * start, residual + 4 * start, scratch + A
        for i in range(0, 4 * TILE, 256):
            e = load_f32(old + i)
            v = load_f32(source + i) + e
            words |= candidates(v, threshold, masks, i >> 2)
            large |= bits_of((as_i32(v) & MAGNITUDE) >= SUMMABLE)
            store(old + i, v)
            store(kept + i, e)
            read_ahead(source + i + 4 * AHEAD)
            read_ahead(old + i + 4 * AHEAD)
        store(get_i64(record + 8) + start // TILE, np.uint8(large == 0))
        if large:
            old = get_i64(record) + 4 * start
            copy(old, residual + 4 * start, 4 * TILE)
            copy(residual + 4 * start, kept, 4 * TILE)
        return old, words
    a = read_block(kind, x, residual, start, n, TILE, scratch)
    for i in range(0, TILE, 64):
        v = load_f32(a + 4 * i)
        words |= candidates(v, threshold, masks, i)
        large |= bits_of((as_i32(v) & MAGNITUDE) >= SUMMABLE)
    store(get_i64(record + 8) + start // TILE, np.uint8(large == 0))
    target = sum_at(record, residual, start)
    copy(target, a, 4 * n)
    return target if n == TILE else a, words


@compiled
def look_through(x: int, old: int, threshold: int, masks: int) -> Any:
    """The masks of the candidates of x + old, a tile that is only read, as `accumulate` has them."""
    words: Any = 0
    for i in range(0, TILE, 64):
        words |= candidates(load_f32(x + 4 * i) + load_f32(old + 4 * i), threshold, masks, i)
        read_ahead(x + 4 * (i + AHEAD))
        read_ahead(old + 4 * (i + AHEAD))
    return words


Tile = tuple[int, int, int]  # where a lies, what is to be added to it, or 0, and the residual to change, or 0


@inlined
def append(index: int, value: int, count: int, tile: Tile, start: int, j: int, likely: int) -> None:
    a, old, e = tile
    v = get_f32(a + 4 * j)
    if old:
        v = v + get_f32(old + 4 * j)
    word = word_of(v)
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
def collect(
    x: Source, residual: int, change: Change, span: Span, k: int, threshold: int, likely: int, room: Room
) -> tuple[int, int]:
    """One pass: every element whose key is `threshold` or more becomes a candidate. Returns how many there are, and
    from which key on they are 0 in the residual, if it is to `TAKE`.

    When the candidates no longer fit, all but the k largest go, and from then on only what is above them is collected:
    among equals the earlier stay. So the k largest are always found, if there are k at or above the first threshold.
    """
    kind, source = x
    how, record = change
    numel, first, last = span
    index, value, capacity, histogram, scratch = room
    takes, masks, found = int(how == TAKE), scratch + SUMS, scratch + A + 8 * TILE
    tile: Any = first
    count: Any = 0
    while tile < last:
        if count + TILE > capacity:
            store(scratch, np.int64(value))
            store(scratch + 8, np.int64(count))
            key, ties = kth_largest(scratch, 1, k, histogram)
            count = keep(index, value, count, key, ties, likely, residual if takes else 0, (index, value))
            threshold, likely = key + 1, 0  # those kept are 0 in the residual, whatever their key
        end, at = min(tile + BATCH, tile + (capacity - count) // TILE, last), tile
        while at < end:
            start, mask = at * TILE, masks + (at - tile) * MASKS
            n = min(TILE, numel - start)
            a, old, e = source + 4 * start, 0, 0
            if how == SUM:
                a, words = sum_up(kind, source, residual, record, start, n, threshold, mask, scratch)
            elif residual and how == READ and kind == FLOAT32 and n == TILE:
                old = residual + 4 * start
                words = look_through(a, old, threshold, mask)
            else:
                a, e, words = accumulate(kind, source, residual, takes, start, n, threshold, mask, scratch)
            row = found + 32 * (at - tile)
            store(row, a)
            store(row + 8, old)
            store(row + 16, e)
            store(row + 24, words)
            at += 1
            if a == scratch + A:
                end = at  # before the next one is there
        for t in range(tile, end):
            row, mask = found + 32 * (t - tile), masks + (t - tile) * MASKS
            where = get_i64(row), get_i64(row + 8), get_i64(row + 16)
            count = gather(index, value, count, where, t * TILE, max(threshold, likely), mask, get_i64(row + 24))
        if residual and takes and end * TILE > numel:
            start = (end - 1) * TILE
            copy(residual + 4 * start, get_i64(found + 32 * (end - 1 - tile) + 16), 4 * (numel - start))
        tile = end
    return count, likely


@compiled
def collect_again(
    x: Source, residual: int, change: Change, span: Span, k: int, lowest: int, count: int, spare: Entries, room: Room
) -> tuple[int, int]:
    """Once more, from `lowest` on, after a threshold that was too high; `spare` has room for `count` entries."""
    index, value = room[0], room[1]
    kept_index, kept_value = spare
    how, record = change
    kept = 0
    if how == SUM:
        how, x = READ, (SUMMED, record)
    elif residual and how == TAKE:
        # With every candidate put back, the residual holds a.
        kept = put_back(residual, index, value, count, kept_index, kept_value)
        x = (FLOAT32, 0)
    result = collect(x, residual, (how, record), span, k, lowest, lowest, room)
    for i in range(0, 4 * kept, 4):
        store(residual + 4 * int_at(kept_index + i), get_i32(kept_value + i))
    return result
