"""Lists of entries on the CPU: `packing` behind the interface of `EntryKernels`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats.entries import index_layout
from ..addresses import address, rows_at
from ..sparse import EntryKernels, Pieces, typed_rows
from . import packing
from .runtime.threads import pieces_of, run

#: How many elements are about as much work as an entry that is unpacked.
ENTRY_COST = 8
I32, F32, BYTES = torch.int32, torch.float32, torch.uint8

PACK = {
    torch.float32: packing.pack_floats,
    torch.bfloat16: packing.pack_bfloat,
    torch.int8: packing.pack_bytes,
}

VALUE_KINDS = {
    torch.float32: packing.FLOAT32_VALUES,
    torch.bfloat16: packing.BFLOAT16_VALUES,
    torch.int8: packing.INT8_VALUES,
}


class Entries(EntryKernels):
    def prepare(self, device: torch.device) -> None:
        indices = torch.zeros(1, dtype=I32, device="cpu")
        values, residual = torch.zeros(2, 1, dtype=F32, device="cpu")
        pieces, wire = Pieces([1], [0], [1]), torch.zeros(64, dtype=torch.uint8, device="cpu")
        counts = torch.zeros(1, dtype=torch.int32, device="cpu")
        self.pack_indices(indices, None, 0, 1, wire)
        self.unpack_indices(wire[None], 0, 1, counts, indices[None])
        self.pack_index_pieces(indices, pieces, wire)
        self.unpack_index_pieces(wire, pieces, indices)
        for dtype in VALUE_KINDS:
            self.pack_values(values, dtype, wire, indices, None, residual)
            self.pack_value_pieces(values, pieces, dtype, wire)
            self.unpack_value_pieces(wire, pieces, dtype, values)
            if dtype != torch.float32:
                self.unpack_values(wire[None], dtype, values[None])
        self.put_back((indices, values), indices, residual)
        self.take(residual, indices, values, None)
        self.merge(indices, values, [0, 1], 0, 1, torch.zeros_like(indices), torch.zeros_like(values))

    def take(self, residual: Tensor, indices: Tensor, values: Tensor, count: Tensor | None) -> None:
        used, at = len(indices) if count is None else int(count), indices.int()
        packing.take(address(residual, F32), address(at, I32), used, address(values, F32))

    def pack_indices(self, indices: Tensor, count: Tensor | None, base: int, numel: int, wire: Tensor) -> None:
        used = len(indices) if count is None else int(count)
        layout = _layout(numel, len(indices))
        packing.pack_indices(address(indices, I32), used, base, layout, address(wire, BYTES))

    def unpack_indices(self, wires: Tensor, base: int, numel: int, counts: Tensor | None, indices: Tensor) -> None:
        k = indices.shape[1]
        layout = _layout(numel, k)
        (wire, pitch), (index, row) = rows_at(wires, BYTES), rows_at(indices, I32)

        def job(first: int, last: int, piece: int) -> None:
            for i in range(first, last):
                found = packing.unpack_indices(wire + i * pitch, base, numel, layout, k, index + i * row)
                if counts is not None:
                    counts[i] = found

        run(job, len(wires), pieces_of(ENTRY_COST * k * len(wires), len(wires)))

    def pack_values(
        self,
        values: Tensor,
        dtype: torch.dtype,
        wire: Tensor,
        indices: Tensor | None = None,
        count: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        pack = PACK[dtype]
        used = len(values) if count is None else int(count)
        rest = (0, 0, 0)
        if residual is not None and indices is not None:
            rest = address(indices, I32), used, address(residual, F32)
        pack(address(values, F32), len(values), address(wire, BYTES), *rest)

    def unpack_values(self, wires: Tensor, dtype: torch.dtype, values: Tensor) -> None:
        if dtype == torch.float32:
            values.copy_(typed_rows(wires, dtype))
            return
        unpack = packing.unpack_bfloat if dtype == torch.bfloat16 else packing.unpack_bytes
        for wire, row in zip(wires, values, strict=True):
            unpack(address(wire, BYTES), len(row), address(row, F32))

    def pack_index_pieces(
        self, indices: Tensor, pieces: Pieces, wire: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.index_sizes() if begins is None else None, begins)
        packing.pack_index_pieces(table.ctypes.data, len(table), address(indices, I32), begin)

    def unpack_index_pieces(
        self, wire: Tensor, pieces: Pieces, indices: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.index_sizes() if begins is None else None, begins)
        packing.unpack_index_pieces(table.ctypes.data, len(table), begin, address(indices, I32))

    def pack_value_pieces(
        self, values: Tensor, pieces: Pieces, dtype: torch.dtype, wire: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.value_sizes(dtype) if begins is None else None, begins)
        packing.pack_value_pieces(VALUE_KINDS[dtype], table.ctypes.data, len(table), address(values, F32), begin)

    def unpack_value_pieces(
        self, wire: Tensor, pieces: Pieces, dtype: torch.dtype, values: Tensor, begins: Sequence[int] | None = None
    ) -> None:
        table, begin = _table(pieces, wire, pieces.value_sizes(dtype) if begins is None else None, begins)
        where = table.ctypes.data, len(table), begin, address(values, F32)
        packing.unpack_value_pieces(VALUE_KINDS[dtype], *where)

    def put_back(self, entries: tuple[Tensor, Tensor], kept: Tensor, residual: Tensor) -> None:
        indices, values = entries
        where = address(indices, I32), address(values, F32), len(indices)
        packing.put_back(*where, address(kept, I32), len(kept), address(residual, F32))

    def merge(
        self,
        indices: Tensor,
        values: Tensor,
        offsets: Sequence[int],
        start: int,
        stop: int,
        out_indices: Tensor,
        out_values: Tensor,
    ) -> tuple[int, int]:
        lists = len(offsets) - 1
        bounds = np.asarray(offsets, np.int64)
        cursors = np.empty(2 * lists, np.int64)
        scratch = np.empty(packing.MERGE_SCRATCH, np.uint8)
        result: tuple[int, int] = packing.merge(
            address(indices, I32),
            address(values, F32),
            bounds.ctypes.data,
            lists,
            (start, stop),
            address(out_indices, I32),
            address(out_values, F32),
            cursors.ctypes.data,
            scratch.ctypes.data,
        )
        return result


def _table(pieces: Pieces, wire: Tensor, sizes: Sequence[int] | None, begins: Sequence[int] | None) -> Any:
    """Of each piece: entries, base, range, and bytes from its begin to the next one's; and where the first begins."""
    steps = sizes if begins is None else [*(b - a for a, b in pairwise(begins)), 0]
    table = np.array([pieces.counts, pieces.bases, pieces.ranges, steps], np.int64).T.copy()
    return table, address(wire, BYTES) + (0 if begins is None else begins[0])


def _layout(numel: int, k: int) -> tuple[int, int, int]:
    layout = index_layout(numel, k)
    return layout.low_bits, layout.upper_words, layout.low_words
