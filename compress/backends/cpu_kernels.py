"""The numba kernels of the CPU backend: what `cpu.py` calls, and what equals `reference.py` bit for bit.

Two kernels serve a codec. *Encode* takes a = x, or x + residual when there is a residual, and writes the code of a and
then a - decoded back. *Decode* adds `alpha` times what each of `ranks` wires says, in rank order, to zero or to what
`out` holds (`add`), and multiplies by `scale`. Both work on blocks `first` to `last`, so that threads can share them,
and a block on its way lives in the first-level cache.

Every argument is an integer or a float: addresses come as integers, so a kernel is compiled once, for any dtype,
alignment and pitch. `kind` says how the elements of x or out are stored: `FLOAT32`, `FLOAT16` or `BFLOAT16`. `scratch`
is `scratch_bytes(block)` of the caller's memory. A tail runs through scratch as a full block, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .simd import (
    as_f32,
    as_i8,
    as_i32,
    as_u32,
    as_u64x8,
    bits_of,
    count_ones,
    float_of,
    fold_max,
    fold_sum,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    get_u32,
    iota_u64x16,
    load_f32,
    load_u8,
    load_u16,
    load_u32x8,
    load_u64x8,
    lowest_bit,
    mask_of,
    maximum,
    select,
    splat_f32,
    splat_i32,
    splat_u8,
    splat_u64x16,
    store,
    store_interleaved,
    to_f32,
    to_i32,
    to_u8,
    to_u16,
    to_u32,
    to_u64,
)

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2
#: Elements that the sparse and the cast kernels take at once, in place of a block.
TILE = 4096

_F = np.float32
_ZERO, _ONE = _F(0), _F(1)
_INF = _F(np.inf)
_TINY = _F(2.0**-149)
_NAN_BITS = np.int32(0x7FC00000)
_NAN = _NAN_BITS.view(_F)
_INF_BITS = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_LOW = 0xFFFFFFFF

# Scratch: a vector's worth of bytes, two sets of 256 partial sums, a block of a, one of residuals, its random draws,
# its codes, and its codes packed.
_SPARE, _SUMS, _A = 0, 512, 512 + 2048


def scratch_bytes(block: int) -> int:
    return _A + block * (4 + 4 + 2 + 1 + 1) + 64


def _jit(function: Callable) -> Any:
    return _compiled(function)


def _inline(function: Callable) -> Any:
    return _compiled(function, forceinline=True)


def _compiled(function: Callable, **options: Any) -> Any:
    try:
        return njit(nogil=True, cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # nowhere to keep a cache: neither beside this file nor in the home directory
        return njit(nogil=True, error_model="numpy", **options)(function)


# Numbers.


@_inline
def width(kind: int) -> int:
    """Bytes an element."""
    return 4 if kind == FLOAT32 else 2


@_inline
def from_half(word: Any) -> Any:
    """float16 as float32, exactly, without arithmetic on subnormals, which some machines do slowly."""
    w = to_i32(word)
    magnitude = (w & 0x7FFF) << 13
    exponent = magnitude & 0x0F800000
    subnormal = as_f32(magnitude + (113 << 23)) - _F(2.0**-14)
    value = select(exponent == 0, subnormal, as_f32(magnitude + (112 << 23)))
    value = select(exponent == 0x0F800000, as_f32(magnitude | _INF_BITS), value)
    return as_f32(as_i32(value) | (w & 0x8000) << 16)


@_inline
def to_half(value: Any) -> Any:
    """float32 as float16, to nearest even, NaN as 0x7E00."""
    word = as_i32(value)
    magnitude = word & _MAGNITUDE
    normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    subnormal = as_i32(as_f32(magnitude) + _F(0.5)) - 0x3F000000  # one half has its last place at 2^-24
    half = select(magnitude < (113 << 23), subnormal, normal)
    half = select(magnitude >= (143 << 23), 0x7C00, half) | ((word >> 16) & 0x8000)
    return to_u16(select(magnitude > _INF_BITS, 0x7E00, half))


@_inline
def from_bfloat(word: Any) -> Any:
    return as_f32(to_i32(word) << 16)


@_inline
def to_bfloat(value: Any) -> Any:
    """float32 as bfloat16, to nearest even, NaN as 0x7FC0."""
    word = as_i32(value)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return to_u16(select((word & _MAGNITUDE) > _INF_BITS, 0x7FC0, rounded))


@_inline
def finite(value: Any) -> Any:
    return (as_i32(value) & _MAGNITUDE) < _INF_BITS


# Blocks in and out.


@_jit
def copy(target: int, source: int, size: int) -> None:
    whole = size & ~63
    for i in range(0, whole, 64):
        store(target + i, load_u8(source + i))
    for i in range(whole, size):
        store(target + i, get_u8(source + i))


@_jit
def clear(target: int, size: int) -> None:
    whole = size & ~63
    nothing = splat_u8(0)
    for i in range(0, whole, 64):
        store(target + i, nothing)
    for i in range(whole, size):
        store(target + i, np.uint8(0))


@_jit
def widen_vectors(kind: int, source: int, target: int, n: int) -> None:
    if kind == FLOAT32:
        for i in range(0, n, 64):
            store(target + 4 * i, load_f32(source + 4 * i))
    elif kind == FLOAT16:
        for i in range(0, n, 64):
            store(target + 4 * i, from_half(load_u16(source + 2 * i)))
    else:
        for i in range(0, n, 64):
            store(target + 4 * i, from_bfloat(load_u16(source + 2 * i)))


@_jit
def widen(kind: int, source: int, target: int, n: int, spare: int) -> None:
    """n elements as float32; zeros fill what is left of the last 64."""
    whole = n & ~63
    widen_vectors(kind, source, target, whole)
    if whole < n:
        clear(spare, 256)
        copy(spare, source + whole * width(kind), (n - whole) * width(kind))
        widen_vectors(kind, spare, target + 4 * whole, 64)


@_jit
def narrow_vectors(kind: int, source: int, target: int, n: int) -> None:
    if kind == FLOAT32:
        for i in range(0, n, 64):
            v = load_f32(source + 4 * i)
            store(target + 4 * i, select((as_i32(v) & _MAGNITUDE) > _INF_BITS, _NAN, v))
    elif kind == FLOAT16:
        for i in range(0, n, 64):
            store(target + 2 * i, to_half(load_f32(source + 4 * i)))
    else:
        for i in range(0, n, 64):
            store(target + 2 * i, to_bfloat(load_f32(source + 4 * i)))


@_jit
def narrow(kind: int, source: int, target: int, n: int, spare: int) -> None:
    """n float32 stored as `kind`; the source may be read to the end of its last 64."""
    whole = n & ~63
    narrow_vectors(kind, source, target, whole)
    if whole < n:
        narrow_vectors(kind, source + 4 * whole, spare, 64)
        copy(target + whole * width(kind), spare, (n - whole) * width(kind))


@_jit
def read_block(kind: int, x: int, residual: int, start: int, n: int, block: int, scratch: int) -> int:
    """Where a, n elements from `start` on, lies as `block` float32: in x itself if that will do, else in scratch."""
    a, source = scratch + _A, x + start * width(kind)
    if kind == FLOAT32 and n == block:
        if not residual:
            return source
        old = residual + 4 * start
        for i in range(0, 4 * block, 256):
            store(a + i, load_f32(source + i) + load_f32(old + i))
        return a
    widen(kind, source, a, n, scratch + _SPARE)
    if residual:
        old = residual + 4 * start
        for i in range(0, 4 * n, 4):
            store(a + i, get_f32(a + i) + get_f32(old + i))
    padded = min((n + 63) & ~63, block)
    clear(a + 4 * padded, 4 * (block - padded))
    return a


@_jit
def residual_block(residual: int, start: int, n: int, block: int, scratch: int) -> int:
    """Where the block's residual lies: in place, or for a tail (or none at all) a copy in scratch."""
    old = residual + 4 * start
    if residual and n == block:
        return old
    e = scratch + _A + 4 * block
    if residual:
        copy(e, old, 4 * n)
    return e


