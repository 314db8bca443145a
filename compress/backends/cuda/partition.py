"""Entries to the owners of elements, and the owners' means, on a GPU: kernels of csrc/partition.cu."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...formats.entries import index_layout
from .. import partition
from ..partition import Packed
from ..sparse import whole_rows
from ..union import Listed
from .runtime.device import FORMS, STORED, THREADS, Device, device_for, grid_for

FILE = "partition.cu"
#: Threads of a block that fills a row.
ROW_THREADS = 512


class Dealer(partition.Dealer):
    @property
    def _device(self) -> Device:
        return device_for(self.partition.device)

    def _low_bits(self, count: int) -> np.int32:
        return np.int32(index_layout(self.partition.span, count).low_bits)

    def _values(self, rows: Tensor) -> tuple[Tensor, np.int64]:
        return whole_rows(rows), np.int64(rows.stride(0))

    def deal(self, entries: Listed, turn: Tensor) -> None:
        layout, (indices, values), ranks = (
            index_layout(self.partition.span, self.capacity),
            self.sent,
            self.partition.ranks,
        )
        what = *entries, np.int32(self.k), turn, np.int32(ranks), np.int32(self.capacity)
        words = np.int32(layout.low_bits), np.int64(layout.upper_words), np.int64(layout.low_words)
        rows = whole_rows(indices), *self._values(values), np.int32(FORMS[self.dtype])
        arguments = *what, *words, self.places, self.numbers, self.slots, *rows
        self._device.function(FILE, "partition_rows")(ranks, ROW_THREADS, arguments)

    def deliver(
        self,
        entries: Listed,
        turn: Tensor,
        rows: Packed,
        mean: Tensor,
        rank: int,
        out: Tensor,
        residual: Tensor | None,
        counted: Tensor,
    ) -> None:
        span, ranks, share, form = self.partition.span, self.partition.ranks, self.share, np.int32(FORMS[self.dtype])
        self.kernels.unpack_indices(rows[0], 0, span, self.used, self.returned)
        target = out, np.int32(STORED[out.dtype]), np.int64(self.partition.numel)
        means = self.returned, self.used, np.int32(share), self._low_bits(share), *self._values(rows[1]), form
        place = np.int32(ranks), np.int32(rank), turn, mean
        own = *entries, np.int32(self.k), self.slots, np.int32(self.capacity), *self._values(self.sent[1])
        arguments = *target, *means, *place, *own, residual, self.later, counted
        grid = grid_for(ranks * share + self.k, self._device)
        self._device.function(FILE, "partition_deliver")(grid, THREADS, arguments)
