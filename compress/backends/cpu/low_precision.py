"""Vectors kept in fewer bytes than float32, on the CPU: `backends.low_precision` has their meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import low_precision
from ..low_precision import LowPrecisionKernels
from ..memory import address
from .runtime.blocks import clear, copy, widen
from .runtime.dtypes import BFLOAT16, F32, INF_BITS, MAGNITUDE, TILE, ZERO, to_bfloat
from .runtime.simd import (
    as_f32,
    as_i32,
    compiled,
    float_of,
    fold_max,
    get_f32,
    inlined,
    load_f32,
    load_u8,
    maximum,
    select,
    splat_i32,
    store,
    to_f32,
    to_i32,
    to_u8,
    word_of,
)
from .runtime.threads import pieces_of, run

BLOCK, MOST_BITS, STEP_BITS = low_precision.BLOCK, low_precision.MOST_BITS, low_precision.STEP_BITS

SHARE, LEAST = F32(low_precision.SHARE), F32(low_precision.LEAST_STEP)

#: Added to a number, it leaves the nearest whole one in the lowest bits.
WHOLE = F32(1.5 * 2.0**23)

#: Bytes of a block as float32, and of its codes.
SPARE = 4 * BLOCK + BLOCK

Span = tuple[int, int]  # first and last element; the first begins a block


@inlined
def _sound(value: Any) -> Any:
    """What is not finite as zero, and nothing beyond the largest bfloat16."""
    word = as_i32(value)
    magnitude = word & MAGNITUDE
    kept = select(magnitude > MOST_BITS, MOST_BITS, magnitude)
    return select(magnitude < INF_BITS, as_f32(kept | ((word >> 31) << 31)), ZERO)


@compiled
def _bfloat_block(source: int, words: int) -> None:
    for i in range(0, BLOCK, 64):
        store(words + 2 * i, to_bfloat(_sound(load_f32(source + 4 * i))))


@compiled
def _int8_block(source: int, codes: int, step: int) -> None:
    largest = splat_i32(0)
    for i in range(0, 4 * BLOCK, 256):
        largest = maximum(largest, as_i32(_sound(load_f32(source + i))) & MAGNITUDE)
    up = np.int64(word_of(float_of(np.int32(fold_max(largest))) * SHARE)) + STEP_BITS
    s = max(float_of(np.int32(up & ~STEP_BITS)), LEAST)
    inverse = F32(1) / s
    for i in range(0, BLOCK, 64):
        store(codes + i, to_u8(as_i32(_sound(load_f32(source + 4 * i)) * inverse + WHOLE)))
    store(step, s)


@compiled
def _write_bfloat(x: int, words: int, _: int, span: Span, spare: int) -> None:
    first, last = span
    whole = last & ~(BLOCK - 1)
    for i in range(first, whole, BLOCK):
        _bfloat_block(x + 4 * i, words + 2 * i)
    if whole < last:
        copy(spare, x + 4 * whole, 4 * (last - whole))
        _bfloat_block(spare, spare)  # never ahead of what it reads
        copy(words + 2 * whole, spare, 2 * (last - whole))


@compiled
def _write_int8(x: int, codes: int, steps: int, span: Span, spare: int) -> None:
    first, last = span
    whole = last & ~(BLOCK - 1)
    for i in range(first, whole, BLOCK):
        _int8_block(x + 4 * i, codes + i, steps + i // 64)
    if whole < last:
        clear(spare, 4 * BLOCK)
        copy(spare, x + 4 * whole, 4 * (last - whole))
        _int8_block(spare, spare + 4 * BLOCK, steps + whole // 64)
        copy(codes + whole, spare + 4 * BLOCK, last - whole)


@compiled
def _read_bfloat(x: int, words: int, _: int, span: Span, spare: int) -> None:
    first, last = span
    whole = last & ~(BLOCK - 1)
    widen(BFLOAT16, words + 2 * first, x + 4 * first, whole - first, spare)
    if whole < last:
        widen(BFLOAT16, words + 2 * whole, spare + 256, last - whole, spare)
        copy(x + 4 * whole, spare + 256, 4 * (last - whole))


@inlined
def _from_codes(codes: int, s: Any) -> Any:
    return to_f32((to_i32(load_u8(codes)) ^ 128) - 128) * s


@compiled
def _read_int8(x: int, codes: int, steps: int, span: Span, spare: int) -> None:
    first, last = span
    whole = last & ~(BLOCK - 1)
    for i in range(first, whole, BLOCK):
        s = get_f32(steps + i // 64)
        for j in range(i, i + BLOCK, 64):
            store(x + 4 * j, _from_codes(codes + j, s))
    if whole < last:
        s = get_f32(steps + whole // 64)
        copy(spare + 4 * BLOCK, codes + whole, last - whole)
        for j in range(0, BLOCK, 64):
            store(spare + 4 * j, _from_codes(spare + 4 * BLOCK + j, s))
        copy(x + 4 * whole, spare, 4 * (last - whole))


#: What reads into float32, what writes from there, for each dtype.
PASSES = {torch.bfloat16: (_read_bfloat, _write_bfloat), torch.int8: (_read_int8, _write_int8)}


def places(*parts: Tensor) -> tuple[int, int]:
    """The addresses of a vector's `parts`: of bfloat16 or int8 [n], and of float32 steps [n / 256], 0 for bfloat16."""
    numbers, steps = address(parts[0]), address(parts[1], torch.float32) if len(parts) > 1 else 0
    return numbers, steps


class LowPrecision(LowPrecisionKernels):
    """Each in one pass."""

    def to_bfloat16(self, x: Tensor, out: Tensor) -> None:
        _over(PASSES[torch.bfloat16][1], x, out)

    def to_int8(self, x: Tensor, codes: Tensor, steps: Tensor) -> None:
        _over(PASSES[torch.int8][1], x, codes, steps)

    def from_bfloat16(self, x: Tensor, out: Tensor) -> None:
        _over(PASSES[torch.bfloat16][0], out, x)

    def from_int8(self, codes: Tensor, steps: Tensor, out: Tensor) -> None:
        _over(PASSES[torch.int8][0], out, codes, steps)


def _over(function: Callable, x: Tensor, *parts: Tensor) -> None:
    numel, where = x.numel(), (address(x, torch.float32), *places(*parts))
    tiles = -(-numel // TILE)

    def job(first: int, last: int, piece: int) -> None:
        spare = np.empty(SPARE, np.uint8)
        function(*where, (first * TILE, min(last * TILE, numel)), spare.ctypes.data)

    run(job, tiles, pieces_of(numel, tiles))