@_jit
def begin_sum(kind: int, out: int, start: int, n: int, block: int, add: int, scratch: int) -> int:
    """Where the block's float32 sum lies: `out` itself, or scratch."""
    total, target = scratch + _A, out + start * width(kind)
    if not add:
        clear(total, 4 * block)
    elif n == block:
        return target
    else:
        copy(total, target, 4 * n)
    return total


@_jit
def end_sum(
    kind: int, total: int, out: int, start: int, n: int, block: int, add: int, scale: float, spare: int
) -> None:
    target, factor = out + start * width(kind), _F(scale)
    if add:
        if n < block:
            copy(target, total, 4 * n)
    elif kind == FLOAT32 and n == block:
        for i in range(0, 4 * block, 256):
            store(target + i, load_f32(total + i) * factor)
    else:
        for i in range(0, 4 * block, 256):
            store(total + i, load_f32(total + i) * factor)
        narrow(kind, total, target, n, spare)


# Statistics of a block.


@_inline
def fold_lanes(sums: int) -> Any:
    """256 partial sums folded onto each other: halves of 128, 64, and so on."""
    low = load_f32(sums) + load_f32(sums + 512)
    high = load_f32(sums + 256) + load_f32(sums + 768)
    return fold_sum(low + high)


@_jit
def largest_bits(a: int, block: int) -> int:
    """The largest magnitude, as an integer, so that NaN is the largest of all."""
    largest = splat_i32(0)
    for i in range(0, 4 * block, 256):
        largest = maximum(largest, as_i32(load_f32(a + i)) & _MAGNITUDE)
    return np.int64(fold_max(largest))


