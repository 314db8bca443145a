"""Unions of index sets on a GPU, and what is read and written at their indices: kernels of csrc/sparse.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import sparse
from .device import SHARES, THREADS, device_for, grid_for

FILE = "sparse.cu"
#: Words of a bitmap that a block of threads takes at once.
BITMAP_TILE = 256


class Union(sparse.Union):
    """By a bitmap: no set is sorted."""

    def __init__(self, numel: int, capacity: int, device: torch.device) -> None:
        super().__init__(numel, capacity, device)
        words = -(-numel // 32)
        self._bitmap = torch.zeros(words, dtype=torch.int32, device=device)
        self._tally = torch.empty(-(-words // BITMAP_TILE), dtype=torch.int32, device=device)

    def __call__(self, sets: Sequence[Tensor]) -> None:
        device = device_for(self._bitmap.device)
        for indices in sets:
            if len(indices):
                arguments = indices, np.int64(len(indices)), np.int64(self.numel), self._bitmap, self.status
                device.function(FILE, "union_mark")(grid_for(len(indices), device), THREADS, arguments)
        words, tiles = len(self._bitmap), len(self._tally)
        grid = min(tiles, SHARES * device.sm_count)
        device.function(FILE, "union_tally")(grid, THREADS, (self._bitmap, np.int64(words), self._tally))
        device.function(FILE, "union_place")(1, THREADS, (self._tally, np.int64(tiles), self.size))
        out = self._bitmap, np.int64(words), self._tally, self.indices, np.int64(len(self.indices))
        device.function(FILE, "union_list")(grid, THREADS, out)


def gather_at(x: Tensor, indices: Tensor, size: Tensor, values: Tensor) -> None:
    """values[i] = x[indices[i]] for i < size, 0 beyond and where an index is out of range.

    Args:
        x, values: float32, flat. indices: int32, as long as `values`. size: int32 [1], on the device.
    """
    device = device_for(x.device)
    arguments = x, np.int64(x.numel()), indices, size, np.int64(len(indices)), values
    device.function(FILE, "gather_at")(grid_for(len(indices), device), THREADS, arguments)


def scatter_to(out: Tensor, indices: Tensor, size: Tensor, values: Tensor, alpha: float = 1.0) -> None:
    """out[indices[i]] = alpha · values[i] for i < size; no index may come twice, those out of range are left out.

    Arguments as in `gather_at`.
    """
    device = device_for(out.device)
    arguments = out, np.int64(out.numel()), indices, size, np.int64(len(indices)), values, np.float32(alpha)
    device.function(FILE, "scatter_to")(grid_for(len(indices), device), THREADS, arguments)
