"""OneBit: record = negative, positive, block / 8 bytes of signs."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...codec_types import OneBitLike
from ..block_codec import Blocks, Kernel
from ..runtime.blocks import (
    SPARE,
    SUMS,
    A,
    How,
    Span,
    Wires,
    clear,
    copy,
    fold_lanes,
    narrow,
    read_ahead,
    read_block,
    residual_block,
)
from ..runtime.dtypes import F32, FLOAT32, MAGNITUDE, NAN_BITS, ZERO, Source, width
from ..runtime.simd import (
    as_f32,
    as_i32,
    bits_of,
    compiled,
    count_ones,
    get_f32,
    get_i64,
    load_f32,
    mask_of,
    select,
    splat_f32,
    store,
)


@compiled
def onebit_levels(x: int, old: int, n: int, block: int, sided: int, signs: int, sums: int) -> tuple[Any, Any]:
    """The two levels of a = x, or x + old unless `old` is 0; writes the signs."""
    ahead = 2 * block
    for lane in range(0, 256, 64):
        minus = plus = splat_f32(ZERO)
        for i in range(lane, block, 256):
            v = load_f32(x + 4 * i)
            if old:
                v = v + load_f32(old + 4 * i)
            below = v < ZERO
            store(signs + (i >> 3), bits_of(below))
            if sided:
                minus = select(below, minus + v, minus)
                plus = select(below, plus, plus + v)
            else:
                plus = plus + as_f32(as_i32(v) & MAGNITUDE)
            read_ahead(x + 4 * (i + ahead))
            if old:
                read_ahead(old + 4 * (i + ahead))
        store(sums + 4 * lane, minus)
        store(sums + 1024 + 4 * lane, plus)
    positive = fold_lanes(sums + 1024)
    if not sided:
        positive = positive / F32(n)
        return (ZERO - positive) + ZERO, positive + ZERO  # + 0 turns -0 into 0
    count = 0
    for i in range(0, block >> 3, 8):
        count += count_ones(get_i64(signs + i))
    negative = fold_lanes(sums) / F32(max(count, 1))
    return negative + ZERO, positive / F32(max(n - count, 1)) + ZERO


@compiled
def onebit_encode(x: Source, residual: int, wire: int, span: Span, block: int, sided: int, scratch: int) -> None:
    kind, source = x
    numel, first, last = span
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wire + b * (8 + (block >> 3))
        signs, sums = record + 8, scratch + SUMS
        if kind == FLOAT32 and n == block:
            a, old = source + 4 * start, residual + 4 * start if residual else 0
        else:
            a, old = read_block(kind, source, residual, start, n, block, scratch), 0
        negative, positive = onebit_levels(a, old, n, block, sided, signs, sums)
        if not (np.isfinite(negative) and np.isfinite(positive)):
            store(record, NAN_BITS)
            store(record + 4, NAN_BITS)
            clear(signs, block >> 3)
            continue  # the block keeps its residual
        store(record, negative)
        store(record + 4, positive)
        if residual:
            # Finite levels mean that every element is finite.
            e = residual_block(residual, start, n, block, scratch)
            ahead = start + 2 * block
            for i in range(0, block, 64):
                decoded = select(mask_of(get_i64(signs + (i >> 3))), splat_f32(negative), positive)
                v = load_f32(a + 4 * i)
                if old:
                    v = v + load_f32(old + 4 * i)  # once more: less work than to have kept it
                store(e + 4 * i, v - decoded)
                # A second time: a processor that is busy fetching drops what it is merely advised to fetch.
                read_ahead(source + width(kind) * (ahead + i))
                read_ahead(residual + 4 * (ahead + i))
            if n < block:
                copy(residual + 4 * start, e, 4 * n)


@compiled
def onebit_decode(out: Source, wires: Wires, span: Span, how: How, block: int, scratch: int) -> tuple[int, int]:
    kind, target = out
    address, pitch, ranks = wires
    numel, first, last = span
    alpha, add, scale = how
    times, factor = F32(alpha), F32(scale)
    unsound = 0
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = address + b * (8 + (block >> 3))
        for r in range(ranks):
            levels = record + r * pitch
            unsound += not (np.isfinite(get_f32(levels)) and np.isfinite(get_f32(levels + 4)))
        direct = kind == FLOAT32 and n == block
        total = target + 4 * start if direct else scratch + A
        if add and not direct:
            copy(total, target + 4 * start, 4 * n)
        for i in range(0, block, 64):
            v = load_f32(total + 4 * i) if add else splat_f32(ZERO)
            for r in range(ranks):
                source = record + r * pitch
                negative, positive = times * get_f32(source), times * get_f32(source + 4)
                level = select(mask_of(get_i64(source + 8 + (i >> 3))), splat_f32(negative), positive)
                v = v + level
            store(total + 4 * i, v * factor)
        if not direct:
            narrow(kind, total, target + start * width(kind), n, scratch + SPARE)
    return 0, unsound


class OneBit(Blocks):
    def encode_block(self, codec: OneBitLike, draw: Tensor | None) -> Kernel:
        return onebit_encode, (codec.block, int(codec.scale == "sided"))

    def decode_block(self, codec: OneBitLike) -> Kernel:
        return onebit_decode, (codec.block,)
