"""The passes of `backends.VectorKernels` over CPU tensors, each reading and writing everything once."""

from __future__ import annotations

import torch
from torch import Tensor, float32

from ..addresses import address
from ..kernels import VectorKernels
from .blocks import all_finite
from .simd import compiled, get_f32, load_f32, store
from .tracking import over_tiles


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
