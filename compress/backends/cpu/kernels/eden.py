"""EDEN: record = a scale for each of the rotations, the seed of their signs, a byte for five trits or eight bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...codec_types import EDENLike
from ..block_codec import Blocks, Draw, Kernel, _draw
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
    largest_bits,
    power,
    random_bits,
    read_block,
    residual_block,
)
from ..runtime.dtypes import F32, INF_BITS, MAGNITUDE, ZERO, Source
from ..runtime.simd import (
    as_f32,
    as_i8,
    as_i32,
    bits_of,
    compiled,
    count_ones,
    float_of,
    fold_sum,
    get_f32,
    get_u16,
    hadamard,
    inlined,
    iota_u32,
    load_f32,
    load_u8,
    select,
    splat_i32,
    splat_u8,
    store,
    to_f32,
    to_i32,
    to_u8,
    to_u16,
    word_of,
)
from .terngrad import bytes_of_trits, lowest_trits

#: Elements that are rotated together.
ROW = 256
THRESHOLD, PER_ROW = F32(0.612), F32(1 / ROW)
#: The threshold of two levels.
BELOW_ALL = F32(-1)
SIGN = -0x80000000
#: Three numbers of up to 256, either way, fit in a word so many bits apart, and sums of words are words of sums.
APART = 10


@compiled
def write_hashes(seed: int, target: int) -> None:
    """For each lane of a row 32 bits: bit 31 - c is the sign in row c."""
    for lane in range(0, ROW, 64):
        h = iota_u32(seed << 8 | lane)
        h = (h ^ h >> 16) * 0x85EBCA6B
        h = (h ^ h >> 13) * 0xC2B2AE35
        store(target + 4 * lane, h ^ h >> 16)


@inlined
def sign_at(hashes: int, i: int, row: int) -> Any:
    return as_i32(load_f32(hashes + i)) << row & SIGN


@inlined
def four_sums(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any, Any]:
    """A row's transform from those of its four times 64 elements."""
    a, b, c, d = a + b, a - b, c + d, c - d
    return a + c, b + d, a - c, b - d


@compiled
def rotate(a: int, p: Any, hashes: int, row: int, out: int) -> Any:
    """A row's transform, with signs, p times as large; and the canonical sum of its squares."""
    v = four_sums(
        hadamard(as_f32(as_i32(load_f32(a) * p) ^ sign_at(hashes, 0, row))),
        hadamard(as_f32(as_i32(load_f32(a + 256) * p) ^ sign_at(hashes, 256, row))),
        hadamard(as_f32(as_i32(load_f32(a + 512) * p) ^ sign_at(hashes, 512, row))),
        hadamard(as_f32(as_i32(load_f32(a + 768) * p) ^ sign_at(hashes, 768, row))),
    )
    store(out, v[0])
    store(out + 256, v[1])
    store(out + 512, v[2])
    store(out + 768, v[3])
    return fold_sum((v[0] * v[0] + v[2] * v[2]) + (v[1] * v[1] + v[3] * v[3]))


@compiled
def transform_words(words: int) -> None:
    """That of a row of integers, in place."""
    v = four_sums(
        hadamard(as_i32(load_f32(words))),
        hadamard(as_i32(load_f32(words + 256))),
        hadamard(as_i32(load_f32(words + 512))),
        hadamard(as_i32(load_f32(words + 768))),
    )
    store(words, v[0])
    store(words + 256, v[1])
    store(words + 512, v[2])
    store(words + 768, v[3])


@inlined
def kept_at(address: int, threshold: Any, count: int) -> tuple[Any, int]:
    magnitude = as_f32(as_i32(load_f32(address)) & MAGNITUDE)
    some = magnitude > threshold
    return select(some, magnitude, ZERO), count + count_ones(bits_of(some))


@compiled
def sum_above(row: int, threshold: Any) -> tuple[Any, int]:
    """The canonical sum of the magnitudes above the threshold, and how many these are."""
    a, count = kept_at(row, threshold, 0)
    b, count = kept_at(row + 256, threshold, count)
    c, count = kept_at(row + 512, threshold, count)
    d, count = kept_at(row + 768, threshold, count)
    return fold_sum((a + c) + (b + d)), count


@inlined
def scale_at(record: int, row: int) -> Any:
    return float_of(np.int32(np.int64(get_u16(record + 2 * row)) << 16))


@inlined
def number_at(words: int, i: int, row: int) -> Any:
    """The numbers of a row in the words' transform, at byte i: their 10 bits come on top, rounded from those below.
    Words of three rows lie in the first one's place."""
    v = as_i32(load_f32(words + 1024 * (row - row % 3) + i))
    return to_f32((v << 22 - APART * (row % 3)) + (1 << 21) >> 22)


@inlined
def decoded_at(words: int, hashes: int, i: int, row: int, scale: Any) -> Any:
    return as_f32(as_i32(number_at(words, i, row) * scale) ^ sign_at(hashes, i, row))


