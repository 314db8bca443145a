"""Small passes over CPU tensors, each reading and writing everything once: of feedback strategies, and flat vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, float32, int32

from ..kernels import MomentumInput, MomentumKernels, TrackingKernels, VectorKernels
from ..memory import address
from .runtime.blocks import all_finite, clear, copy, widen
from .runtime.dtypes import F32, INF_BITS, KINDS, MAGNITUDE, NAN, ONE, ZERO, width
from .runtime.fused_inputs import ENTER_SPARE, HEAVY_BALL, NESTEROV, TRACKED, enter_into
from .runtime.simd import (
    as_i32,
    bits_of,
    compiled,
    fold_sum,
    get_f32,
    get_i32,
    inlined,
    load_f32,
    select,
    square_root,
    store,
)
from .runtime.threads import over_tiles


@compiled
def _accumulate(total: int, x: int, hand_out: int, first: int, last: int) -> int:
    """total += x where that is finite. Returns whether it is not so anywhere. `hand_out`: the sum, or NaN, is left in
    `x`."""
    bad, i = False, 4 * first
    while i + 256 <= 4 * last:
        old = load_f32(total + i)
        new = old + load_f32(x + i)
        good = (as_i32(new) & MAGNITUDE) < INF_BITS
        store(total + i, select(good, new, old))
        if hand_out:
            store(x + i, select(good, new, NAN))
        bad |= bits_of(good) != -1
        i += 256
    while i < 4 * last:
        one = get_f32(total + i) + get_f32(x + i)
        finite = np.isfinite(one)
        if finite:
            store(total + i, one)
        if hand_out:
            store(x + i, one if finite else NAN)
        bad |= not finite
        i += 4
    return int(bad)


@compiled
def _lead(past: int, mean: int, beta: float, share: float, first: int, last: int) -> None:
    """mean -= share·past, past = beta·past + mean; NaN in the mean's place, and the past as it was, where that is not
    finite."""
    i, slow, part = 4 * first, F32(beta), F32(share)
    while i + 256 <= 4 * last:
        h = load_f32(past + i)
        x = load_f32(mean + i) - h * part
        new = h * slow + x
        good = (as_i32(new) & MAGNITUDE) < INF_BITS
        store(past + i, select(good, new, h))
        store(mean + i, select(good, x, NAN))
        i += 256
    while i < 4 * last:
        one = get_f32(past + i)
        left = F32(get_f32(mean + i) - F32(one * part))
        following = F32(F32(one * slow) + left)
        if np.isfinite(following):
            store(past + i, following)
            store(mean + i, left)
        else:
            store(mean + i, NAN)
        i += 4


#: Bytes of scratch for the row of 256 elements at the end: its magnitudes, its other elements, and what `widen` needs.
ROW_SPARE = 2048 + 256


@inlined
def _factor_of(row: int) -> Any:
    """By which the scales of a row of 256 magnitudes follow them: 10 / their root mean square, or 0."""
    a, b, c, d = load_f32(row), load_f32(row + 256), load_f32(row + 512), load_f32(row + 768)
    squares = fold_sum((a * a + c * c) + (b * b + d * d))
    return F32(10.0 / np.sqrt(np.float64(squares) / 256)) if squares != ZERO else ZERO


@compiled
def _row_at(address: int, n: int, spare: int) -> int:
    """Where a row of 256 lies: in place, or of fewer a copy, with zeros behind the last."""
    if n == 256:
        return address
    clear(spare, 1024)
    copy(spare, address, 4 * n)
    return spare


@compiled
def _divide(kind: int, grad: int, magnitudes: int, out: int, first: int, last: int, spare: int) -> None:
    for start in range(first, last, 256):
        n = min(256, last - start)
        row = _row_at(magnitudes + 4 * start, n, spare)
        target = out + 4 * start if n == 256 else spare + 1024
        widen(kind, grad + width(kind) * start, target, n, spare + 2048)
        factor = _factor_of(row)
        for i in range(0, 4 * n, 256):
            store(target + i, load_f32(target + i) / (load_f32(row + i) * factor + ONE))
        if n < 256:
            copy(out + 4 * start, target, 4 * n)


@compiled
def _multiply(mean: int, magnitudes: int, beta: float, first: int, last: int, spare: int) -> None:
    slow, share = F32(beta), F32(1.0 - beta)
    for start in range(first, last, 256):
        n = min(256, last - start)
        row, x = _row_at(magnitudes + 4 * start, n, spare), _row_at(mean + 4 * start, n, spare + 1024)
        factor = _factor_of(row)
        for i in range(0, 4 * n, 256):
            old = load_f32(row + i)
            handed_out = load_f32(x + i) * (old * factor + ONE)
            new = square_root(old * old * slow + handed_out * handed_out * share)
            store(x + i, handed_out)
            store(row + i, select((as_i32(new) & MAGNITUDE) < INF_BITS, new, old))
        if n < 256:
            copy(magnitudes + 4 * start, row, 4 * n)
            copy(mean + 4 * start, x, 4 * n)


def over_rows(numel: int, kernel: Callable[..., None], where: tuple[Any, ...]) -> None:
    """Let a kernel work through rows of 256."""

    def job(first: int, last: int) -> None:
        spare = np.empty(ROW_SPARE, np.uint8)
        kernel(*where, first, last, spare.ctypes.data)

    over_tiles(numel, job)


class Tracking(TrackingKernels):
    """Each in one pass."""

    def change(self, grad: Tensor, momentum: Tensor, share: float, out: Tensor) -> None:
        self.changing(grad, momentum, share).into(out)

    def changing(self, grad: Tensor, momentum: Tensor, share: float) -> MomentumInput:
        return momentum_input(TRACKED, grad, momentum, share)

    def follow(self, estimate: Tensor, mean: Tensor) -> bool:
        where = address(estimate, float32), address(mean, float32), 1
        return not any(over_tiles(mean.numel(), lambda first, last: _accumulate(*where, first, last)))

    def lead(self, past: Tensor, mean: Tensor, beta: float, share: float) -> None:
        where = address(past, float32), address(mean, float32)
        over_tiles(mean.numel(), lambda first, last: _lead(*where, beta, share, first, last))

    def divide(self, grad: Tensor, magnitudes: Tensor, out: Tensor) -> None:
        where = KINDS[grad.dtype], address(grad), address(magnitudes, float32), address(out, float32)
        over_rows(grad.numel(), _divide, where)

    def multiply(self, mean: Tensor, magnitudes: Tensor, beta: float) -> None:
        where = address(mean, float32), address(magnitudes, float32), beta
        over_rows(mean.numel(), _multiply, where)


def momentum_input(kind: int, grad: Tensor, momentum: Tensor, factor: float) -> MomentumInput:
    """What comes out of a momentum, of a kind that `fused_inputs` has."""
    source = grad if grad.dtype in KINDS else grad.float()
    bits = np.float32(factor).view(np.int32)
    record = np.array([KINDS[source.dtype], address(source), address(momentum, float32), bits], np.int64)
    where = record.ctypes.data

    def into(out: Tensor) -> None:
        def job(first: int, last: int) -> None:
            spare = np.empty(ENTER_SPARE + 256, np.uint8)
            enter_into(kind, where, address(out, float32), first, last, spare.ctypes.data)

        over_tiles(out.numel(), job)

    return MomentumInput(grad.numel(), into, (kind, where), (record, source, momentum))


@compiled
def _mask(momentum: int, indices: int, values: int, before: int, count: int) -> None:
    """before[j] = momentum[indices[j]], and zero there, where values[j] is finite."""
    for j in range(count):
        at = momentum + 4 * np.int64(get_i32(indices + 4 * j))
        store(before + 4 * j, get_f32(at))
        if np.isfinite(get_f32(values + 4 * j)):
            store(at, F32(0.0))


class Momentum(MomentumKernels):
    """Each in one pass, `mask` over its entries alone."""

    def enter(self, grad: Tensor, momentum: Tensor, beta: float, nesterov: bool, out: Tensor) -> None:
        self.momentum_input(grad, momentum, beta, nesterov).into(out)

    def momentum_input(self, grad: Tensor, momentum: Tensor, beta: float, nesterov: bool) -> MomentumInput:
        return momentum_input(NESTEROV if nesterov else HEAVY_BALL, grad, momentum, beta)

    def mask(self, momentum: Tensor, indices: Tensor, values: Tensor, count: Tensor | None = None) -> Tensor:
        # Nothing else of torch's here: it would wake all threads for some 1 % of the elements.
        before = torch.empty_like(values)
        entries = address(indices, int32), address(values, float32), address(before, float32)
        _mask(address(momentum, float32), *entries, len(indices) if count is None else int(count))
        return before


@compiled
def _difference(agreed: int, own: int, out: int, restart: int, first: int, last: int) -> None:
    i = 4 * first
    while i + 256 <= 4 * last:
        there = load_f32(agreed + i)
        store(out + i, there - load_f32(own + i))
        if restart:
            store(own + i, there)
        i += 256
    while i < 4 * last:
        one = get_f32(agreed + i)
        store(out + i, one - get_f32(own + i))
        if restart:
            store(own + i, one)
        i += 4


@compiled
def _descend(agreed: int, step: int, own: int, carry: int, first: int, last: int) -> None:
    i = 4 * first
    while i + 256 <= 4 * last:
        by = load_f32(step + i)
        there = load_f32(agreed + i) - by
        store(agreed + i, there)
        store(own + i, load_f32(own + i) - by if carry else there)
        i += 256
    while i < 4 * last:
        less = get_f32(step + i)
        one = get_f32(agreed + i) - less
        store(agreed + i, one)
        store(own + i, get_f32(own + i) - less if carry else one)
        i += 4


class Vectors(VectorKernels):
    """In torch where not all is float32, without gaps."""

    def all_finite(self, x: Tensor) -> Tensor:
        if not _lies_flat(x):
            return super().all_finite(x)
        at = address(x, float32)
        return torch.tensor(
            all(over_tiles(x.numel(), lambda first, last: all_finite(at + 4 * first, last - first))), device="cpu"
        )

    def accumulate(self, x: Tensor, total: Tensor) -> Tensor:
        if not _lies_flat(x, total):
            return super().accumulate(x, total)
        where = address(total, float32), address(x, float32), 0
        bad = any(over_tiles(x.numel(), lambda first, last: _accumulate(*where, first, last)))
        return torch.tensor(not bad, device="cpu")

    def difference(self, agreed: Tensor, own: Tensor, out: Tensor, restart: bool) -> None:
        if not _lies_flat(agreed, own, out):
            super().difference(agreed, own, out, restart)
            return
        where = (*(address(x, float32) for x in (agreed, own, out)), int(restart))
        over_tiles(agreed.numel(), lambda first, last: _difference(*where, first, last))

    def descend(self, agreed: Tensor, step: Tensor, own: Tensor, carry: bool) -> None:
        if not _lies_flat(agreed, step, own):
            super().descend(agreed, step, own, carry)
            return
        where = (*(address(x, float32) for x in (agreed, step, own)), int(carry))
        over_tiles(agreed.numel(), lambda first, last: _descend(*where, first, last))


def _lies_flat(*tensors: Tensor) -> bool:
    return all(x.dtype == float32 and x.is_contiguous() and not x.is_neg() for x in tensors)
