"""The passes of `compress.momentum` over CPU tensors: each reads and writes what it needs once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, float32, int32

from ..addresses import address
from ..kernels import Entering, MomentumKernels
from .formats import F32
from .simd import compiled, get_f32, get_i32, store
from .sources import HEAVY_BALL, NESTEROV
from .tracking import entering


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
        return entering(NESTEROV if nesterov else HEAVY_BALL, grad, momentum, beta)

    def mask(self, momentum: Tensor, indices: Tensor, values: Tensor, count: Tensor | None = None) -> Tensor:
        # Nothing else of torch's here: it would wake all threads for some 1 % of the elements.
        before = torch.empty_like(values)
        entries = address(indices, int32), address(values, float32), address(before, float32)
        _mask(address(momentum, float32), *entries, len(indices) if count is None else int(count))
        return before
