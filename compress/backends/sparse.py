"""Sparse codecs, whatever the backend: plain entries are selected and summed, and `entry_kernels` packs them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import Backend, Kernels, Workspace, divide
from .entry_kernels import EntryKernels


class SparseKernels(Kernels):
    """A sparse codec: a backend selects and sums plain entries (`encode_plain`, …); packing them is done here.

    A row of plain entries is int32 [1 + k]: how many are used, then their indices.
    """

    entries: EntryKernels

    @abstractmethod
    def encode_plain(
        self,
        codec: Any,
        x: Tensor,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """Select, and write the entries to `row` and `values`, zero behind them. What is selected leaves the residual,
        where it is finite."""

    @abstractmethod
    def add_plain(
        self, codec: Any, row: Tensor, values: Tensor, out: Tensor, alpha: float, workspace: Workspace
    ) -> None: ...

    def mean_plain(self, codec: Any, rows: Tensor, values: Tensor, out: Tensor, workspace: Workspace) -> None:
        """`rows` int32 [P, 1 + k], `values` float32 [P, k]."""
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for row, numbers in zip(rows, values, strict=True):
            self.add_plain(codec, row, numbers, total, 1.0, workspace)
        divide(total, len(rows), out)

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self._encode_entries(codec, x, None, wire, draw, workspace)

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        self._encode_entries(codec, grad, residual, wire, draw, workspace)

    def _encode_entries(
        self,
        codec: Any,
        x: Tensor,
        residual: Tensor | None,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        numel = x.numel()
        indices, values = wire.split(codec.part_bytes(numel))
        packed_indices, packed_values = codec.packs_indices, codec.value_dtype != torch.float32
        room, values_room = self._room(codec, 1, numel, x.device, workspace)
        row = room[0] if packed_indices else indices.view(torch.int32)
        plain = values_room[0] if packed_values else values.view(torch.float32)
        self.encode_plain(codec, x, residual, row, plain, draw, workspace)
        if packed_indices:
            self.entries.pack_indices(row[1:], row[:1], 0, numel, indices)
        if packed_values:
            self.entries.pack_values(plain, codec.value_dtype, values, row[1:], row[:1], residual)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        parts = [part[None] for part in wire.split(codec.part_bytes(out.numel()))]
        rows, values = self._plain(codec, parts, out.numel(), workspace)
        self.add_plain(codec, rows[0], values[0], out, alpha, workspace)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        rows, values = self._plain(codec, wires, out.numel(), workspace)
        self.mean_plain(codec, rows, values, out, workspace)

    def _plain(self, codec: Any, wires: Sequence[Tensor], numel: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """The ranks' entries as they are, unpacked into the workspace where they are packed."""
        (indices, values), ranks = wires, wires[0].shape[0]
        rows, plain = self._room(codec, ranks, numel, indices.device, workspace)
        if codec.packs_indices:
            self.entries.unpack_indices(indices, 0, numel, rows[:, 0], rows[:, 1:])
        else:
            rows = typed_rows(indices, torch.int32)
        if codec.value_dtype != torch.float32:
            self.entries.unpack_values(values, codec.value_dtype, plain)
        else:
            plain = typed_rows(values, torch.float32)
        return rows, plain

    @staticmethod
    def _room(codec: Any, ranks: int, numel: int, device: torch.device, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Room for plain entries: int32 [ranks, 1 + k] and float32 [ranks, k], of those that are packed."""
        room: tuple[Tensor, Tensor] | None = workspace.buffers.get("plain")
        if room is None or len(room[0]) < ranks:
            k = codec.k(numel)
            room = (
                torch.zeros(ranks, 1 + k if codec.packs_indices else 0, dtype=torch.int32, device=device),
                torch.zeros(ranks, k if codec.value_dtype != torch.float32 else 0, dtype=torch.float32, device=device),
            )
            workspace.buffers["plain"] = room
        return room[0][:ranks], room[1][:ranks]


class Selecting(SparseKernels):
    """A sparse codec that has no kernels but its `select`, in torch: the backend packs and adds up what that finds."""

    def __init__(self, backend: Backend) -> None:
        self.entries = backend.entries
        sums = backend.kernels.get("topk")
        if not isinstance(sums, SparseKernels):
            raise ValueError("this backend cannot add up entries: give it kernels for 'topk', whose sums serve all")
        self._sums = sums

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.entries.prepare(device)  # exchanges pack entries even where the codec does not
        super().prepare(codec, dtype, device)

    def encode_plain(
        self,
        codec: Any,
        x: Tensor,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        x = x.float()
        chosen = codec.select(x, draw)
        count = len(chosen)
        row.zero_()
        values.zero_()
        row[0] = count
        row[1 : 1 + count] = chosen
        found = x[chosen]
        values[:count] = found.masked_fill_(found.isnan(), torch.nan)  # one NaN for all

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        Kernels.encode_feedback(self, codec, grad, residual, wire, draw, workspace)

    def add_plain(
        self, codec: Any, row: Tensor, values: Tensor, out: Tensor, alpha: float, workspace: Workspace
    ) -> None:
        self._sums.add_plain(codec, row, values, out, alpha, workspace)

    def mean_plain(self, codec: Any, rows: Tensor, values: Tensor, out: Tensor, workspace: Workspace) -> None:
        self._sums.mean_plain(codec, rows, values, out, workspace)


@cache
def selecting(backend: Backend) -> Selecting:
    """The kernels of sparse codecs that a backend does not know by name.

    Raises:
        ValueError: it has no kernels for top-k, whose sums serve all.
    """
    return Selecting(backend)


def typed_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes, which may lie apart, as rows of 4-byte numbers, without a copy."""
    return whole_rows(rows).view(dtype).as_strided((rows.shape[0], rows.shape[1] // 4), (rows.stride(0) // 4, 1))


def whole_rows(rows: Tensor) -> Tensor:
    """All the memory from the first row's begin to the last row's end, as a flat tensor."""
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        raise ValueError(
            f"rows of shape {tuple(rows.shape)} and strides {rows.stride()} have gaps: make them contiguous"
        )
    return rows.as_strided(((rows.shape[0] - 1) * rows.stride(0) + rows.shape[1],), (1,))
