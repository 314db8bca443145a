"""The passes of `compress.tracking` over CPU tensors: as written there, each reading and writing everything once; and
how gradients enter a momentum, which `compress.momentum` needs too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, float32

from ..addresses import address
from ..kernels import Entering, TrackingKernels
from .formats import INF_BITS, MAGNITUDE, NAN, TILE
from .kernels import KINDS, pieces_of, run
from .simd import as_i32, bits_of, compiled, get_f32, load_f32, select, store
from .sources import ENTER_SPARE, TRACKED, enter_into


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
        return entering(TRACKED, grad, momentum, share)

    def follow(self, estimate: Tensor, mean: Tensor) -> bool:
        where = address(estimate, float32), address(mean, float32)
        return not any(over_tiles(mean.numel(), lambda first, last: _follow(*where, first, last)))


def entering(kind: int, grad: Tensor, momentum: Tensor, factor: float) -> Entering:
    """What comes out of a momentum, of a kind that `sources` has."""
    source = grad if grad.dtype in KINDS else grad.float()
    bits = np.float32(factor).view(np.int32)
    record = np.array([KINDS[source.dtype], address(source), address(momentum, float32), bits], np.int64)
    where = record.ctypes.data

    def into(out: Tensor) -> None:
        def job(first: int, last: int) -> None:
            spare = np.empty(ENTER_SPARE + 256, np.uint8)
            enter_into(kind, where, address(out, float32), first, last, spare.ctypes.data)

        over_tiles(out.numel(), job)

    return Entering(grad.numel(), into, (kind, where), (record, source, momentum))


def over_tiles(numel: int, job: Callable[[int, int], Any]) -> list[Any]:
    """Tiles, so that threads begin at whole ones."""
    tiles = -(-numel // TILE)
    return run(lambda first, last, _: job(first * TILE, min(last * TILE, numel)), tiles, pieces_of(numel, tiles))
