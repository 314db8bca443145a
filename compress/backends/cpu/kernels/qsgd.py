"""QSGD: record = unit, block / 8 · bits bytes of codes."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...codec_types import QSGDLike
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
from ..runtime.dtypes import F32, INF_BITS, LOW, MAGNITUDE, NAN_BITS, ONE, TINY, ZERO, Source, finite, width
from ..runtime.simd import (
    as_f32,
    as_i8,
    as_i32,
    as_u32,
    as_u64x8,
    bits_of,
    compiled,
    count_ones,
    float_of,
    get_f32,
    get_i64,
    inlined,
    load_f32,
    load_u8,
    load_u32x8,
    load_u64x8,
    select,
    store,
    to_f32,
    to_i32,
    to_u8,
    to_u32,
    to_u64,
)


@inlined
def squeeze(v: Any, bits: int) -> Any:
    """8 codes, a byte each, as the low 8·bits bits of each 64-bit word."""
    v = (v & 0x00FF00FF00FF00FF) | ((v >> 8) & 0x00FF00FF00FF00FF) << bits
    v = (v & 0x0000FFFF0000FFFF) | ((v >> 16) & 0x0000FFFF0000FFFF) << 2 * bits
    return (v & LOW) | (v >> 32) << 4 * bits


@inlined
def spread(v: Any, bits: int) -> Any:
    """The inverse of `squeeze`; bits above 8·bits are dropped."""
    half = (1 << 4 * bits) - 1
    v = (v & half) | ((v >> 4 * bits) & half) << 32
    pairs = ((1 << 2 * bits) - 1) * 0x0000000100000001
    v = (v & pairs) | ((v >> 2 * bits) & pairs) << 16
    single = ((1 << bits) - 1) * 0x0001000100010001
    return (v & single) | ((v >> bits) & single) << 8


@compiled
def pack(codes: int, target: int, block: int, bits: int, packed: int) -> None:
    if bits == 4:
        for i in range(0, block, 64):
            store(target + (i >> 1), to_u32(squeeze(as_u64x8(load_u8(codes + i)), 4)))
        return
    for i in range(0, block, 64):
        store(codes + i, squeeze(as_u64x8(load_u8(codes + i)), bits))
    for word in range(block >> 3):  # a word's upper bytes are zero, and the next word covers them
        store(packed + word * bits, get_i64(codes + 8 * word))
    copy(target, packed, (block >> 3) * bits)


@compiled
def unpack(source: int, codes: int, block: int, bits: int, packed: int) -> None:
    if bits == 4:
        for i in range(0, block, 64):
            store(codes + i, spread(to_u64(load_u32x8(source + (i >> 1))), 4))
        return
    copy(packed, source, (block >> 3) * bits)  # where a word may be read past the end
    for word in range(block >> 3):
        store(codes + 8 * word, get_i64(packed + word * bits))
    for i in range(0, block, 64):
        store(codes + i, spread(load_u64x8(codes + i), bits))


@compiled
def qsgd_encode(
    x: Source, residual: int, wire: int, span: Span, block: int, bits: int, l2: int, draw: Draw, scratch: int
) -> None:
    kind, source = x
    numel, first, last = span
    stochastic, seed, step, stream = draw
    s = (1 << (bits - 1)) - 1
    draws = scratch + A + 8 * block
    codes, packed = draws + 2 * block, draws + 3 * block
    size = 4 + (block >> 3) * bits
    if not stochastic:
        fill_halves(draws, block)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wire + b * size
        a = read_block(kind, source, residual, start, n, block, scratch)
        largest = largest_bits(a, block)
        exponent = min(max(largest >> 23, 1), 254)
        p = power(254 - exponent)
        norm = float_of(np.int32(largest)) * p
        if l2:
            norm = np.sqrt(sum_of_squares(a, p, block, scratch + SUMS))
        unit = norm / F32(s) * power(exponent)
        if largest > 0 and unit == ZERO:
            unit = TINY
        if largest >= INF_BITS or not np.isfinite(unit):
            store(record, NAN_BITS)
            clear(record + 4, size - 4)
            continue  # the block keeps its residual
        store(record, unit)
        scaled_unit = unit * p  # of the unit as it is sent, which has lost bits if it is subnormal
        inverse = ONE / scaled_unit if scaled_unit > ZERO else ZERO
        if stochastic:
            random_bits(draws, seed, step, stream, start >> 3, block)
        e = residual_block(residual, start, n, block, scratch)
        ahead = start + 2 * block
        for i in range(0, block, 64):
            v = load_f32(a + 4 * i)
            y = as_f32(as_i32(v) & MAGNITUDE) * p * inverse + uniform(draws, i)
            level = to_i32(y)
            level = select(level > s, s, level)
            sign = select(level > 0, as_i32(v) & (-1 << 31), 0)
            store(codes + i, to_u8(level | to_i32(as_u32(sign) >> (32 - bits))))
            decoded = as_f32(as_i32(to_f32(level) * unit) | sign)
            # s times the unit may round beyond the largest float32.
            store(e + 4 * i, select(finite(decoded), v - decoded, load_f32(e + 4 * i)))
            read_ahead(source + width(kind) * (ahead + i))
            if residual:
                read_ahead(residual + 4 * (ahead + i))
        pack(codes, record + 4, block, bits, packed)
        if residual and n < block:
            copy(residual + 4 * start, e, 4 * n)


@compiled
def qsgd_decode(
    out: Source, wires: Wires, span: Span, how: How, block: int, bits: int, scratch: int
) -> tuple[int, int]:
    kind, target = out
    address, pitch, ranks = wires
    numel, first, last = span
    alpha, add, scale = how
    s, sign = (1 << (bits - 1)) - 1, 1 << (bits - 1)
    codes = scratch + A + 10 * block
    packed = codes + block
    size, times = 4 + (block >> 3) * bits, F32(alpha)
    skipped = unsound = 0
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        total = begin_sum(kind, target, start, n, block, add, scratch)
        for r in range(ranks):
            record = address + r * pitch + b * size
            unit = get_f32(record)
            unsound += not np.isfinite(unit)
            unpack(record + 4, codes, block, bits, packed)
            if n < block:
                clear(codes + n, block - n)  # what pads a tail is not looked at
            for i in range(0, block, 64):
                code = load_u8(codes + i)
                skipped += count_ones(bits_of(code == sign))
                level = as_i8(code & s)
                signed = select(code >= sign, 0 - level, level)
                store(total + 4 * i, load_f32(total + 4 * i) + times * (to_f32(signed) * unit))
        end_sum(kind, total, target, start, n, block, add, scale, scratch + SPARE)
    return skipped, unsound


class QSGD(Blocks):
    def encode_block(self, codec: QSGDLike, draw: Tensor | None) -> Kernel:
        return qsgd_encode, (codec.block, codec.bits, int(codec.norm == "l2"), _draw(codec, draw))

    def decode_block(self, codec: QSGDLike) -> Kernel:
        return qsgd_decode, (codec.block, codec.bits)