@_jit
def sum_of_squares(a: int, p: Any, block: int, sums: int) -> Any:
    """The canonical sum of (p·a)²: column by column, so that the partial sums stay in registers."""
    for lane in range(0, 1024, 256):
        total = splat_f32(_ZERO)
        for i in range(lane, 4 * block, 1024):
            scaled = load_f32(a + i) * p
            total = total + scaled * scaled
        store(sums + lane, total)
    return fold_lanes(sums)


@_inline
def power(exponent: int) -> Any:
    """2^(exponent - 127) for exponents from 0 to 254."""
    return float_of(np.int32(exponent << 23 if exponent > 0 else 1 << 22))


@_jit
def random_bits(draws: int, seed: int, step: int, stream: int, group: int, n: int) -> None:
    """n draws of 16 bits from Philox4x32-10, n a multiple of 128, the first from counter `group`.

    A word sits in the low half of 64 bits, so that a multiplication gives both halves of the product at once.
    """
    for i in range(0, n, 128):
        c0, c1 = iota_u64x16(group + (i >> 3)) & _LOW, splat_u64x16(stream & _LOW)
        c2, c3 = splat_u64x16(step & _LOW), splat_u64x16((stream >> 32) & _LOW)
        k0, k1 = seed & _LOW, (seed >> 32) & _LOW
        for _ in range(10):
            first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0, c1 = (second >> 32) ^ c1 ^ k0, second & _LOW
            c2, c3 = (first >> 32) ^ c3 ^ k1, first & _LOW
            k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
        store_interleaved(draws + 2 * i, c0 | c1 << 32, c2 | c3 << 32)


@_jit
def fill_halves(draws: int, n: int) -> None:
    """What rounds to nearest: one half in place of every draw."""
    for i in range(0, 2 * n, 8):
        store(draws + i, np.int64(-0x7FFF7FFF7FFF8000))  # 0x8000 four times


@_inline
def uniform(draws: int, i: int) -> Any:
    return to_f32(load_u16(draws + 2 * i)) * _F(2.0**-16)


# OneBit: record = negative, positive, block / 8 bytes of signs.


@_jit
def sided_levels(a: int, n: int, block: int, signs: int, sums: int) -> tuple[Any, Any]:
    for lane in range(0, 256, 64):
        minus = plus = splat_f32(_ZERO)
        for i in range(lane, block, 256):
            v = load_f32(a + 4 * i)
            below = v < _ZERO
            store(signs + (i >> 3), bits_of(below))
            minus = minus + select(below, v, _ZERO)
            plus = plus + select(below, _ZERO, v)
        store(sums + 4 * lane, minus)
        store(sums + 1024 + 4 * lane, plus)
    count = 0
    for i in range(0, block >> 3, 8):
        count += count_ones(get_i64(signs + i))
    negative = fold_lanes(sums) / _F(max(count, 1))
    positive = fold_lanes(sums + 1024) / _F(max(n - count, 1))
    return negative + _ZERO, positive + _ZERO  # + 0 turns -0 into 0


