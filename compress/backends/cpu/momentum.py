"""The passes of `compress.momentum` over CPU tensors: each reads and writes what it needs once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, float32, int32

from ..addresses import address
from ..base import Entering, MomentumKernels
from .blocks import F32, INF_BITS, MAGNITUDE
from .simd import as_i32, compiled, get_f32, get_i32, load_f32, select, store
from .tracking import entering


@compiled
def _enter(grad: int, momentum: int, out: int, beta: float, first: int, last: int) -> None:
    """out = momentum = beta * momentum + grad; what is not finite does not enter the momentum."""
    decay, i = F32(beta), 4 * first
    while i + 256 <= 4 * last:
        u = load_f32(momentum + i)
        new = u * decay + load_f32(grad + i)
        store(out + i, new)
        store(momentum + i, select((as_i32(new) & MAGNITUDE) < INF_BITS, new, u))
        i += 256
    while i < 4 * last:
        now = get_f32(momentum + i) * decay + get_f32(grad + i)
        store(out + i, now)
        if np.isfinite(now):
            store(momentum + i, now)
        i += 4


@compiled
def _enter_ahead(grad: int, momentum: int, out: int, beta: float, first: int, last: int) -> None:
    """momentum = beta * (momentum + grad), out = momentum + grad; as `_enter`."""
    decay, i = F32(beta), 4 * first
    while i + 256 <= 4 * last:
        u, g = load_f32(momentum + i), load_f32(grad + i)
        new = (u + g) * decay
        total = new + g
        store(out + i, total)
        store(momentum + i, select((as_i32(total) & MAGNITUDE) < INF_BITS, new, u))
        i += 256
    while i < 4 * last:
        one = get_f32(grad + i)
        now = (get_f32(momentum + i) + one) * decay
        store(out + i, now + one)
        if np.isfinite(now + one):
            store(momentum + i, now)
        i += 4


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
        self.entering(grad, momentum, beta, nesterov).into(out)

    def entering(self, grad: Tensor, momentum: Tensor, beta: float, nesterov: bool) -> Entering:
        return entering(_enter_ahead if nesterov else _enter, grad.float(), momentum, beta)

    def mask(self, momentum: Tensor, indices: Tensor, values: Tensor, count: Tensor | None = None) -> Tensor:
        # Nothing else of torch's here: it would wake all threads for some 1 % of the elements.
        before = torch.empty_like(values)
        entries = address(indices, int32), address(values, float32), address(before, float32)
        _mask(address(momentum, float32), *entries, len(indices) if count is None else int(count))
        return before
