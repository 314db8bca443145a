"""Outliers on a GPU: what launches the kernels of csrc/outliers.cu, between those of the two codecs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import Workspace, kernel_cache
from ...outliers import OutlierKernels, Room, inner_kernels
from ...sparse import whole_rows
from ..runtime.device import SUFFIXES, THREADS, device_for, grid_for

FILE = "outliers.cu"


class Outliers(OutlierKernels):
    """Two passes over the gradient encode it. Decoding passes over the sum once for each rank."""

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
            device_for(device).function(FILE, "outliers_put")

    def take_out(self, room: Room, x: Tensor | None, target: Tensor) -> None:
        device, suffix = device_for(target.device), "f32" if x is None else SUFFIXES[x.dtype]
        grid = grid_for(len(room.values), device)
        device.function(FILE, f"outliers_take_{suffix}")(grid, THREADS, (room.row, room.values, x, target))

    def add(self, codec: Any, wires: Sequence[Tensor], out: Tensor, alpha: float, workspace: Workspace) -> None:
        indices, values, blocks = wires
        ranks, numel, k = len(indices), out.numel(), codec.k(out.numel())
        room = self.room(codec, numel, out.device, workspace)
        rows, found = self.arrived(codec, numel, out.device, ranks, workspace)
        self.entries.unpack_indices(indices, 0, numel, rows[:, 0], rows[:, 1:])
        self.entries.unpack_values(values, codec.values, found)
        topk: Any = self.codecs["topk"]
        memory, pitch = whole_rows(rows), np.int64(4 * rows.stride(0))
        device, (broken, _, reach) = topk.check(memory, int(pitch), ranks, numel, k, room.selection)
        inner = inner_kernels(self.codecs, codec.inner, out.device)
        add, put = (device.function(FILE, f"outliers_{name}") for name in ("add_to_values", "put"))
        grid, checked = grid_for(k, device), (np.int32(k), broken, reach)
        for rank in range(ranks):
            entries = memory, pitch, found[rank], np.int32(rank), *checked
            add(grid, THREADS, (out, np.float32(alpha), *entries, workspace.status))
            inner.decode_add(codec.inner, blocks[rank], out, alpha, room.inner)
            put(grid, THREADS, (out, *entries))
