"""Ternary: record = level, a byte for five trits."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...codec_types import TernaryLike
from ..block_codec import Kernel
from ..runtime.blocks import A, Span, clear, copy, power, read_ahead, read_block, residual_block
from ..runtime.dtypes import F32, FLOAT32, MAGNITUDE, NAN_BITS, TINY, ZERO, Source
from ..runtime.fused_inputs import gradient_at, momentum_at
from ..runtime.simd import (
    as_f32,
    as_i32,
    bits_of,
    bits_of_16,
    compiled,
    count_ones,
    float_of,
    fold_max,
    fold_sum,
    inlined,
    load_f32,
    load_f32x16,
    maximum,
    prefetch,
    select,
    splat_f32,
    splat_f32x16,
    splat_i32,
    splat_i32x16,
    store,
    to_u8,
)
from .terngrad import TernGrad

Three = tuple[Any, Any, Any]

Four = tuple[Any, Any, Any, Any]

Ahead = tuple[int, int, int]  # where elements of the next block lie, in the order in which to ask for them

HALF = F32(0.5)

#: Rounding changes sums of up to 2^22 magnitudes, and of their squares, by less.
SLACK = F32(1.0 - 2.0**-5)

#: The largest magnitude above which no square is subnormal of what is above 4 means of as many.
SQUARABLE = F32(2.0**-40)

LLOYD_STEPS = 2


@inlined
def magnitude_at(address: int) -> Any:
    return as_f32(as_i32(load_f32(address)) & MAGNITUDE)


@inlined
def add_read(x: int, old: int, a: int, i: int, total: Any, largest: Any) -> tuple[Any, Any]:
    v = load_f32(x + i)
    if old:
        v = v + load_f32(old + i)
        store(a + i, v)
    magnitude = as_i32(v) & MAGNITUDE
    return total + as_f32(magnitude), maximum(largest, magnitude)


@compiled
def read_magnitudes(x: int, old: int, a: int, block: int) -> tuple[Any, Any]:
    """The canonical sum of the magnitudes of x, or x + old unless `old` is 0; and the largest, as an integer.
    Writes to `a` what is not x itself. Row by row: what lies in memory is read in order, and the 256
    partial sums stay in registers."""
    t0 = t1 = t2 = t3 = splat_f32(ZERO)
    largest = splat_i32(0)
    for i in range(0, 4 * block, 1024):
        t0, largest = add_read(x, old, a, i, t0, largest)
        t1, largest = add_read(x, old, a, i + 256, t1, largest)
        t2, largest = add_read(x, old, a, i + 512, t2, largest)
        t3, largest = add_read(x, old, a, i + 768, t3, largest)
    return fold_sum((t0 + t2) + (t1 + t3)), np.int64(fold_max(largest))


@inlined
def add_above(v: Any, threshold: Any, total: Any, count: int) -> tuple[Any, int]:
    """Partial sums of what of 16 elements is above the threshold, and how many that are so far."""
    far = v > threshold
    return select(far, total + v, total), count + count_ones(np.int64(bits_of_16(far)))


@inlined
def add_column(address: int, thresholds: Four, totals: Three, counts: Three, squares: Any) -> tuple[Three, Three, Any]:
    v = as_f32(as_i32(load_f32x16(address)) & MAGNITUDE)
    t0, n0 = add_above(v, thresholds[0], totals[0], counts[0])
    t1, n1 = add_above(v, thresholds[1], totals[1], counts[1])
    t2, n2 = add_above(v, thresholds[2], totals[2], counts[2])
    return (t0, t1, t2), (n0, n1, n2), select(v > thresholds[3], squares + v * v, squares)


@compiled
def sums_above(a: int, thresholds: Four, block: int, sums: int, ahead: int) -> tuple[Three, Three, Any]:
    """The canonical sums of the magnitudes above each of the first three thresholds, and how many these are; and the
    sum of the squares of those above the fourth. Meanwhile it asks for as much memory from `ahead` on."""
    n, nothing = (0, 0, 0), splat_f32x16(ZERO)
    for lane in range(0, 256, 64):
        t = u = v = w = (nothing, nothing, nothing)
        even = odd = nothing
        for i in range(lane, 4 * block, 1024):
            t, n, even = add_column(a + i, thresholds, t, n, even)
            u, n, odd = add_column(a + i + 256, thresholds, u, n, odd)
            v, n, even = add_column(a + i + 512, thresholds, v, n, even)
            w, n, odd = add_column(a + i + 768, thresholds, w, n, odd)
            for line in range(0, 1024, 256):
                prefetch(ahead + i + line)
        store(sums + lane, (t[0] + v[0]) + (u[0] + w[0]))
        store(sums + 256 + lane, (t[1] + v[1]) + (u[1] + w[1]))
        store(sums + 512 + lane, (t[2] + v[2]) + (u[2] + w[2]))
        store(sums + 768 + lane, even + odd)
    totals = fold_sum(load_f32(sums)), fold_sum(load_f32(sums + 256)), fold_sum(load_f32(sums + 512))
    return totals, n, fold_sum(load_f32(sums + 768))


@inlined
def add_far(v: Any, threshold: Any, total: Any, count: int) -> tuple[Any, int]:
    far = v > threshold
    return select(far, total + v, total), count + count_ones(bits_of(far))


@compiled
def mean_above(a: int, threshold: Any, block: int, ahead: int) -> Any:
    """The mean of the magnitudes above a threshold, from their canonical sum; 0 if there are none."""
    t0 = t1 = t2 = t3 = splat_f32(ZERO)
    count = 0
    for i in range(0, 4 * block, 1024):
        t0, count = add_far(magnitude_at(a + i), threshold, t0, count)
        t1, count = add_far(magnitude_at(a + i + 256), threshold, t1, count)
        t2, count = add_far(magnitude_at(a + i + 512), threshold, t2, count)
        t3, count = add_far(magnitude_at(a + i + 768), threshold, t3, count)
        for line in range(0, 1024, 256):
            read_ahead(ahead + i + line)
    return fold_sum((t0 + t2) + (t1 + t3)) / F32(max(count, 1))


@compiled
def best_level(a: int, total: Any, largest: int, n: int, block: int, sums: int, ahead: Ahead) -> Any:
    """What a nonzero trit stands for, of a block whose magnitudes have a finite sum."""
    p, limit = power(254 - min(max(largest >> 23, 1), 254)), float_of(np.int32(largest))
    level = best = ZERO
    threshold = total / F32(n) * HALF
    while threshold < limit:
        second = max(threshold + threshold, TINY)
        third = second + second
        fourth = third + third
        totals, counts, squares = sums_above(a, (threshold, second, third, fourth), block, sums, ahead[0])
        for kept, count in zip(totals, counts):  # noqa: B905 (numba's has no `strict`)
            mean = kept / F32(max(count, 1))
            gain = (kept * p) * (mean * p)
            if gain > best:
                level, best = mean, gain
        # What lies above a later threshold lies above `fourth`, and m numbers whose squares add up to q add up to
        # sqrt(m · q) at most (Cauchy and Schwarz): no (sum)² / m is above q, but for rounding.
        if limit > SQUARABLE and (squares * p) * p < best * SLACK:
            break
        threshold = fourth
    for step in range(LLOYD_STEPS):
        level = mean_above(a, level * HALF, block, ahead[2] if step else ahead[1])
    return level


@compiled
def write_trits(a: int, e: int, level: Any, trits: int, block: int) -> None:
    """Codes a block, and puts what is left of it to `e`."""
    plus, minus = level * HALF, -(level * HALF)
    for j in range(0, block // 5, 16):  # 64 at once would take more masks than there are
        chunk = 4 * ((j >> 8) * 1280 + (j & 255))
        packed, digit = splat_i32x16(0), 1
        for i in range(chunk, chunk + 5120, 1024):
            v = load_f32x16(a + i)
            up, down = v > plus, v < minus
            store(e + i, select(down, v + level, select(up, v - level, v)))
            packed = select(up, packed + digit, packed)
            packed = select(down, packed + 2 * digit, packed)
            digit *= 3
        store(trits + j, to_u8(packed))


@compiled
def ternary_encode(x: Source, residual: int, wire: int, span: Span, block: int, scratch: int) -> None:
    kind, source = x
    numel, first, last = span
    size, sums = 4 + block // 5, scratch + A + 8 * block
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wire + b * size
        if kind == FLOAT32 and n == block:
            a, old = source + 4 * start, residual + 4 * start if residual else 0
        else:
            a, old = read_block(kind, source, residual, start, n, block, scratch), 0
        total, largest = read_magnitudes(a, old, scratch + A, block)
        if old:
            a = scratch + A
        if not np.isfinite(total):
            store(record, NAN_BITS)
            clear(record + 4, size - 4)
            continue  # the block keeps its residual
        # No farther ahead: the caches' own prefetchers are at work in between. And what is also written to goes first.
        later = start + block
        x_ahead, momentum = gradient_at(kind, source, later), momentum_at(kind, source, later)
        kept = residual + 4 * later if residual else x_ahead
        ahead = (momentum, kept, x_ahead) if momentum else (kept, x_ahead, x_ahead)
        level = best_level(a, total, largest, n, block, sums, ahead)
        store(record, level)
        e = residual_block(residual, start, n, block, scratch)
        write_trits(a, e, level, record + 4, block)
        if residual and n < block:
            copy(residual + 4 * start, e, 4 * n)


class Ternary(TernGrad):
    def encode_block(self, codec: TernaryLike, draw: Tensor | None) -> Kernel:
        return ternary_encode, (codec.block,)
