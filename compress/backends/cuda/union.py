"""Unions of index sets on a GPU, and an all-reduce there: kernels of csrc/union.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import union
from ..union import Listed
from .device import STORED, THREADS, device_for, grid_for

FILE = "union.cu"


class Union(union.Union):
    """By a bitmap: no set is sorted."""

    def __init__(self, numel: int, capacity: int, device: torch.device) -> None:
        super().__init__(numel, capacity, device)
        self.device = device_for(device)
        words = -(-numel // 32)
        # Each block counts what lies before its share, and waits for that: no more shares than run at once.
        self._shares = min(-(-words // THREADS), self.device.wave(FILE, "union_list"))
        self._bitmap = torch.zeros(words, dtype=torch.int32, device=device)
        self._tally = torch.zeros(self._shares, dtype=torch.int64, device=device)
        self._turn, self._hidden = torch.zeros(2, 1, dtype=torch.int32, device=device)
        self.later = torch.zeros(0, dtype=torch.bool, device=device)

    def __call__(self, sets: Sequence[Tensor]) -> None:
        tally = self._tally, np.int32(self._shares), self._turn
        for indices in [listed for listed in sets if len(listed)] or sets[:1]:  # one at least, which clears the tally
            arguments = indices, np.int64(len(indices)), np.int64(self.numel), self._bitmap, *tally, self.status
            self._launch("union_mark", len(indices), arguments)
        words, room = len(self._bitmap), len(self.indices)
        out = self._bitmap, np.int64(words), *tally, self.indices, np.int64(room), self.size
        self.device.function(FILE, "union_list")(self._shares, THREADS, out)

    def take(
        self, entries: Listed, residual: Tensor | None, room: int, extra: Tensor, total: Tensor, out: Tensor
    ) -> None:
        k = len(entries[1])
        if len(self.later) != k:
            self.later = torch.zeros(k, dtype=torch.bool, device=out.device)
        what = *entries, np.int64(k), self.indices, self.size, np.int64(room), residual
        late = *what, self.later, self._hidden, out, np.int32(STORED[out.dtype]), np.int64(out.numel())
        self.device.function(FILE, "union_late")(self._grid(out), THREADS, late)
        take = *what, self._hidden, total, extra, np.int64(len(extra))
        self._launch("union_take", len(total), take)

    def deliver(
        self, total: Tensor, ranks: int, out: Tensor, extra: Tensor, came: tuple[Tensor, int], counted: Tensor
    ) -> None:
        room, (used, k) = len(total) - len(extra), came
        what = total, np.int64(room), np.float32(1.0 / ranks), self.indices, self.size, out, np.int32(STORED[out.dtype])
        more = extra, np.int64(len(extra)), used, np.int32(len(used)), np.int64(k), self._hidden, counted
        self._launch("union_deliver", len(total), (*what, *more))

    def _launch(self, kernel: str, threads: int, arguments: tuple[object, ...]) -> None:
        self.device.function(FILE, kernel)(max(1, grid_for(threads, self.device)), THREADS, arguments)  # type: ignore[arg-type]

    def _grid(self, out: Tensor) -> int:
        """For 16 bytes a thread."""
        return max(1, grid_for(-(-out.nbytes // 16), self.device))
