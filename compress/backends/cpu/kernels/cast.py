"""Cast and Identity: the elements themselves, as `stored`. A tile stands in for the block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...codec_types import CastLike
from ..block_codec import Blocks, Kernel
from ..runtime.blocks import SPARE, A, How, Span, Wires, copy, narrow, read_block, residual_block, widen
from ..runtime.dtypes import F32, FLOAT32, KINDS, TILE, ZERO, Source, finite, load_as, width
from ..runtime.simd import bits_of, compiled, count_ones, load_f32, select, splat_f32, store


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


class Cast(Blocks):
    """Identity too: a cast to float32."""

    def block(self, codec: CastLike) -> int:
        return TILE

    def stored(self, codec: CastLike) -> int:
        return KINDS[getattr(codec, "dtype", torch.float32)]

    def encode_block(self, codec: CastLike, draw: Tensor | None) -> Kernel:
        return cast_encode, (self.stored(codec),)

    def decode_block(self, codec: CastLike) -> Kernel:
        return cast_decode, (self.stored(codec),)
