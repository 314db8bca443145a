"""The numba kernels of the codecs with one record a block: OneBit, QSGD, Cast and Identity.

Two kernels serve a codec, on the blocks `first` to `last` of `span` = (elements, first, last), so that threads can
share a call. *Encode* takes a = x, or x + residual unless `residual` is 0, writes the code of a, and then puts
a - decoded into the residual. *Decode* adds `alpha` times what each of `ranks` wires says, in rank order, to zero, or
to what `out` holds if `add`, multiplies by `scale`, and returns how many codes it skipped and how many records were not
finite. A block that is being worked on stays in the first-level cache. `reference.py` says what all of it means.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .blocks import (
    SPARE,
    SUMS,
    A,
    begin_sum,
    clear,
    copy,
    end_sum,
    fill_halves,
    fold_lanes,
    largest_bits,
    narrow,
    power,
    random_bits,
    read_ahead,
    read_block,
    residual_block,
    sum_of_squares,
    uniform,
    widen,
)
from .formats import F32, FLOAT32, INF_BITS, LOW, MAGNITUDE, NAN_BITS, ONE, TILE, TINY, ZERO, finite, load_as, width
from .patching import (
    Hidden,
    Shown,
    begin_showing,
    first_from,
    forget,
    mark_until,
    or_shown,
    show,
    shown_by,
    unless_marked,
)
from .simd import (
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
    mask_of,
    select,
    splat_f32,
    store,
    to_f32,
    to_i32,
    to_u8,
    to_u32,
    to_u64,
)

Source = tuple[int, int]  # kind, address
Wires = tuple[int, int, int]  # address, bytes from one rank's wire to the next, ranks
Span = tuple[int, int, int]  # elements, first block, last block
How = tuple[float, int, float]  # alpha, add, scale
Draw = tuple[int, int, int, int]  # whether to draw, seed, step, stream

# OneBit: record = negative, positive, block / 8 bytes of signs.


@compiled
def onebit_levels(
    x: int, old: int, marks: int, n: int, block: int, sided: int, signs: int, sums: int
) -> tuple[Any, Any]:
    """The two levels of a = x, or x + old unless `old` is 0, without what is marked; writes the signs."""
    ahead = 2 * block
    for lane in range(0, 256, 64):
        minus = plus = splat_f32(ZERO)
        for i in range(lane, block, 256):
            v = load_f32(x + 4 * i)
            if old:
                v = v + load_f32(old + 4 * i)
            v = unless_marked(v, marks, i)
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
def onebit_encode(
    x: Source, residual: int, wire: int, span: Span, block: int, sided: int, hidden: Hidden, scratch: int
) -> None:
    kind, source = x
    numel, first, last = span
    after = first_from(hidden, first * block)
    marks = scratch + A + 8 * block if hidden[2] else 0
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        entry = after
        if marks:
            after = mark_until(hidden, entry, start, start + block, marks)
        record = wire + b * (8 + (block >> 3))
        signs, sums = record + 8, scratch + SUMS
        if kind == FLOAT32 and n == block:
            a, old = source + 4 * start, residual + 4 * start if residual else 0
        else:
            a, old = read_block(kind, source, residual, start, n, block, scratch), 0
        negative, positive = onebit_levels(a, old, marks, n, block, sided, signs, sums)
        if not (np.isfinite(negative) and np.isfinite(positive)):
            store(record, NAN_BITS)
            store(record + 4, NAN_BITS)
            clear(signs, block >> 3)
            forget(hidden, entry, after, residual)
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
                store(e + 4 * i, unless_marked(v - decoded, marks, i))
                # A second time: a processor that is busy fetching drops what it is merely advised to fetch.
                read_ahead(source + width(kind) * (ahead + i))
                read_ahead(residual + 4 * (ahead + i))
            if n < block:
                copy(residual + 4 * start, e, 4 * n)


@compiled
def onebit_decode(
    out: Source, wires: Wires, span: Span, how: How, block: int, shown: Shown, scratch: int
) -> tuple[int, int]:
    kind, target = out
    address, pitch, ranks = wires
    numel, first, last = span
    alpha, add, scale = how
    times, factor = F32(alpha), F32(scale)
    unsound = 0
    begin_showing(shown, ranks, first * block, block)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        show(shown, ranks, start, block, alpha)
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
                v = v + or_shown(level, shown_by(shown, r, block), block, i)
            store(total + 4 * i, v * factor)
        if not direct:
            narrow(kind, total, target + start * width(kind), n, scratch + SPARE)
    return 0, unsound


# QSGD: record = unit, block / 8 · bits bytes of codes.


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
    out: Source, wires: Wires, span: Span, how: How, block: int, bits: int, shown: Shown, scratch: int
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
    begin_showing(shown, ranks, first * block, block)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        show(shown, ranks, start, block, alpha)
        total = begin_sum(kind, target, start, n, block, add, scratch)
        for r in range(ranks):
            record, marks = address + r * pitch + b * size, shown_by(shown, r, block)
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
                v = or_shown(times * (to_f32(signed) * unit), marks, block, i)
                store(total + 4 * i, load_f32(total + 4 * i) + v)
        end_sum(kind, total, target, start, n, block, add, scale, scratch + SPARE)
    return skipped, unsound


# Cast and Identity: the elements themselves, as `stored`. A tile stands in for the block.


@compiled
def cast_encode(x: Source, residual: int, wire: int, span: Span, stored: int, scratch: int) -> None:
    kind, source = x
    numel, first, last = span
    spare, decoded = scratch + SPARE, scratch + A + 8 * TILE
    for t in range(first, last):
        start = t * TILE
        n = min(TILE, numel - start)
        a = read_block(kind, source, residual, start, n, TILE, scratch)
        target = wire + start * width(stored)
        narrow(stored, a, target, n, spare)
        if stored != FLOAT32 and n & 1:
            store(target + 2 * n, np.int16(0))
        if residual:
            e = residual_block(residual, start, n, TILE, scratch)
            widen(stored, target, decoded, n, spare)
            for i in range(0, 4 * n, 256):
                v, d = load_f32(a + i), load_f32(decoded + i) + ZERO
                store(e + i, select(finite(d) & finite(v), v - d, load_f32(e + i)))
            if n < TILE:
                copy(residual + 4 * start, e, 4 * n)


@compiled
def cast_decode(out: Source, wires: Wires, span: Span, how: How, stored: int, scratch: int) -> tuple[int, int]:
    kind, target = out
    address, pitch, ranks = wires
    numel, first, last = span
    alpha, add, scale = how
    unsound, times, factor = 0, F32(alpha), F32(scale)
    values = scratch + A + 8 * TILE
    for t in range(first, last):
        start = t * TILE
        n = min(TILE, numel - start)
        source = address + start * width(stored)
        direct = kind == FLOAT32 and n == TILE
        total = target + 4 * start if direct else scratch + A
        if add and not direct:
            copy(total, target + 4 * start, 4 * n)
        whole = n & ~63
        for i in range(0, whole, 64):
            v = load_f32(total + 4 * i) if add else splat_f32(ZERO)
            for r in range(ranks):
                w = load_as(stored, source + r * pitch + i * width(stored))
                unsound += 64 - count_ones(bits_of(finite(w)))
                v = v + times * w
            store(total + 4 * i, v * factor)
        if whole < n:  # a wire may not be read beyond its end
            v = load_f32(total + 4 * whole) if add else splat_f32(ZERO)
            for r in range(ranks):
                widen(stored, source + r * pitch + whole * width(stored), values, n - whole, scratch + SPARE)
                w = load_f32(values)
                unsound += 64 - count_ones(bits_of(finite(w)))
                v = v + times * w
            store(total + 4 * whole, v * factor)
        if not direct:
            narrow(kind, total, target + start * width(kind), n, scratch + SPARE)
    return 0, unsound
