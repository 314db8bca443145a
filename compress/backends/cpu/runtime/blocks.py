"""Common steps of the numba kernels: blocks in and out of cache, statistics, Philox.

Every argument is an integer or a float: addresses come as integers, so a kernel is compiled once, for any dtype,
alignment and pitch. `kind` says how elements are stored: `FLOAT32`, `FLOAT16` or `BFLOAT16` (`dtypes`); a source may be
of other kinds too (`fused_inputs`). A kernel's memory is `scratch`, `scratch_bytes(block)` long. A tail runs through it
as a whole block, padded with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .dtypes import (
    BFLOAT16,
    F32,
    FLOAT16,
    FLOAT32,
    INF_BITS,
    LOW,
    MAGNITUDE,
    NAN,
    ZERO,
    from_bfloat,
    from_half,
    to_bfloat,
    to_half,
    width,
)
from .fused_inputs import enter
from .simd import (
    as_i32,
    compiled,
    float_of,
    fold_max,
    fold_sum,
    get_f32,
    get_u8,
    inlined,
    iota_u64x16,
    load_f32,
    load_u8,
    load_u16,
    maximum,
    prefetch,
    select,
    splat_f32,
    splat_i32,
    splat_u8,
    splat_u64x16,
    store,
    store_interleaved,
    to_f32,
    word_of,
)

Wires = tuple[int, int, int]  # address, bytes from one rank's wire to the next, ranks
Rows = tuple[int, int]  # address, bytes from one rank's to the next
Span = tuple[int, int, int]  # elements, first block or tile, last
How = tuple[float, int, float]  # alpha, add, scale

# Scratch: a vector's worth of bytes, two sets of 256 partial sums, a block of a, one of residuals, its random draws,
# its codes, and its codes packed.
SPARE, SUMS, A = 0, 512, 512 + 2048


def scratch_bytes(block: int) -> int:
    return A + block * (4 + 4 + 2 + 1 + 1) + 64


@inlined
def read_ahead(address: int) -> None:
    """Ask for 256 bytes. Prefetchers in hardware stop where a page ends, which is where a block begins."""
    for line in range(0, 256, 64):
        prefetch(address + line)


@compiled
def copy(target: int, source: int, size: int) -> None:
    whole = size & ~63
    for i in range(0, whole, 64):
        store(target + i, load_u8(source + i))
    for i in range(whole, size):
        store(target + i, get_u8(source + i))


@compiled
def clear(target: int, size: int) -> None:
    whole = size & ~63
    nothing = splat_u8(0)
    for i in range(0, whole, 64):
        store(target + i, nothing)
    for i in range(whole, size):
        store(target + i, np.uint8(0))


@compiled
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


@compiled
def widen(kind: int, source: int, target: int, n: int, spare: int) -> None:
    """n elements as float32; zeros fill what is left of the last 64."""
    whole = n & ~63
    widen_vectors(kind, source, target, whole)
    if whole < n:
        clear(spare, 256)
        copy(spare, source + whole * width(kind), (n - whole) * width(kind))
        widen_vectors(kind, spare, target + 4 * whole, 64)


@compiled
def narrow_vectors(kind: int, source: int, target: int, n: int) -> None:
    if kind == FLOAT32:
        for i in range(0, n, 64):
            v = load_f32(source + 4 * i)
            store(target + 4 * i, select((as_i32(v) & MAGNITUDE) > INF_BITS, NAN, v))
    elif kind == FLOAT16:
        for i in range(0, n, 64):
            store(target + 2 * i, to_half(load_f32(source + 4 * i)))
    else:
        for i in range(0, n, 64):
            store(target + 2 * i, to_bfloat(load_f32(source + 4 * i)))


@compiled
def narrow(kind: int, source: int, target: int, n: int, spare: int) -> None:
    """n float32 stored as `kind`; the source may be read to the end of its last 64."""
    whole = n & ~63
    narrow_vectors(kind, source, target, whole)
    if whole < n:
        narrow_vectors(kind, source + 4 * whole, spare, 64)
        copy(target + whole * width(kind), spare, (n - whole) * width(kind))


@compiled
def read_block(kind: int, x: int, residual: int, start: int, n: int, block: int, scratch: int) -> int:
    """Where a, n elements from `start` on, lies as `block` float32: in x itself if that will do, else in scratch."""
    a, source = scratch + A, x + start * width(kind)
    if kind == FLOAT32 and n == block:
        if not residual:
            return source
        old = residual + 4 * start
        for i in range(0, 4 * block, 256):
            store(a + i, load_f32(source + i) + load_f32(old + i))
        return a
    if kind > BFLOAT16:
        enter(kind, x, residual, start, n, a, scratch + SPARE)
    else:
        widen(kind, source, a, n, scratch + SPARE)
        if residual:
            old = residual + 4 * start
            for i in range(0, 4 * n, 4):
                store(a + i, get_f32(a + i) + get_f32(old + i))
    padded = min((n + 63) & ~63, block)
    clear(a + 4 * padded, 4 * (block - padded))
    return a


@compiled
def residual_block(residual: int, start: int, n: int, block: int, scratch: int) -> int:
    """Where the block's residual lies: in place, or for a tail (or none at all) a copy in scratch."""
    old = residual + 4 * start
    if residual and n == block:
        return old
    e = scratch + A + 4 * block
    if residual:
        copy(e, old, 4 * n)
    return e


