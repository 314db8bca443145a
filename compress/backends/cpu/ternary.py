"""The numba kernels of TernGrad and Ternary, which have one wire: record = scale, block / 5 bytes of trits.

What encoding and decoding take, and what scratch is, is as in `dense.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import (
    F32,
    INF_BITS,
    MAGNITUDE,
    NAN_BITS,
    ONE,
    SPARE,
    SUMS,
    TINY,
    ZERO,
    A,
    begin_sum,
    clear,
    copy,
    end_sum,
    fill_halves,
    fold_lanes,
    largest_bits,
    power,
    random_bits,
    read_ahead,
    read_block,
    residual_block,
    sum_of_squares,
    uniform,
    width,
)
from .dense import Draw, How, Source, Span, Wires
from .simd import (
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


HALF = F32(0.5)
LLOYD_STEPS = 2


@inlined
def magnitude_at(address: int) -> Any:
    return as_f32(as_i32(load_f32(address)) & MAGNITUDE)


@compiled
def sum_of_magnitudes(a: int, block: int, sums: int) -> Any:
    """The canonical sum of |a|."""
    for lane in range(0, 1024, 256):
        total = splat_f32(ZERO)
        for i in range(lane, 4 * block, 1024):
            total = total + magnitude_at(a + i)
        store(sums + lane, total)
    return fold_lanes(sums)


@compiled
def means_above(a: int, low: Any, high: Any, block: int, sums: int) -> tuple[Any, Any, Any, Any]:
    """The canonical sum of the magnitudes above a threshold, and their mean, 0 if there are none: for two of them."""
    low_count = high_count = 0
    for lane in range(0, 1024, 256):
        low_sum = high_sum = splat_f32(ZERO)
        for i in range(lane, 4 * block, 1024):
            v = magnitude_at(a + i)
            above, far_above = v > low, v > high
            low_sum, high_sum = low_sum + select(above, v, ZERO), high_sum + select(far_above, v, ZERO)
            low_count += count_ones(bits_of(above))
            high_count += count_ones(bits_of(far_above))
        store(sums + lane, low_sum)
        store(sums + 1024 + lane, high_sum)
    low_total, high_total = fold_lanes(sums), fold_lanes(sums + 1024)
    return low_total, low_total / F32(max(low_count, 1)), high_total, high_total / F32(max(high_count, 1))


@compiled
def mean_above(a: int, threshold: Any, block: int, sums: int) -> Any:
    """As `means_above`, for one threshold, the mean alone."""
    count = 0
    for lane in range(0, 1024, 256):
        total = splat_f32(ZERO)
        for i in range(lane, 4 * block, 1024):
            v = magnitude_at(a + i)
            above = v > threshold
            total = total + select(above, v, ZERO)
            count += count_ones(bits_of(above))
        store(sums + lane, total)
    return fold_lanes(sums) / F32(max(count, 1))


@compiled
def best_level(a: int, total: Any, n: int, block: int, sums: int) -> Any:
    """What a nonzero trit stands for, of a block whose magnitudes have a finite sum."""
    largest = largest_bits(a, block)
    p, limit = power(254 - min(max(largest >> 23, 1), 254)), float_of(np.int32(largest))
    level = best = ZERO
    threshold = total / F32(n) * HALF
    while threshold < limit:
        above = max(threshold + threshold, TINY)
        kept, mean, kept_above, mean_of_above = means_above(a, threshold, above, block, sums)
        gain, gain_above = (kept * p) * (mean * p), (kept_above * p) * (mean_of_above * p)
        if gain > best:
            level, best = mean, gain
        if gain_above > best:
            level, best = mean_of_above, gain_above
        threshold = above + above
    for _ in range(LLOYD_STEPS):
        level = mean_above(a, level * HALF, block, sums)
    return level


@compiled
def ternary_encode(x: Source, residual: int, wire: int, span: Span, block: int, scratch: int) -> None:
    kind, source = x
    numel, first, last = span
    size, sums = 4 + block // 5, scratch + SUMS
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wire + b * size
        a = read_block(kind, source, residual, start, n, block, scratch)
        total = sum_of_magnitudes(a, block, sums)
        if not np.isfinite(total):
            store(record, NAN_BITS)
            clear(record + 4, size - 4)
            continue  # the block keeps its residual
        level = best_level(a, total, n, block, sums)
        threshold = level * HALF
        store(record, level)
        e = residual_block(residual, start, n, block, scratch)
        for j in range(0, block // 5, 64):
            chunk = (j >> 8) * 1280 + (j & 255)
            trits = splat_u8(0)
            for i in range(chunk + 1024, chunk - 1, -256):
                v = load_f32(a + 4 * i)
                some = as_f32(as_i32(v) & MAGNITUDE) > threshold
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
                packed = load_u8(record + 4 + j)
                bad = packed >= 243
                skipped += count_ones(bits_of(bad))
                rest = to_u16(select(bad, 0, packed))
                chunk = (j >> 8) * 1280 + (j & 255)
                for i in range(chunk, chunk + 1280, 256):
                    third = rest * 171 >> 9  # divided by 3
                    trit = to_u8(rest - third * 3)
                    rest = third
                    v = select(trit == 1, splat_f32(plus), select(trit == 2, splat_f32(minus), zero))
                    store(total + 4 * i, load_f32(total + 4 * i) + v)
        end_sum(kind, total, target, start, n, block, add, scale, scratch + SPARE)
    return skipped, unsound
