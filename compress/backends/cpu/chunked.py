"""The numba kernels of ChunkedTopK: record = two levels, unless values are floats, then indices, then values.

What encoding and decoding take is as in `dense.py`. A chunk's threshold is searched where it lies in cache, from the
one of the chunk before: counting what is above a key takes a few hundred cycles, and half a dozen keys are tried.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import (
    F32,
    INF_BITS,
    MAGNITUDE,
    NAN,
    NAN_BITS,
    SPARE,
    SUMS,
    ZERO,
    A,
    begin_sum,
    clear,
    copy,
    end_sum,
    fold_lanes,
    largest_bits,
    read_block,
)
from .dense import How, Source, Span, Wires, squeeze
from .packing import Layout, pack_bfloat, pack_floats, pack_indices, unpack_bfloat, unpack_indices
from .simd import (
    as_f32,
    as_i32,
    as_u32,
    as_u64x8,
    bits_of,
    compiled,
    count_ones,
    float_of,
    fold_max,
    get_f32,
    get_u8,
    load_f32,
    load_u8,
    lowest_bit,
    maximum,
    select,
    splat_f32,
    splat_i32,
    store,
    to_f32,
    to_i32,
    to_u8,
    to_u16,
    to_u32,
)
from .sparse import int_at, key_at

Form = tuple[int, int, int, Layout]  # elements of a chunk, entries, bits of a value, how the indices are laid out
HALF = F32(0.5)
CHUNK_STEPS = 4
#: How far from the last chunk's threshold to look first, in keys: a sixteenth of a binade.
OUTLOOK = 1 << 19


@compiled
def room_for(k: int) -> int:
    """Entries that a list has room for: whole rows of partial sums, and a vector that is written past the end."""
    return ((k + 255) & ~255) + 64


@compiled
def record_bytes(form: Form) -> int:
    _, k, bits, (_, upper, low) = form
    return (8 if bits < 16 else 0) + 4 * (upper + low) + ((k * bits + 31) >> 5) * 4


def chunk_scratch(chunk: int, k: int) -> int:
    """Bytes of scratch: a chunk, then lists of indices, values, what these decode to, codes, and codes packed."""
    return A + 4 * chunk + (4 + 4 + 4 + 1 + 1) * (((k + 255) & ~255) + 64)


# Selecting.


@compiled
def count_from(a: int, chunk: int, key: int) -> int:
    """How many keys are `key` or above."""
    limit, count = np.int32(key), 0
    for i in range(a, a + 4 * chunk, 256):
        count += count_ones(bits_of((as_i32(load_f32(i)) & MAGNITUDE) >= limit))
    return count


@compiled
def kth_key(a: int, chunk: int, k: int, largest: int, guess: int) -> tuple[int, int]:
    """What is above the first number is selected, and so many of those equal to it; no zero."""
    low: Any = 0  # at least k keys from here on
    high: Any = largest + 1  # fewer than k
    above: Any = 0  # so many from `high` on
    probe: Any = guess if 0 < guess < high else high >> 1
    width: Any = OUTLOOK
    while high - low > 1:
        count = count_from(a, chunk, probe)
        if count == k:
            return probe - 1, 0
        if count > k:
            low = probe
            probe += width
        else:
            high, above = probe, count
            probe -= width
        width *= 4
        if (low > 0 and high <= largest) or not low < probe < high:
            probe = (low + high) >> 1
    return low, k - above if low > 0 else 0


@compiled
def take(a: int, chunk: int, key: int, ties: int, index: int, value: int) -> int:
    """Lists what is selected; returns how many."""
    entry: Any = 0
    left: Any = ties
    lowest = np.int32(key + (ties == 0))
    for i in range(0, chunk, 64):
        bits: Any = bits_of((as_i32(load_f32(a + 4 * i)) & MAGNITUDE) >= lowest)
        while bits:
            j = i + lowest_bit(bits)
            bits &= bits - 1
            if key_at(a + 4 * j) == key:
                if left == 0:
                    continue
                left -= 1
            store(index + 4 * entry, np.int32(j))
            store(value + 4 * entry, get_f32(a + 4 * j))
            entry += 1
    return entry


# Values.


@compiled
def two_means(value: int, room: int, count: int, low: Any, high: Any, sums: int) -> tuple[Any, Any]:
    """A step of Lloyd's: each level becomes the mean of the magnitudes nearest to it, if there are any."""
    middle = low * HALF + high * HALF
    upper_count = 0
    for lane in range(0, 1024, 256):
        lower = upper = splat_f32(ZERO)
        for i in range(lane, 4 * room, 1024):
            v = as_f32(as_i32(load_f32(value + i)) & MAGNITUDE)
            is_upper = v > middle
            lower, upper = lower + select(is_upper, ZERO, v), upper + select(is_upper, v, ZERO)
            upper_count += count_ones(bits_of(is_upper))
        store(sums + lane, lower)
        store(sums + 1024 + lane, upper)
    if upper_count < count:
        low = fold_lanes(sums) / F32(count - upper_count)
    if upper_count > 0:
        high = fold_lanes(sums + 1024) / F32(upper_count)
    return low, high