@_jit
def symmetric_levels(a: int, n: int, block: int, signs: int, sums: int) -> tuple[Any, Any]:
    for lane in range(0, 256, 64):
        total = splat_f32(_ZERO)
        for i in range(lane, block, 256):
            v = load_f32(a + 4 * i)
            store(signs + (i >> 3), bits_of(v < _ZERO))
            total = total + as_f32(as_i32(v) & _MAGNITUDE)
        store(sums + 4 * lane, total)
    positive = fold_lanes(sums) / _F(n)
    return (_ZERO - positive) + _ZERO, positive + _ZERO


@_jit
def onebit_encode(
    kind: int, x: int, residual: int, wire: int, numel: int, first: int, last: int, block: int, sided: int, scratch: int
) -> None:
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wire + b * (8 + (block >> 3))
        signs, sums = record + 8, scratch + _SUMS
        a = read_block(kind, x, residual, start, n, block, scratch)
        if sided:
            negative, positive = sided_levels(a, n, block, signs, sums)
        else:
            negative, positive = symmetric_levels(a, n, block, signs, sums)
        if not (np.isfinite(negative) and np.isfinite(positive)):
            store(record, _NAN_BITS)
            store(record + 4, _NAN_BITS)
            clear(signs, block >> 3)
            continue  # the block keeps its residual
        store(record, negative)
        store(record + 4, positive)
        if residual:
            # Finite levels mean that every element is finite.
            e = residual_block(residual, start, n, block, scratch)
            for i in range(0, block, 64):
                decoded = select(mask_of(get_i64(signs + (i >> 3))), splat_f32(negative), positive)
                store(e + 4 * i, load_f32(a + 4 * i) - decoded)
            if n < block:
                copy(residual + 4 * start, e, 4 * n)


@_jit
def onebit_decode(
    kind: int,
    out: int,
    wires: int,
    pitch: int,
    ranks: int,
    numel: int,
    first: int,
    last: int,
    block: int,
    alpha: float,
    add: int,
    scale: float,
    scratch: int,
) -> tuple[int, int]:
    unsound = 0
    size = 8 + (block >> 3)
    factor, times = _F(scale), _F(alpha)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wires + b * size
        for r in range(ranks):
            levels = record + r * pitch
            unsound += not (np.isfinite(get_f32(levels)) and np.isfinite(get_f32(levels + 4)))
        direct = kind == FLOAT32 and n == block
        total = out + 4 * start if direct else scratch + _A
        if add and not direct:
            copy(total, out + 4 * start, 4 * n)
        for i in range(0, block, 64):
            v = load_f32(total + 4 * i) if add else splat_f32(_ZERO)
            for r in range(ranks):
                source = record + r * pitch
                negative, positive = times * get_f32(source), times * get_f32(source + 4)
                v = v + select(mask_of(get_i64(source + 8 + (i >> 3))), splat_f32(negative), positive)
            store(total + 4 * i, v * factor)
        if not direct:
            narrow(kind, total, out + start * width(kind), n, scratch + _SPARE)
    return 0, unsound


# QSGD: record = unit, block / 8 · bits bytes of codes.


@_inline
def squeeze(v: Any, bits: int) -> Any:
    """8 codes, a byte each, as the low 8·bits bits of each 64-bit word."""
    v = (v & 0x00FF00FF00FF00FF) | ((v >> 8) & 0x00FF00FF00FF00FF) << bits
    v = (v & 0x0000FFFF0000FFFF) | ((v >> 16) & 0x0000FFFF0000FFFF) << 2 * bits
    return (v & _LOW) | (v >> 32) << 4 * bits


@_inline
def spread(v: Any, bits: int) -> Any:
    """The inverse of `squeeze`; bits above 8·bits are dropped."""
    v = (v & ((1 << 4 * bits) - 1)) | ((v >> 4 * bits) & ((1 << 4 * bits) - 1)) << 32
    pairs = ((1 << 2 * bits) - 1) * 0x0000000100000001
    v = (v & pairs) | ((v >> 2 * bits) & pairs) << 16
    single = ((1 << bits) - 1) * 0x0001000100010001
    return (v & single) | ((v >> bits) & single) << 8


@_jit
def pack(codes: int, target: int, block: int, bits: int, packed: int) -> None:
    if bits == 4:
        for i in range(0, block, 64):
            store(target + (i >> 1), to_u32(squeeze(as_u64x8(load_u8(codes + i)), bits)))
        return
    for i in range(0, block, 64):
        store(codes + i, squeeze(as_u64x8(load_u8(codes + i)), bits))
    for word in range(block >> 3):  # a word's upper bytes are zero and the next word covers them
        store(packed + word * bits, get_i64(codes + 8 * word))
    copy(target, packed, (block >> 3) * bits)