@compiled
def begin_sum(kind: int, out: int, start: int, n: int, block: int, add: int, scratch: int) -> int:
    """Where the block's float32 sum lies: `out` itself, or scratch."""
    total, target = scratch + A, out + start * width(kind)
    if not add:
        clear(total, 4 * block)
    elif n == block:
        return target
    else:
        copy(total, target, 4 * n)
    return total


@compiled
def end_sum(
    kind: int, total: int, out: int, start: int, n: int, block: int, add: int, scale: float, spare: int
) -> None:
    target, factor = out + start * width(kind), F32(scale)
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


@inlined
def fold_lanes(sums: int) -> Any:
    """256 partial sums folded onto each other: halves of 128, 64, and so on."""
    low = load_f32(sums) + load_f32(sums + 512)
    high = load_f32(sums + 256) + load_f32(sums + 768)
    return fold_sum(low + high)


@compiled
def largest_bits(a: int, block: int) -> Any:
    """The largest magnitude, as an integer, so that NaN is the largest of all."""
    largest = splat_i32(0)
    for i in range(0, 4 * block, 256):
        largest = maximum(largest, as_i32(load_f32(a + i)) & MAGNITUDE)
    return np.int64(fold_max(largest))


@compiled
def all_finite(x: int, count: int) -> bool:
    """Of any number of elements."""
    wide = splat_i32(0)
    whole = count & ~63
    for i in range(0, 4 * whole, 256):
        wide = maximum(wide, as_i32(load_f32(x + i)) & MAGNITUDE)
    largest = np.int64(fold_max(wide))
    for i in range(4 * whole, 4 * count, 4):
        largest = max(largest, np.int64(word_of(get_f32(x + i)) & MAGNITUDE))
    return bool(largest < INF_BITS)


@compiled
def sum_of_squares(a: int, p: Any, block: int, sums: int) -> Any:
    """The canonical sum of (p·a)²: column by column, so that the partial sums stay in registers."""
    for lane in range(0, 1024, 256):
        total = splat_f32(ZERO)
        for i in range(lane, 4 * block, 1024):
            scaled = load_f32(a + i) * p
            total = total + scaled * scaled
        store(sums + lane, total)
    return fold_lanes(sums)


@inlined
def power(exponent: int) -> Any:
    """2^(exponent - 127) for exponents from 0 to 254."""
    return float_of(np.int32(exponent << 23 if exponent > 0 else 1 << 22))


@compiled
def random_bits(draws: int, seed: int, step: int, stream: int, group: int, n: int) -> None:
    """n draws of 16 bits from Philox4x32-10, n a multiple of 128, the first from counter `group`.

    A word sits in the low half of 64 bits, so that a multiplication gives both halves of the product at once.
    """
    for i in range(0, n, 128):
        c0, c1 = iota_u64x16(group + (i >> 3)) & LOW, splat_u64x16(stream & LOW)
        c2, c3 = splat_u64x16(step & LOW), splat_u64x16((stream >> 32) & LOW)
        k0, k1 = seed & LOW, (seed >> 32) & LOW
        for _ in range(10):
            first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0, c1 = (second >> 32) ^ c1 ^ k0, second & LOW
            c2, c3 = (first >> 32) ^ c3 ^ k1, first & LOW
            k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
        store_interleaved(draws + 2 * i, c0 | c1 << 32, c2 | c3 << 32)


@compiled
def fill_halves(draws: int, n: int) -> None:
    """What rounds to nearest: one half in place of every draw."""
    for i in range(0, 2 * n, 8):
        store(draws + i, np.int64(-0x7FFF7FFF7FFF8000))  # 0x8000 four times


@inlined
def uniform(draws: int, i: int) -> Any:
    return to_f32(load_u16(draws + 2 * i)) * F32(2.0**-16)