@compiled
def fit(value: int, room: int, count: int, bits: int, sums: int) -> tuple[Any, Any]:
    """The smallest and the largest level of `count` values, which zeros follow."""
    largest = least = splat_i32(0)
    for i in range(value, value + 4 * room, 256):
        key = as_i32(load_f32(i)) & MAGNITUDE
        largest = maximum(largest, key)
        least = maximum(least, select(key > 0, MAGNITUDE - key, 0))
    low, high = float_of(np.int32(MAGNITUDE - fold_max(least))), float_of(fold_max(largest))
    if count == 0:
        low = ZERO
    elif bits == 2:
        for _ in range(CHUNK_STEPS):
            low, high = two_means(value, room, count, low, high, sums)
    return low, high


@compiled
def quantise(value: int, room: int, bits: int, low: Any, high: Any, decoded: int, codes: int, packed: int) -> None:
    """The codes of the values, what they decode to, and the codes packed; nothing for zeros."""
    top = (1 << (bits - 1)) - 1
    step = (high - low) / F32(top)
    for i in range(0, room, 64):
        v = load_f32(value + 4 * i)
        key = as_i32(v) & MAGNITUDE
        level = splat_i32(0)
        if step > ZERO:
            y = (as_f32(key) - low) / step + HALF
            level = to_i32(select(y >= F32(top), F32(top), select(y > ZERO, y, ZERO)))
            level = select(key > 0, level, 0)
        sign = as_i32(v) & (-1 << 31)
        magnitude = low + to_f32(level) * step
        magnitude = select(magnitude > high, high, magnitude)
        store(decoded + 4 * i, as_f32(as_i32(magnitude) | sign))
        store(codes + i, to_u8(level | to_i32(as_u32(sign) >> (32 - bits))))
        words = as_u64x8(load_u8(codes + i))
        if bits == 2:
            store(packed + (i >> 2), to_u16(squeeze(words, 2)))
        elif bits == 4:
            store(packed + (i >> 1), to_u32(squeeze(words, 4)))
        else:
            store(packed + i, words)


@compiled
def values_of(source: int, form: Form, record: int, value: int) -> bool:
    """What a record's k values stand for, unless it says that its chunk is not finite.

    Args:
        source: where the values lie in the record.
    """
    _, k, bits, _ = form
    if bits >= 16:
        if bits == 16:
            unpack_bfloat(source, k, value)
        else:
            copy(value, source, 4 * k)
        for i in range(value, value + 4 * k, 4):
            if key_at(i) >= INF_BITS:
                return False
        return True
    low, high = get_f32(record), get_f32(record + 4)
    if not (np.isfinite(low) and np.isfinite(high)):
        return False
    top = (1 << (bits - 1)) - 1
    step = (high - low) / F32(top)
    for i in range(k):
        code = (int(get_u8(source + (i * bits >> 3))) >> (i * bits & 7)) & (2 * top + 1)
        magnitude = low + F32(code & top) * step
        if magnitude > high:
            magnitude = high
        store(value + 4 * i, -magnitude if code > top else magnitude)
    return True


