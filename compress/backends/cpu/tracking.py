"""The passes of `compress.tracking` over CPU tensors: as written there, each reading and writing everything once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, float32

from ..addresses import address
from ..base import Entering, TrackingKernels
from .blocks import F32, INF_BITS, MAGNITUDE, NAN, TILE
from .kernels import pieces_of, run
from .simd import as_i32, bits_of, compiled, get_f32, load_f32, select, store


@compiled
def _change(grad: int, momentum: int, out: int, rate: float, first: int, last: int) -> None:
    """out = the change of momentum by rate · (grad - momentum); what is not finite does not enter the momentum."""
    share, i = F32(rate), 4 * first
    while i + 256 <= 4 * last:
        m = load_f32(momentum + i)
        new = m + (load_f32(grad + i) - m) * share
        store(out + i, new - m)
        store(momentum + i, select((as_i32(new) & MAGNITUDE) < INF_BITS, new, m))
        i += 256
    while i < 4 * last:
        old = get_f32(momentum + i)
        now = old + (get_f32(grad + i) - old) * share
        store(out + i, now - old)
        if np.isfinite(now):
            store(momentum + i, now)
        i += 4


@compiled
def _follow(estimate: int, mean: int, first: int, last: int) -> int:
    """estimate += mean, handed out in `mean`; NaN there, and the estimate as it was, where the sum is not finite.
    Returns whether it is so anywhere."""
    bad, i = False, 4 * first
    while i + 256 <= 4 * last:
        h = load_f32(estimate + i)
        total = h + load_f32(mean + i)
        good = (as_i32(total) & MAGNITUDE) < INF_BITS
        store(estimate + i, select(good, total, h))
        store(mean + i, select(good, total, NAN))
        bad |= bits_of(good) != -1
        i += 256
    while i < 4 * last:
        one = get_f32(estimate + i) + get_f32(mean + i)
        if np.isfinite(one):
            store(estimate + i, one)
            store(mean + i, one)
        else:
            store(mean + i, NAN)
            bad = True
        i += 4
    return int(bad)


class Tracking(TrackingKernels):
    """Each in one pass."""

    def change(self, grad: Tensor, momentum: Tensor, share: float, out: Tensor) -> None:
        self.changing(grad, momentum, share).into(out)

    def changing(self, grad: Tensor, momentum: Tensor, share: float) -> Entering:
        return entering(_change, grad.float(), momentum, share)

    def follow(self, estimate: Tensor, mean: Tensor) -> bool:
        where = address(estimate, float32), address(mean, float32)
        return not any(over_tiles(mean.numel(), lambda first, last: _follow(*where, first, last)))


def entering(kernel: Callable, grad: Tensor, momentum: Tensor, factor: float) -> Entering:
    """By the passes of a kernel, over float32 tensors."""

    def part(out: int, first: int, last: int) -> None:
        kernel(address(grad, float32), address(momentum, float32), out, factor, first, last)

    def into(out: Tensor) -> None:
        over_tiles(out.numel(), partial(part, address(out, float32)))

    return Entering(grad.numel(), into, part)


def over_tiles(numel: int, job: Callable[[int, int], Any]) -> list[Any]:
    """Tiles, so that threads begin at whole ones."""
    tiles = -(-numel // TILE)
    return run(lambda first, last, _: job(first * TILE, min(last * TILE, numel)), tiles, pieces_of(numel, tiles))
