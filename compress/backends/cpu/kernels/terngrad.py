"""TernGrad: record = scale, a byte for five trits."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...codec_types import TernGradLike
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
    fill_halves,
    largest_bits,
    power,
    random_bits,
    read_ahead,
    read_block,
    residual_block,
    sum_of_squares,
    uniform,
)
from ..runtime.dtypes import F32, INF_BITS, MAGNITUDE, NAN_BITS, ONE, TINY, ZERO, Source, width
from ..runtime.simd import (
    as_f32,
    as_i32,
    bits_of,
    compiled,
    count_ones,
    float_of,
    get_f32,
    inlined,
    load_f32,
    load_u8,
    select,
    splat_f32,
    splat_u8,
    store,
    to_u8,
    to_u16,
)


@compiled
def terngrad_encode(
    x: Source, residual: int, wire: int, span: Span, block: int, clip: float, draw: Draw, scratch: int
) -> None:
    kind, source = x
    numel, first, last = span
    stochastic, seed, step, stream = draw
    draws = scratch + A + 8 * block
    size = 4 + block // 5
    if not stochastic:
        fill_halves(draws, block)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wire + b * size
        a = read_block(kind, source, residual, start, n, block, scratch)
        largest = largest_bits(a, block)
        if largest >= INF_BITS:
            store(record, NAN_BITS)
            clear(record + 4, size - 4)
            continue  # the block keeps its residual
        exponent = min(max(largest >> 23, 1), 254)
        p = power(254 - exponent)
        sigma = np.sqrt(sum_of_squares(a, p, block, scratch + SUMS) / F32(n))
        scaled = float_of(np.int32(largest)) * p
        clipped = F32(clip) * sigma
        if clipped < scaled:  # not so when it is infinity times zero
            scaled = clipped
        level = scaled * power(exponent)
        if largest > 0 and level == ZERO:
            level = TINY
        store(record, level)
        inverse = ONE / scaled if scaled > ZERO else ZERO
        if stochastic:
            random_bits(draws, seed, step, stream, start >> 3, block)
        e = residual_block(residual, start, n, block, scratch)
        for j in range(0, block // 5, 64):
            # A byte's five digits lie 256 elements apart, so packing never crosses lanes.
            chunk = (j >> 8) * 1280 + (j & 255)
            trits = splat_u8(0)
            for i in range(chunk + 1024, chunk - 1, -256):
                v = load_f32(a + 4 * i)
                some = as_f32(as_i32(v) & MAGNITUDE) * p * inverse + uniform(draws, i) >= ONE
                minus = some & (v < ZERO)
                trits = trits + trits + trits + to_u8(some) + to_u8(minus)
                decoded = select(minus, splat_f32(-level), select(some, splat_f32(level), ZERO))
                store(e + 4 * i, v - decoded)
                read_ahead(source + width(kind) * (start + block + i))
                if residual:
                    read_ahead(residual + 4 * (start + block + i))
            store(record + 4 + j, trits)
        if residual and n < block:
            copy(residual + 4 * start, e, 4 * n)


@inlined
def bytes_of_trits(address: int) -> tuple[Any, int]:
    """64 bytes, as 16-bit numbers, with zeros in the place of those that are no five trits, and how many these are."""
    packed = load_u8(address)
    bad = packed >= 243
    return to_u16(select(bad, 0, packed)), count_ones(bits_of(bad))


@inlined
def lowest_trits(numbers: Any) -> tuple[Any, Any]:
    """The lowest digit of each of 64 numbers, and what the higher ones make."""
    third = numbers * 171 >> 9  # divided by 3
    return to_u8(numbers - third * 3), third


@compiled
def ternary_decode(out: Source, wires: Wires, span: Span, how: How, block: int, scratch: int) -> tuple[int, int]:
    kind, target = out
    address, pitch, ranks = wires
    numel, first, last = span
    alpha, add, scale = how
    size, times = 4 + block // 5, F32(alpha)
    skipped = unsound = 0
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        total = begin_sum(kind, target, start, n, block, add, scratch)
        for r in range(ranks):
            record = address + r * pitch + b * size
            level = get_f32(record)
            unsound += not np.isfinite(level)
            plus, minus, zero = times * level, times * -level, times * (ZERO * level)
            for j in range(0, block // 5, 64):
                rest, bad = bytes_of_trits(record + 4 + j)
                skipped += bad
                chunk = (j >> 8) * 1280 + (j & 255)
                for i in range(chunk, chunk + 1280, 256):
                    trit, rest = lowest_trits(rest)
                    v = select(trit == 1, splat_f32(plus), select(trit == 2, splat_f32(minus), zero))
                    store(total + 4 * i, load_f32(total + 4 * i) + v)
        end_sum(kind, total, target, start, n, block, add, scale, scratch + SPARE)
    return skipped, unsound


class TernGrad(Blocks):
    def encode_block(self, codec: TernGradLike, draw: Tensor | None) -> Kernel:
        return terngrad_encode, (codec.block, float(codec.clip), _draw(codec, draw))

    def decode_block(self, codec: TernGradLike) -> Kernel:
        return ternary_decode, (codec.block,)