# Chunks.


@compiled
def chunked_encode(x: Source, residual: int, wire: int, span: Span, form: Form, scratch: int) -> None:
    kind, source = x
    numel, first, last = span
    chunk, k, bits, layout = form
    size, head = record_bytes(form), 8 if bits < 16 else 0
    codes_at = head + 4 * (layout[1] + layout[2])
    room = room_for(k)
    index = scratch + A + 4 * chunk
    value, decoded = index + 4 * room, index + 8 * room
    codes, packed = index + 12 * room, index + 13 * room
    guess = 0
    for b in range(first, last):
        start = b * chunk
        n = min(chunk, numel - start)
        record = wire + b * size
        a = read_block(kind, source, residual, start, n, chunk, scratch)
        largest = largest_bits(a, chunk)
        sound = largest < INF_BITS
        count = 0
        low = high = ZERO
        if sound:
            key, ties = kth_key(a, chunk, k, largest, guess)
            guess = key
            count = take(a, chunk, key, ties, index, value)
            clear(value + 4 * count, 4 * (room - count))
            if bits < 16:
                low, high = fit(value, room - 64, count, bits, scratch + SUMS)
                sound = np.isfinite(low) and np.isfinite(high)
        if not sound:
            clear(record, size)
            if bits < 16:
                store(record, NAN_BITS)
                store(record + 4, NAN_BITS)
            elif bits == 16:
                store(record + codes_at, np.uint16(0x7FC0))
            else:
                store(record + codes_at, NAN_BITS)
            continue  # the chunk keeps its residual
        e = 0
        if residual:
            e = residual + 4 * start
            copy(e, a, 4 * n)
        pack_indices(index, count, 0, layout, record + head)
        if bits == 16:
            pack_bfloat(value, k, record + codes_at, index, count, e)
        elif bits == 32:
            pack_floats(value, k, record + codes_at, index, count, e)
        else:
            store(record, low)
            store(record + 4, high)
            quantise(value, room - 64, bits, low, high, decoded, codes, packed)
            copy(record + codes_at, packed, size - codes_at)
            if residual:
                for i in range(0, 4 * count, 4):
                    store(e + 4 * int_at(index + i), get_f32(value + i) - get_f32(decoded + i))


@compiled
def chunked_decode(out: Source, wires: Wires, span: Span, how: How, form: Form, scratch: int) -> tuple[int, int]:
    kind, target = out
    address, pitch, ranks = wires
    numel, first, last = span
    alpha, add, scale = how
    chunk, k, bits, layout = form
    size, head, times = record_bytes(form), 8 if bits < 16 else 0, F32(alpha)
    codes_at = head + 4 * (layout[1] + layout[2])
    index = scratch + A + 4 * chunk
    value = index + 4 * room_for(k)
    skipped: Any = 0
    unsound: Any = 0
    for b in range(first, last):
        start = b * chunk
        n = min(chunk, numel - start)
        total = begin_sum(kind, target, start, n, chunk, add, scratch)
        for r in range(ranks):
            record = address + r * pitch + b * size
            if not values_of(record + codes_at, form, record, value):
                unsound += 1
                for i in range(0, 4 * chunk, 256):
                    store(total + i, splat_f32(NAN))
                continue
            found = unpack_indices(record + head, 0, chunk, layout, k, index)
            before: Any = -1
            skipped += found
            for i in range(0, 4 * min(found, k), 4):
                at = int_at(index + i)
                if before < at < n:
                    before = at
                    skipped -= 1
                    place = total + 4 * at
                    store(place, get_f32(place) + times * get_f32(value + i))
        end_sum(kind, total, target, start, n, chunk, add, scale, scratch + SPARE)
    return skipped, unsound
