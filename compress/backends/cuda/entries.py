"""Entries of sparse gradients on a GPU, and the unions of their index sets: csrc/entries.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats.entries import VALUE_BLOCK, index_layout
from .. import union
from ..partition import Partition
from ..sparse import EntryKernels, typed_rows, whole_rows
from ..union import Listed
from .partition import Dealer
from .runtime.device import SHARES, STORED, THREADS, device_for, grid_for

FILE = "entries.cu"
PACK = {torch.float32: "entries_pack_f32", torch.bfloat16: "entries_pack_bf16", torch.int8: "entries_pack_int8"}
UNPACK = {torch.bfloat16: "entries_unpack_bf16", torch.int8: "entries_unpack_int8"}
#: Threads of a block that unpacks, and so words that it takes at once; blocks for each row. As many as keep a GPU busy
#: with a few ranks: all of them count the bits before their own, and what they read doubles with their number.
UNPACKING_THREADS, UNPACKING_SHARES = 512, 32


def groups_of(numel: int, shift: int) -> int:
    """Of 2^shift elements each."""
    return ((numel - 1) >> shift) + 1


class Entries(EntryKernels):
    def prepare(self, device: torch.device) -> None:
        device_for(device).function(FILE, "entries_pack_indices")
        for file, kernel in ((FILE, "union_mark"), ("partition.cu", "partition_rows")):
            device_for(device).function(file, kernel)

    def union(self, numel: int, capacity: int, device: torch.device) -> Union:
        return Union(numel, capacity, device)

    def dealer(self, partition: Partition, k: int, share: int, codec: Any, sent: tuple[Tensor, Tensor]) -> Dealer:
        return Dealer(self, partition, k, share, codec, sent)

    def add(self, out: Tensor, places: Tensor, values: Tensor) -> None:
        device = device_for(out.device)
        arguments = out, places.long(), values, np.int64(len(values))
        device.function(FILE, "entries_add")(grid_for(max(1, len(values)), device), THREADS, arguments)

    def pack_indices(self, indices: Tensor, count: Tensor | None, base: int, numel: int, wire: Tensor) -> None:
        k, device = len(indices), device_for(indices.device)
        layout = index_layout(numel, k)
        words = layout.upper_words + layout.low_words
        if words == 0:
            return
        entries = indices, np.int64(k), count, np.int64(base)
        target = np.int32(layout.low_bits), np.int64(layout.upper_words), np.int64(layout.low_words), wire
        device.function(FILE, "entries_pack_indices")(grid_for(words, device), THREADS, (*entries, *target))

    def unpack_indices(
        self,
        wires: Tensor,
        base: int,
        numel: int,
        counts: Tensor | None,
        indices: Tensor,
        starts: tuple[Tensor, int, Tensor] | None = None,
    ) -> None:
        """`starts`: int32 [rows, groups + 1], at which entry each 2^shift elements begin; shift; and the status."""
        (rows, k), device = indices.shape, device_for(indices.device)
        layout = index_layout(numel, k)
        shares = max(1, min(-(-layout.upper_words // UNPACKING_THREADS), UNPACKING_SHARES))
        source = whole_rows(wires), np.int64(wires.stride(0)), np.int32(rows), np.int32(shares)
        form = np.int64(base), np.int64(numel), np.int32(layout.low_bits), np.int64(layout.upper_words)
        counted = (None, np.int64(0)) if counts is None else (whole_rows(counts[:, None]), np.int64(counts.stride(0)))
        target = *counted, whole_rows(indices), np.int64(indices.stride(0)), np.int64(k)
        where, shift, status = starts or (None, 0, None)
        noted = where, np.int32(shift), np.int64(groups_of(numel, shift)), status
        grid = min(rows * shares, SHARES * device.sm_count)
        device.function(FILE, "entries_unpack_indices")(grid, UNPACKING_THREADS, (*source, *form, *target, *noted))

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
