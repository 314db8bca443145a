"""Outliers on a GPU: what launches the kernels of csrc/outliers.cu, between those of the inner code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...entries import index_layout
from .. import Workspace, kept
from ..outliers import OutlierKernels, Room, inner_kernels
from ..sparse import whole_rows
from .device import SUFFIXES, THREADS, Argument, device_for, grid_for

FILE = "outliers.cu"
Arguments = tuple[Argument, ...]


class Outliers(OutlierKernels):
    """Two passes over the gradient encode it. Decoding passes over the sum once for each rank. Indices count from the
    start of their chunks."""

    index_dtype = torch.int32

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kept.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
            for name in (f"pick_{SUFFIXES[dtype]}", "list", "add_to_values", "put"):
                device_for(device).function(FILE, f"outliers_{name}")

    def pick(self, codec: Any, x: Tensor, residual: Tensor | None, target: Tensor, room: Room, wire: Tensor) -> None:
        left, numel = room.value[0], np.int64(x.numel())
        size = np.int64(room.own + room.inside)
        args: Arguments = x, residual, target, wire, size, room.index[0], left, numel, *_form(codec)
        device_for(x.device).launch(FILE, f"outliers_pick_{SUFFIXES[x.dtype]}", room.chunks, args)

    def settle(self, codec: Any, room: Room, wire: Tensor, residual: Tensor | None) -> None:
        if residual is not None:
            self._put(codec, residual, room, 0)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self._add(codec, wire[None], out, alpha, workspace)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        total, ranks = out, len(wires[0])
        if out.dtype != torch.float32:
            total = self.room(codec, out.numel(), out.device, ranks, workspace).rest_of(out)
        self._add(codec, wires[0], total.zero_(), 1.0, workspace)
        total.mul_(float(np.float32(1) / np.float32(ranks)))
        if total is not out:
            out.copy_(total)

    def _add(self, codec: Any, wires: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        """Rank after rank, out += alpha · decoded; `out` is float32."""
        ranks = len(wires)
        room = self.room(codec, out.numel(), out.device, ranks, workspace)
        device, blocks = device_for(out.device), room.bring_together(wires)
        entries, size = np.int64(room.index.shape[1]), np.int64(room.own + room.inside)
        rows: Arguments = whole_rows(wires), np.int64(wires.stride(0)), np.int32(ranks), size
        lists: Arguments = room.index, room.value, entries, np.int64(out.numel()), *_form(codec), workspace.status
        device.launch(FILE, "outliers_list", room.chunks, (*rows, *lists))
        inner = inner_kernels(self.codecs, codec.inner, out.device)
        add, grid = device.function(FILE, "outliers_add_to_values"), grid_for(int(entries), device)
        for rank in range(ranks):
            add(grid, THREADS, (out, np.float32(alpha), *self._lists(codec, room, rank)))
            inner.decode_add(codec.inner, blocks[rank], out, alpha, room.inner)
            self._put(codec, out, room, rank)

    def _put(self, codec: Any, out: Tensor, room: Room, rank: int) -> None:
        device, lists = device_for(out.device), self._lists(codec, room, rank)
        grid = grid_for(room.index.shape[1], device)
        device.function(FILE, "outliers_put")(grid, THREADS, (out, *lists))

    @staticmethod
    def _lists(codec: Any, room: Room, rank: int) -> Arguments:
        entries = np.int64(room.index.shape[1])
        return room.index[rank], room.value[rank], entries, np.int32(codec.block_size), np.int32(codec.k)


def _form(codec: Any) -> Arguments:
    top = codec.selection
    layout = index_layout(top.chunk, top.k)
    form = top.chunk, top.k, top.bits, layout.low_bits, layout.upper_words, layout.low_words
    return tuple(np.int32(number) for number in form)
