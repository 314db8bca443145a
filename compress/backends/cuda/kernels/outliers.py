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
from .topk import tiles_of

FILE = "outliers.cu"


#: How csrc/outliers.cu names inner codes whose elements it can read one by one.
INNER = {"onebit": 0, "qsgd": 1, "terngrad": 2, "ternary": 2}


class Outliers(OutlierKernels):
    """Two passes over the gradient encode it. A mean is that of the inner code, then added up anew at the entries."""

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
            for kernel in ("outliers_put", f"outliers_mean_{SUFFIXES[dtype]}"):
                device_for(device).function(FILE, kernel)

    def take_out(self, room: Room, x: Tensor | None, target: Tensor) -> None:
        device, suffix = device_for(target.device), "f32" if x is None else SUFFIXES[x.dtype]
        grid = grid_for(len(room.values), device)
        device.function(FILE, f"outliers_take_{suffix}")(grid, THREADS, (room.row, room.values, x, target))

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        name, numel = codec.inner.name, out.numel()
        if name not in INNER:
            super().decode_mean(codec, wires, out, workspace)
            return
        blocks, ranks, room = wires[2], len(wires[2]), self.room(codec, numel, out.device, workspace)
        inner_kernels(self.codecs, codec.inner, out.device).decode_mean(codec.inner, [blocks], out, room.inner)
        memory, pitch, found, (broken, starts, reach) = self.read(codec, wires, numel, room, workspace)
        block, bits = np.int32(codec.inner.block), np.int32(getattr(codec.inner, "bits", 0))
        coded = whole_rows(blocks), np.int64(blocks.stride(0)), np.int32(INNER[name]), block, bits
        record = np.int32(codec.inner.wire_bytes(codec.inner.block))
        entries = memory, pitch, found, np.int32(ranks), np.int32(codec.k(numel)), broken, starts, reach
        mean = np.float32(1) / np.float32(ranks)
        arguments = out, np.int64(numel), mean, *coded, record, *entries, workspace.status
        device_for(out.device).launch(FILE, f"outliers_mean_{SUFFIXES[out.dtype]}", tiles_of(numel), arguments)

    def read(
        self, codec: Any, wires: Sequence[Tensor], numel: int, room: Room, workspace: Workspace
    ) -> tuple[Any, ...]:
        """All ranks' entries, unpacked and checked: rows and their pitch, values, and what `TopK.check` returns."""
        indices, values, _ = wires
        rows, found = self.arrived(codec, numel, indices.device, len(indices), workspace)
        self.entries.unpack_indices(indices, 0, numel, rows[:, 0], rows[:, 1:])
        self.entries.unpack_values(values, codec.values, found)
        topk: Any = self.codecs["topk"]
        memory, pitch = whole_rows(rows), np.int64(4 * rows.stride(0))
        _, checked = topk.check(memory, int(pitch), len(indices), numel, codec.k(numel), room.selection)
        return memory, pitch, found, checked

    def add(self, codec: Any, wires: Sequence[Tensor], out: Tensor, alpha: float, workspace: Workspace) -> None:
        blocks, ranks, k = wires[2], len(wires[2]), codec.k(out.numel())
        room, device = self.room(codec, out.numel(), out.device, workspace), device_for(out.device)
        memory, pitch, found, (broken, _, reach) = self.read(codec, wires, out.numel(), room, workspace)
        inner = inner_kernels(self.codecs, codec.inner, out.device)
        add, put = (device.function(FILE, f"outliers_{name}") for name in ("add_to_values", "put"))
        grid, checked = grid_for(k, device), (np.int32(k), broken, reach)
        for rank in range(ranks):
            entries = memory, pitch, found[rank], np.int32(rank), *checked
            add(grid, THREADS, (out, np.float32(alpha), *entries, workspace.status))
            inner.decode_add(codec.inner, blocks[rank], out, alpha, room.inner)
            put(grid, THREADS, (out, *entries))
