"""Inputs that a kernel computes while it reads: kinds beside those of `dtypes`, whose address is a record's.

The output of a momentum that a gradient enters is never written to memory: a kernel reads gradient, momentum and
residual in one pass. Its record is four int64: the gradient's kind and address, the momentum's address, and the bits of
a float32 factor. Each element may be read once; with `PEEK` added to the kind any number of times, as the momentum
stays what it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .dtypes import BFLOAT16, finite, load_as, width
from .simd import compiled, float_of, get_f32, get_i64, get_u8, inlined, load_f32, prefetch, select, splat_f32, store

#: momentum += factor · (gradient - momentum), and out comes how it changes: `compress.feedback.tracking`.
TRACKED = 3

#: momentum = factor · momentum + gradient, which comes out; or momentum = factor · (momentum + gradient), and out comes
#: momentum + gradient: `compress.feedback.momentum`.
HEAVY_BALL, NESTEROV = 4, 5

PEEK = 8

#: Bytes of scratch that `enter` needs.
ENTER_SPARE = 512

#: How many elements ahead to ask for.
AHEAD = 512


@inlined
def gradient_at(kind: int, source: int, start: int) -> Any:
    """Where the gradient's elements from `start` on lie, to ask for them."""
    if kind > BFLOAT16:
        return get_i64(source + 8) + width(get_i64(source)) * start
    return source + width(kind) * start


@inlined
def momentum_at(kind: int, source: int, start: int) -> Any:
    """The same of a momentum; 0 if there is none."""
    return get_i64(source + 16) + 4 * start if kind > BFLOAT16 else 0


@inlined
def entered(form: int, momentum: Any, grad: Any, factor: Any) -> tuple[Any, Any]:
    """What comes out, and the momentum then: as it was where that would not be finite."""
    if form == TRACKED:
        new = momentum + (grad - momentum) * factor
        out, good = new - momentum, finite(new)
    elif form == HEAVY_BALL:
        new = momentum * factor + grad
        out, good = new, finite(new)
    else:
        new = (momentum + grad) * factor
        out = new + grad
        good = finite(out)
    return out, select(good, new, momentum)


@compiled
def enter_vectors(kind: int, grad: tuple[int, int], momentum: int, factor: Any, old: int, out: int, n: int) -> None:
    """out = what comes out of the momentum, and is added to `old` unless that is 0; n is a multiple of 64."""
    stored, source = grad
    form, peek = kind & ~PEEK, kind & PEEK
    for i in range(0, n, 64):
        v, new = entered(form, load_f32(momentum + 4 * i), load_as(stored, source + width(stored) * i), factor)
        if not peek:
            store(momentum + 4 * i, new)
        if old:
            v = v + load_f32(old + 4 * i)
        store(out + 4 * i, v)
        # All that is read lies in memory, and a block's own work lies between it and what is read next.
        for line in range(0, 256, 64):
            prefetch(source + width(stored) * (i + AHEAD) + line)
            prefetch(momentum + 4 * (i + AHEAD) + line)
            if old:
                prefetch(old + 4 * (i + AHEAD) + line)


@compiled
def enter(kind: int, record: int, residual: int, start: int, n: int, out: int, spare: int) -> None:
    """out = what comes out for n elements from `start` on, added to the residual unless that is 0. It is written to the
    end of its last 64, zeros behind them."""
    stored, grad, momentum = get_i64(record), get_i64(record + 8), get_i64(record + 16) + 4 * start
    source = grad + width(stored) * start
    factor = float_of(np.int32(get_i64(record + 24)))
    old = residual + 4 * start if residual else 0
    whole = n & ~63
    enter_vectors(kind, (stored, source), momentum, factor, old, out, whole)
    if whole == n:
        return
    rest, target = n - whole, out + 4 * whole
    there, kept = source + width(stored) * whole, momentum + 4 * whole
    for i in range(0, ENTER_SPARE, 256):
        store(spare + i, splat_f32(np.float32(0)))
    for i in range(width(stored) * rest):
        store(spare + i, get_u8(there + i))
    for i in range(0, 4 * rest, 4):
        store(spare + 256 + i, get_f32(kept + i))
    enter_vectors(kind, (stored, spare), spare + 256, factor, 0, target, 64)
    for i in range(0, 4 * rest, 4):
        if not kind & PEEK:
            store(kept + i, get_f32(spare + 256 + i))
        if old:
            store(target + i, get_f32(target + i) + get_f32(old + 4 * whole + i))


@compiled
def enter_into(kind: int, record: int, out: int, first: int, last: int, spare: int) -> None:
    """out = what comes out, from element `first` to `last`; `spare` has 256 bytes more than `enter` needs."""
    whole = (last - first) & ~63
    enter(kind, record, 0, first, whole, out + 4 * first, spare)
    if first + whole < last:
        enter(kind, record, 0, first + whole, last - first - whole, spare + ENTER_SPARE, spare)
        for i in range(0, 4 * (last - first - whole), 4):
            store(out + 4 * (first + whole) + i, get_f32(spare + ENTER_SPARE + i))
