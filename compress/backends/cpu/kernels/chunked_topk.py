"""ChunkedTopK: record = two levels, unless values are floats, then indices, then values. `chunk_select` selects."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ....formats.entries import index_layout
from ...codec_types import ChunkedTopKLike
from ..block_codec import Blocks, Kernel
from ..entries import Layout, pack_bfloat, pack_floats, pack_indices, unpack_bfloat, unpack_indices
from ..runtime.blocks import (
    SPARE,
    SUMS,
    A,
    How,
    Span,
    Wires,
    begin_sum,
    clear,
    copy,
    end_sum,
    fold_lanes,
    largest_bits,
    read_block,
)
from ..runtime.dtypes import F32, FLOAT32, INF_BITS, MAGNITUDE, NAN, NAN_BITS, SUMMABLE, ZERO, Source, int_at, key_at
from ..runtime.fused_inputs import gradient_at
from ..runtime.simd import (
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
from .chunk_select import choose, room_for
from .qsgd import squeeze

Form = tuple[int, int, int, Layout]  # elements of a chunk, entries, bits of a value, how the indices are laid out

HALF = F32(0.5)

CHUNK_STEPS = 4

#: By how much the largest keys of two chunks differ when their scales do: half a binade.
OTHER_SCALE = 1 << 22


@compiled
def record_bytes(form: Form) -> int:
    _, k, bits, (_, upper, low) = form
    return (8 if bits < 16 else 0) + 4 * (upper + low) + ((k * bits + 31) >> 5) * 4


def chunk_scratch(chunk: int, k: int) -> int:
    """Bytes of scratch: a chunk, then lists of indices, values, what these decode to, codes, and codes packed."""
    return A + 4 * chunk + (4 + 4 + 4 + 1 + 1) * room_for(k)


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
        largest: Any = 0
        for i in range(value, value + 4 * k, 4):
            largest = max(largest, key_at(i))
        return largest < INF_BITS
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


@compiled
def largest_of_sum(x: int, old: int, chunk: int) -> Any:
    """The largest key of x + old."""
    largest = splat_i32(0)
    for i in range(0, 4 * chunk, 256):
        largest = maximum(largest, as_i32(load_f32(x + i) + load_f32(old + i)) & MAGNITUDE)
    return np.int64(fold_max(largest))


@compiled
def add_to(x: int, old: int, chunk: int) -> None:
    for i in range(0, 4 * chunk, 256):
        store(old + i, load_f32(x + i) + load_f32(old + i))


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
    filled = (k + 255) & ~255  # entries, and zeros up to a row of partial sums
    guess: Any = 0
    before: Any = 0
    for b in range(first, last):
        start = b * chunk
        n = min(chunk, numel - start)
        record = wire + b * size
        e = residual + 4 * start if residual else 0
        in_place = False
        largest: Any = 0
        if residual and kind == FLOAT32 and n == chunk:
            largest = largest_of_sum(source + 4 * start, e, chunk)
            in_place = largest < SUMMABLE  # then nothing can come that has to leave the residual as it was
        if in_place:
            add_to(source + 4 * start, e, chunk)
            a = e
        else:
            a = read_block(kind, source, residual, start, n, chunk, scratch)
            largest = largest_bits(a, chunk)
        sound = largest < INF_BITS
        count = 0
        low = high = ZERO
        if sound:
            if guess > 1 and abs(largest - before) > OTHER_SCALE:
                guess += largest - before
            before = largest
            following = start + chunk
            ahead = gradient_at(kind, source, following), residual + 4 * following if residual else 0
            count, guess = choose(a, chunk, k, largest, guess, index, value, ahead)
            if bits < 16:
                low, high = fit(value, filled, count, bits, scratch + SUMS)
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
        if residual and not in_place:
            copy(e, a, 4 * n)
        pack_indices(index, count, 0, layout, record + head)
        if bits == 16:
            pack_bfloat(value, k, record + codes_at, index, count, e)
        elif bits == 32:
            pack_floats(value, k, record + codes_at, index, count, e)
        else:
            store(record, low)
            store(record + 4, high)
            quantise(value, filled, bits, low, high, decoded, codes, packed)
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


class ChunkedTopK(Blocks):
    def scratch(self, codec: ChunkedTopKLike) -> int:
        return chunk_scratch(codec.chunk, codec.k)

    def encode_block(self, codec: ChunkedTopKLike, draw: Tensor | None) -> Kernel:
        return chunked_encode, self._form(codec)

    def decode_block(self, codec: ChunkedTopKLike) -> Kernel:
        return chunked_decode, self._form(codec)

    @staticmethod
    def _form(codec: ChunkedTopKLike) -> tuple[Form]:
        layout = index_layout(codec.chunk, codec.k)
        return ((codec.chunk, codec.k, codec.bits, (layout.low_bits, layout.upper_words, layout.low_words)),)
