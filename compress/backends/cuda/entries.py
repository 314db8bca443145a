"""The entries of sparse gradients on a GPU: what launches the kernels of csrc/entries.cu. One launch serves a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats.entries import VALUE_BLOCK, index_layout
from ..partition import Dealing
from ..sparse import EntryKernels, typed_rows, whole_rows
from .dealing import Dealer
from .device import SHARES, THREADS, device_for, grid_for
from .union import Union

FILE = "entries.cu"
PACK = {torch.float32: "entries_pack_f32", torch.bfloat16: "entries_pack_bf16", torch.int8: "entries_pack_int8"}
UNPACK = {torch.bfloat16: "entries_unpack_bf16", torch.int8: "entries_unpack_int8"}
#: Threads of a block that unpacks, and so words that it takes at once; blocks for each row. As many as keep a GPU busy
#: with a few ranks: all of them count the bits before their own, and what they read doubles with their number.
UNPACKING_THREADS, UNPACKING_SHARES = 512, 32


class Entries(EntryKernels):
    def prepare(self, device: torch.device) -> None:
        device_for(device).function(FILE, "entries_pack_indices")
        for file, kernel in (("union.cu", "union_mark"), ("dealing.cu", "dealing_rows")):
            device_for(device).function(file, kernel)

    def union(self, numel: int, capacity: int, device: torch.device) -> Union:
        return Union(numel, capacity, device)

    def dealer(self, dealing: Dealing, k: int, share: int, codec: Any, sent: tuple[Tensor, Tensor]) -> Dealer:
        return Dealer(self, dealing, k, share, codec, sent)

    def pack_indices(self, indices: Tensor, count: Tensor | None, base: int, numel: int, wire: Tensor) -> None:
        k, device = len(indices), device_for(indices.device)
        layout = index_layout(numel, k)
        words = layout.upper_words + layout.low_words
        if words == 0:
            return
        entries = indices, np.int64(k), count, np.int64(base)
        target = np.int32(layout.low_bits), np.int64(layout.upper_words), np.int64(layout.low_words), wire
        device.function(FILE, "entries_pack_indices")(grid_for(words, device), THREADS, (*entries, *target))

    def unpack_indices(self, wires: Tensor, base: int, numel: int, counts: Tensor | None, indices: Tensor) -> None:
        (rows, k), device = indices.shape, device_for(indices.device)
        layout = index_layout(numel, k)
        shares = max(1, min(-(-layout.upper_words // UNPACKING_THREADS), UNPACKING_SHARES))
        source = whole_rows(wires), np.int64(wires.stride(0)), np.int32(rows), np.int32(shares)
        form = np.int64(base), np.int64(numel), np.int32(layout.low_bits), np.int64(layout.upper_words)
        counted = (None, np.int64(0)) if counts is None else (whole_rows(counts[:, None]), np.int64(counts.stride(0)))
        target = *counted, whole_rows(indices), np.int64(indices.stride(0)), np.int64(k)
        grid = min(rows * shares, SHARES * device.sm_count)
        device.function(FILE, "entries_unpack_indices")(grid, UNPACKING_THREADS, (*source, *form, *target))

    def pack_values(
        self,
        values: Tensor,
        dtype: torch.dtype,
        wire: Tensor,
        indices: Tensor | None = None,
        count: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        k, device = len(values), device_for(values.device)
        if k == 0:
            return
        # A warp takes a unit's values, 8 a lane.
        threads = -(-k // VALUE_BLOCK) * 32 if dtype == torch.int8 else k
        arguments = values, np.int64(k), wire, indices, count, residual
        device.function(FILE, PACK[dtype])(grid_for(threads, device), THREADS, arguments)

    def unpack_values(self, wires: Tensor, dtype: torch.dtype, values: Tensor) -> None:
        if dtype == torch.float32:
            values.copy_(typed_rows(wires, dtype))
            return
        (rows, k), device = values.shape, device_for(values.device)
        if k == 0:
            return
        source = whole_rows(wires), np.int64(wires.stride(0)), np.int32(rows)
        arguments = *source, whole_rows(values), np.int64(values.stride(0)), np.int64(k)
        device.function(FILE, UNPACK[dtype])(grid_for(k, device), THREADS, arguments)