def kernels_of(rows: int, levels: int) -> tuple[Any, Any]:
    """The functions that encode and decode records of so many rows: compiled for each, which an argument would slow."""
    block, head = rows * ROW, 2 * rows + 5 & -4

    @compiled
    def eden_encode(x: Source, residual: int, wire: int, span: Span, draw: Draw, scratch: int) -> None:
        kind, source = x
        numel, first, last = span
        stochastic, seed, step, stream = draw
        hashes, rotated, thresholds = scratch + SUMS, scratch + A + 8 * block, scratch + SPARE
        for b in range(first, last):
            start = b * block
            n = min(block, numel - start)
            record = wire + b * (head + ROW)
            a = read_block(kind, source, residual, start, n, block, scratch)
            own = np.int64(0)
            if stochastic:
                random_bits(rotated, seed, step, stream, start >> 3, 128)
                own = np.int64(get_u16(rotated))
            store(record + head - 4, np.int32(0))
            store(record + 2 * rows, np.uint16(own))
            write_hashes(own, hashes)
            sound = True
            for row in range(rows):
                largest = largest_bits(a + 1024 * row, ROW)
                exponent = min(max(largest >> 23, 1), 254)
                energy = rotate(a + 1024 * row, power(254 - exponent), hashes, row, rotated + 1024 * row)
                threshold = F32(np.sqrt(energy * PER_ROW) * THRESHOLD) if levels == 3 else BELOW_ALL
                kept, count = sum_above(rotated + 1024 * row, threshold)
                level = F32(energy / kept) if stochastic else F32(kept / F32(count))
                scale = F32(level * PER_ROW) * power(exponent) if kept > ZERO else ZERO
                word = np.int64(word_of(scale))
                rounded = word + 0x7FFF + (word >> 16 & 1) >> 16
                sound &= largest < INF_BITS and np.isfinite(float_of(np.int32(rounded << 16)) * F32(ROW))
                store(record + 2 * row, np.uint16(rounded))
                store(thresholds + 4 * row, threshold)
            if not sound:
                for row in range(rows):
                    store(record + 2 * row, np.uint16(0x7FC0))
                clear(record + head, ROW)
                continue  # the block keeps its residual
            for j in range(0, ROW, 64):
                codes, words = splat_u8(0), splat_i32(0)
                for row in range(rows - 1, -1, -1):
                    v, before = load_f32(rotated + 1024 * row + 4 * j), codes
                    some = as_f32(as_i32(v) & MAGNITUDE) > get_f32(thresholds + 4 * row)
                    minus = some & (v < ZERO)
                    codes = codes + codes + to_u8(minus)
                    if levels == 3:
                        codes = codes + before + to_u8(some)
                    if residual:
                        words = (words << APART) + to_i32(some) - 2 * to_i32(minus)
                        if row % 3 == 0:  # their own place has been read
                            store(rotated + 1024 * row + 4 * j, words)
                            words = splat_i32(0)
                store(record + head + j, codes)
            if residual:
                for row in range(0, rows, 3):
                    transform_words(rotated + 1024 * row)
                e = residual_block(residual, start, n, block, scratch)
                for row in range(rows):
                    scale = scale_at(record, row)
                    for i in range(0, 1024, 256):
                        at = 1024 * row + i
                        # + 0 turns -0 into 0
                        store(e + at, load_f32(a + at) - (decoded_at(rotated, hashes, i, row, scale) + ZERO))
                if n < block:
                    copy(residual + 4 * start, e, 4 * n)

    @compiled
    def eden_decode(out: Source, wires: Wires, span: Span, how: How, scratch: int) -> tuple[int, int]:
        kind, target = out
        address, pitch, ranks = wires
        numel, first, last = span
        alpha, add, times = how
        hashes, words, factor = scratch + SUMS, scratch + A + 8 * block, F32(alpha)
        skipped = unsound = 0
        for b in range(first, last):
            start = b * block
            n = min(block, numel - start)
            total = begin_sum(kind, target, start, n, block, add, scratch)
            for r in range(ranks):
                record = address + r * pitch + b * (head + ROW)
                write_hashes(np.int64(get_u16(record + 2 * rows)), hashes)
                for j in range(0, ROW, 64):
                    rest, word = to_u16(load_u8(record + head + j)), splat_i32(0)
                    if levels == 3:
                        rest, bad = bytes_of_trits(record + head + j)
                        skipped += bad
                    for row in range(rows):
                        if levels == 3:
                            trit, rest = lowest_trits(rest)
                            digit = to_i32(as_i8(select(trit == 2, 255, trit)))
                        else:
                            digit = 1 - 2 * to_i32(rest & 1)
                            rest = rest >> 1
                        word = word + (digit << APART * (row % 3))
                        if row % 3 == 2 or row == rows - 1:
                            store(words + 1024 * (row - row % 3) + 4 * j, word)
                            word = splat_i32(0)
                for row in range(0, rows, 3):
                    transform_words(words + 1024 * row)
                sound = True
                for row in range(rows):
                    scale = scale_at(record, row)
                    sound &= np.isfinite(scale * F32(ROW))
                    for i in range(0, 1024, 256):
                        at = total + 1024 * row + i
                        store(at, load_f32(at) + decoded_at(words, hashes, i, row, scale) * factor)
                unsound += not sound
            end_sum(kind, total, target, start, n, block, add, times, scratch + SPARE)
        return skipped, unsound

    return eden_encode, eden_decode


#: By number of levels.
KERNELS = {2: kernels_of(8, 2), 3: kernels_of(5, 3)}


class EDEN(Blocks):
    def encode_block(self, codec: EDENLike, draw: Tensor | None) -> Kernel:
        return KERNELS[codec.levels][0], (_draw(codec, draw),)

    def decode_block(self, codec: EDENLike) -> Kernel:
        return KERNELS[codec.levels][1], ()