@_jit
def unpack(source: int, codes: int, block: int, bits: int, packed: int) -> None:
    if bits == 4:
        for i in range(0, block, 64):
            store(codes + i, spread(to_u64(load_u32x8(source + (i >> 1))), bits))
        return
    copy(packed, source, (block >> 3) * bits)  # where reading a word past the end is allowed
    for word in range(block >> 3):
        store(codes + 8 * word, get_i64(packed + word * bits))
    for i in range(0, block, 64):
        store(codes + i, spread(load_u64x8(codes + i), bits))


@_jit
def qsgd_encode(
    kind: int,
    x: int,
    residual: int,
    wire: int,
    numel: int,
    first: int,
    last: int,
    block: int,
    bits: int,
    l2: int,
    stochastic: int,
    seed: int,
    step: int,
    stream: int,
    scratch: int,
) -> None:
    s = (1 << (bits - 1)) - 1
    draws = scratch + _A + 8 * block
    codes, packed = draws + 2 * block, draws + 3 * block
    size = 4 + (block >> 3) * bits
    if not stochastic:
        fill_halves(draws, block)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wire + b * size
        a = read_block(kind, x, residual, start, n, block, scratch)
        largest = largest_bits(a, block)
        exponent = min(max(largest >> 23, 1), 254)
        p = power(254 - exponent)
        norm = float_of(np.int32(largest)) * p
        if l2:
            norm = np.sqrt(sum_of_squares(a, p, block, scratch + _SUMS))
        scaled_unit = norm / _F(s)
        unit = scaled_unit * power(exponent)
        if largest > 0 and unit == _ZERO:
            unit = _TINY
        if largest >= _INF_BITS or not np.isfinite(unit):
            store(record, _NAN_BITS)
            clear(record + 4, size - 4)
            continue  # the block keeps its residual
        store(record, unit)
        inverse = _ONE / scaled_unit if scaled_unit > _ZERO else _ZERO
        if stochastic:
            random_bits(draws, seed, step, stream, start >> 3, block)
        e = residual_block(residual, start, n, block, scratch)
        for i in range(0, block, 64):
            v = load_f32(a + 4 * i)
            magnitude = as_f32(as_i32(v) & _MAGNITUDE)
            y = magnitude * p * inverse + uniform(draws, i)
            level = to_i32(y)
            level = select(level > s, s, level)
            some = level > 0
            sign = select(some, as_i32(v) & (-1 << 31), 0)
            store(codes + i, to_u8(level | to_i32(as_u32(sign) >> (32 - bits))))
            decoded = as_f32(as_i32(to_f32(level) * unit) | sign)
            # s times the unit may round beyond the largest float32.
            store(e + 4 * i, select(finite(decoded), v - decoded, load_f32(e + 4 * i)))
        pack(codes, record + 4, block, bits, packed)
        if residual and n < block:
            copy(residual + 4 * start, e, 4 * n)


@_jit
def qsgd_decode(
    kind: int,
    out: int,
    wires: int,
    pitch: int,
    ranks: int,
    numel: int,
    first: int,
    last: int,
    block: int,
    bits: int,
    alpha: float,
    add: int,
    scale: float,
    scratch: int,
) -> tuple[int, int]:
    skipped = unsound = 0
    s, sign = (1 << (bits - 1)) - 1, 1 << (bits - 1)
    codes = scratch + _A + 10 * block
    packed = codes + block
    size, times = 4 + (block >> 3) * bits, _F(alpha)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        total = begin_sum(kind, out, start, n, block, add, scratch)
        for r in range(ranks):
            record = wires + r * pitch + b * size
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
                v = times * (to_f32(signed) * unit)
                store(total + 4 * i, load_f32(total + 4 * i) + v)
        end_sum(kind, total, out, start, n, block, add, scale, scratch + _SPARE)
    return skipped, unsound


# TernGrad: record = scale, block / 5 bytes of trits.


