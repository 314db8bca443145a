"""Unions of index sets on a GPU: kernels of csrc/sparse.cu."""

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