@_jit
def terngrad_encode(
    kind: int,
    x: int,
    residual: int,
    wire: int,
    numel: int,
    first: int,
    last: int,
    block: int,
    clip: float,
    stochastic: int,
    seed: int,
    step: int,
    stream: int,
    scratch: int,
) -> None:
    draws = scratch + _A + 8 * block
    size = 4 + block // 5
    if not stochastic:
        fill_halves(draws, block)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        record = wire + b * size
        a = read_block(kind, x, residual, start, n, block, scratch)
        largest = largest_bits(a, block)
        if largest >= _INF_BITS:
            store(record, _NAN_BITS)
            clear(record + 4, size - 4)
            continue  # the block keeps its residual
        exponent = min(max(largest >> 23, 1), 254)
        p = power(254 - exponent)
        sigma = np.sqrt(sum_of_squares(a, p, block, scratch + _SUMS) / _F(n))
        scaled = float_of(np.int32(largest)) * p
        clipped = _F(clip) * sigma
        if clipped < scaled:  # not so when it is infinity times zero
            scaled = clipped
        level = scaled * power(exponent)
        if largest > 0 and level == _ZERO:
            level = _TINY
        store(record, level)
        inverse = _ONE / scaled if scaled > _ZERO else _ZERO
        if stochastic:
            random_bits(draws, seed, step, stream, start >> 3, block)
        e = residual_block(residual, start, n, block, scratch)
        for j in range(0, block // 5, 64):
            # Plane by plane, a byte's five digits lie 256 elements apart: packing never crosses lanes.
            chunk = (j >> 8) * 1280 + (j & 255)
            trits = splat_u8(0)
            for i in range(chunk + 1024, chunk - 1, -256):
                v = load_f32(a + 4 * i)
                some = as_f32(as_i32(v) & _MAGNITUDE) * p * inverse + uniform(draws, i) >= _ONE
                minus = some & (v < _ZERO)
                trits = trits + trits + trits + to_u8(some) + to_u8(minus)
                decoded = select(minus, splat_f32(-level), select(some, splat_f32(level), _ZERO))
                store(e + 4 * i, v - decoded)
            store(record + 4 + j, trits)
        if residual and n < block:
            copy(residual + 4 * start, e, 4 * n)


@_jit
def terngrad_decode(
    kind: int,
    out: int,
    wires: int,
    pitch: int,
    ranks: int,
    numel: int,
    first: int,
    last: int,
    block: int,
    alpha: float,
    add: int,
    scale: float,
    scratch: int,
) -> tuple[int, int]:
    skipped = unsound = 0
    size, times = 4 + block // 5, _F(alpha)
    for b in range(first, last):
        start = b * block
        n = min(block, numel - start)
        total = begin_sum(kind, out, start, n, block, add, scratch)
        for r in range(ranks):
            record = wires + r * pitch + b * size
            level = get_f32(record)
            unsound += not np.isfinite(level)
            plus, minus, zero = times * level, times * -level, times * (_ZERO * level)
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
        end_sum(kind, total, out, start, n, block, add, scale, scratch + _SPARE)
    return skipped, unsound


# Cast and Identity: the elements themselves, as `stored`.


@_jit
def cast_encode(
    kind: int, x: int, residual: int, wire: int, numel: int, first: int, last: int, stored: int, scratch: int
) -> None:
    spare = scratch + _SPARE
    decoded = scratch + _A + 8 * TILE
    for t in range(first, last):
        start = t * TILE
        n = min(TILE, numel - start)
        a = read_block(kind, x, residual, start, n, TILE, scratch)
        target = wire + start * width(stored)
        narrow(stored, a, target, n, spare)
        if stored != FLOAT32 and n & 1:
            store(target + 2 * n, np.int16(0))
        if residual:
            e = residual_block(residual, start, n, TILE, scratch)
            widen(stored, target, decoded, n, spare)
            for i in range(0, 4 * n, 256):
                v, d = load_f32(a + i), load_f32(decoded + i) + _ZERO
                store(e + i, select(finite(d) & finite(v), v - d, load_f32(e + i)))
            if n < TILE:
                copy(residual + 4 * start, e, 4 * n)


@_jit
def cast_decode(
    kind: int,
    out: int,
    wires: int,
    pitch: int,
    ranks: int,
    numel: int,
    first: int,
    last: int,
    stored: int,
    alpha: float,
    add: int,
    scale: float,
    scratch: int,
) -> tuple[int, int]:
    unsound, times = 0, _F(alpha)
    values = scratch + _A + 8 * TILE
    for t in range(first, last):
        start = t * TILE
        n = min(TILE, numel - start)
        total = begin_sum(kind, out, start, n, TILE, add, scratch)
        for r in range(ranks):
            widen(stored, wires + r * pitch + start * width(stored), values, n, scratch + _SPARE)
            for i in range(0, 4 * n, 256):
                v = load_f32(values + i)
                unsound += 64 - count_ones(bits_of(finite(v)))
                store(total + i, load_f32(total + i) + times * v)
        end_sum(kind, total, out, start, n, TILE, add, scale, scratch + _SPARE)
    return 0, unsound


# TopK: count and k indices, k values. Candidates, `index` and `value`, are kept in ascending order of index.


@_jit
def topk_collect(
    kind: int,
    x: int,
    residual: int,
    numel: int,
    k: int,
    threshold: int,
    index: int,
    value: int,
    capacity: int,
    histogram: int,
    scratch: int,
) -> tuple[int, int]:
    """One pass: every element with a magnitude of `threshold` (as an integer) or more becomes a candidate, and the
    residual becomes a where that is finite. Returns the number of candidates, and the threshold at the end.

    When the candidates no longer fit, all but the k largest go, and what is not above them is no longer collected:
    among equals the earlier stay. So the k largest are always found, if there are k at or above the first threshold.
    """
    count = 0
    for start in range(0, numel, TILE):
        n = min(TILE, numel - start)
        if count + TILE > capacity:
            key, ties = kth_largest(value, count, k, histogram)
            count = topk_keep(index, value, count, key, ties)
            threshold = key + 1
        a = read_block(kind, x, residual, start, n, TILE, scratch)
        if residual:
            e = residual_block(residual, start, n, TILE, scratch)
            for i in range(0, 4 * n, 256):
                v = load_f32(a + i)
                store(e + i, select(finite(v), v, load_f32(e + i)))
            if n < TILE:
                copy(residual + 4 * start, e, 4 * n)
        for i in range(0, n, 64):
            bits = bits_of((as_i32(load_f32(a + 4 * i)) & _MAGNITUDE) >= threshold)
            while bits:
                j = i + lowest_bit(bits)
                store(index + 4 * count, np.int32(start + j))
                word = get_i32(a + 4 * j)
                store(value + 4 * count, _NAN_BITS if word & _MAGNITUDE > _INF_BITS else word)
                count += 1
                bits &= bits - 1
    return count, threshold


@_inline
def key_at(value: int, i: int) -> int:
    return np.int64(get_i32(value + 4 * i)) & _MAGNITUDE


@_jit
def count_digit(value: int, count: int, prefix: int, shift: int, width: int, histogram: int) -> None:
    """How often each value of a key's digit occurs, among the keys that begin with `prefix`."""
    clear(histogram, 4 << width)
    digit = (1 << width) - 1
    for i in range(count):
        key = key_at(value, i)
        if key >> (shift + width) == prefix:
            slot = histogram + 4 * ((key >> shift) & digit)
            store(slot, np.int32(get_i32(slot) + 1))


@_jit
def kth_largest(value: int, count: int, k: int, histogram: int) -> tuple[int, int]:
    """The k-th largest of `count` ≥ k keys, digit by digit, and how many of those equal to it are among the k."""
    key, left = 0, k
    for digit in range(3):
        width = 11 if digit == 0 else 10
        shift = 20 - 10 * digit
        count_digit(value, count, key, shift, width, histogram)
        d = (1 << width) - 1
        while True:
            here = np.int64(get_i32(histogram + 4 * d))
            if here >= left or d == 0:
                break
            left -= here
            d -= 1
        key = key << width | d
    return key, left


@_jit
def topk_keep(index: int, value: int, count: int, key: int, ties: int) -> int:
    """Drop the candidates below `key`, and all but the first `ties` that are equal to it."""
    kept = 0
    for i in range(count):
        this = key_at(value, i)
        equal = this == key
        keep = this > key or (equal and ties > 0)
        ties -= equal
        store(index + 4 * kept, get_i32(index + 4 * i))
        store(value + 4 * kept, get_i32(value + 4 * i))
        kept += keep
    return kept


@_jit
def topk_encode(
    kind: int,
    x: int,
    residual: int,
    wire: int,
    numel: int,
    k: int,
    threshold: int,
    index: int,
    value: int,
    capacity: int,
    histogram: int,
    scratch: int,
) -> tuple[int, int]:
    """Returns how many candidates there were, and the k-th largest key, 0 if there are fewer."""
    indices, values = wire + 4, wire + 4 + 4 * k
    count, _ = topk_collect(kind, x, residual, numel, k, threshold, index, value, capacity, histogram, scratch)
    if count < k and threshold > 1:
        # The prediction was too high: once more, for everything. The residual holds a now, except where a is not
        # finite. Such an a is among the few candidates: it is put in its place, and the old residual back afterwards.
        # The wire has room to remember them.
        parked = 0
        if residual:
            for i in range(count):
                if key_at(value, i) >= _INF_BITS:
                    place = residual + 4 * np.int64(get_u32(index + 4 * i))
                    store(indices + 4 * parked, get_u32(index + 4 * i))
                    store(values + 4 * parked, get_i32(place))
                    store(place, get_i32(value + 4 * i))
                    parked += 1
            kind, x = FLOAT32, residual
        count, _ = topk_collect(kind, x, 0, numel, k, 1, index, value, capacity, histogram, scratch)
        for i in range(parked):
            store(residual + 4 * np.int64(get_u32(indices + 4 * i)), get_i32(values + 4 * i))
    found, key = count, 0
    if count >= k:
        key, ties = kth_largest(value, count, k, histogram)
        count = topk_keep(index, value, count, key, ties)
    store(wire, np.int32(count))
    copy(indices, index, 4 * count)
    clear(indices + 4 * count, 4 * (k - count))
    clear(values + 4 * count, 4 * (k - count))
    copy(values, value, 4 * count)
    for i in range(count if residual else 0):
        if key_at(value, i) < _INF_BITS:
            store(residual + 4 * np.int64(get_u32(index + 4 * i)), np.int32(0))
    return found, key


@_jit
def topk_add(indices: int, values: int, out: int, numel: int, k: int, alpha: float) -> tuple[int, int]:
    """An entry counts if its index is in range and above every index in range before it."""
    claimed = np.int64(get_u32(indices))
    count, before, unsound, times = min(claimed, k), -1, 0, _F(alpha)
    skipped = claimed - count
    for i in range(count):
        at = np.int64(get_u32(indices + 4 + 4 * i))
        if before < at < numel:
            v = get_f32(values + 4 * i)
            unsound += not np.isfinite(v)
            store(out + 4 * at, get_f32(out + 4 * at) + times * v)
            before = at
        else:
            skipped += 1
    return skipped, unsound


@_jit
def topk_mean(
    kind: int,
    out: int,
    indices: int,
    index_pitch: int,
    values: int,
    value_pitch: int,
    ranks: int,
    numel: int,
    first: int,
    last: int,
    k: int,
    scale: float,
    cursors: int,
    scratch: int,
) -> tuple[int, int]:
    """Tile by tile, so that sums stay in cache. `cursors` holds, for each rank, the next entry and the largest index
    so far. A piece that does not start at the beginning reads what lies before it, and leaves counting it to others.
    """
    skipped = unsound = 0
    clear(cursors, 16 * ranks)
    for r in range(ranks):
        store(cursors + 16 * r + 8, np.int64(-1))
        if first == 0:
            skipped += max(np.int64(get_u32(indices + r * index_pitch)) - k, 0)
    for t in range(first, last):
        start = t * TILE
        n = min(TILE, numel - start)
        total = scratch + _A
        clear(total, 4 * TILE)
        for r in range(ranks):
            row, numbers = indices + r * index_pitch, values + r * value_pitch
            count = min(np.int64(get_u32(row)), k)
            i, before = get_i64(cursors + 16 * r), get_i64(cursors + 16 * r + 8)
            while i < count:
                at = np.int64(get_u32(row + 4 + 4 * i))
                if before < at < numel:
                    if at >= start + n:
                        break
                    before = at
                    if at >= start:
                        v = get_f32(numbers + 4 * i)
                        unsound += not np.isfinite(v)
                        place = total + 4 * (at - start)
                        store(place, get_f32(place) + v)
                elif before >= start or t == 0:
                    skipped += 1
                i += 1
            store(cursors + 16 * r, i)
            store(cursors + 16 * r + 8, before)
        end_sum(kind, total, out, start, n, TILE, 0, scale, scratch + _SPARE)
    return skipped, unsound
