"""Kernels of `Outliers` on any backend: top-k selects, and the kernels of another codec do the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .kernels import Kernels, Workspace, parts_of
from .sparse import EntryKernels

#: Indices, behind how many are used; and values.
Entries = tuple[Tensor, Tensor]


def inner_kernels(kernels: Mapping[str, Kernels], inner: Any, device: torch.device) -> Kernels:
    """Those of the backend, or the codec's own where the backend has none."""
    found: Kernels = kernels.get(inner.name) or inner.kernels(device)
    return found


@dataclass
class Room:
    """The memory of a workspace for one codec and length.

    Attributes:
        codec, numel: whose it is.
        selection, inner: the workspaces of the two codecs, with one status.
        row, values: int32 [1 + k] and float32 [k]: the entries that are encoded, as they are, and how many are used.
        rest: float32 [numel], where a gradient is kept without them; made when first needed.
    """

    codec: Any
    numel: int
    selection: Workspace
    inner: Workspace
    row: Tensor
    values: Tensor
    rest: Tensor | None = None


class OutlierKernels(Kernels):
    """A backend says how entries are taken out, and decodes.

    Args:
        kernels: of all codecs. That for "topk" has `choose`, which selects without taking anything from the residual.
        entries: what packs entries.
    """

    def __init__(self, kernels: Mapping[str, Kernels], entries: EntryKernels) -> None:
        self.codecs, self.entries = kernels, entries

    @abstractmethod
    def add(self, codec: Any, wires: Sequence[Tensor], out: Tensor, alpha: float, workspace: Workspace) -> None:
        """Rank after rank, out += alpha · decoded; `out` is float32."""

    @abstractmethod
    def take_out(self, room: Room, x: Tensor | None, target: Tensor) -> None:
        """target[index] = -x[index], or zero without x, for the entries of `room` whose value is finite."""

    def choose(self, codec: Any, x: Any, residual: Tensor | None, room: Room, *how: Any) -> None:
        """Write the entries of x, or of x + residual, to `room`. Changes neither, unless `how` says so to the backend's
        kernels."""
        topk: Any = self.codecs["topk"]
        topk.choose(codec.selection, x, residual, room.row, room.values, room.selection, False, *how)

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        self.room(codec, numel, device, workspace)
        return workspace

    def room(self, codec: Any, numel: int, device: torch.device, workspace: Workspace) -> Room:
        """The workspace's memory for encoding."""
        room: Room | None = workspace.buffers.get("outliers")
        if room is None or (room.codec, room.numel) != (codec, numel):
            selection = self.codecs["topk"].workspace(codec.selection, numel, device)
            inner = inner_kernels(self.codecs, codec.inner, device).workspace(codec.inner, numel, device)
            selection.status = inner.status = workspace.status
            (row,), (values,) = self._entries(codec.k(numel), 1, device)
            room = workspace.buffers["outliers"] = Room(codec, numel, selection, inner, row, values)
        return room

    def arrived(self, codec: Any, numel: int, device: torch.device, ranks: int, workspace: Workspace) -> Entries:
        """Memory for the entries of ranks that are decoded: int32 [ranks, 1 + k] and float32 [ranks, k].

        Apart from what is encoded: a GPU may encode on another stream than it decodes on, and must not be handed that
        stream's memory while it is in use there, as the allocator would where more ranks need more.
        """
        k = codec.k(numel)
        rows, values = workspace.buffers.get("arrived", (None, None))
        if rows is None or len(rows) < ranks or rows.shape[1] != 1 + k:
            rows, values = workspace.buffers["arrived"] = self._entries(k, ranks, device)
        return rows[:ranks], values[:ranks]

    @staticmethod
    def _entries(k: int, ranks: int, device: torch.device) -> Entries:
        rows = torch.zeros(ranks, 1 + k, dtype=torch.int32, device=device)
        return rows, torch.zeros(ranks, k, dtype=torch.float32, device=device)

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.codecs["topk"].prepare(codec.selection, dtype, device)
        inner = inner_kernels(self.codecs, codec.inner, device)
        for kind in {dtype, torch.float32}:  # without feedback it is given what is left, as float32
            inner.prepare(codec.inner, kind, device)

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        room = self.room(codec, x.numel(), x.device, workspace)
        indices, values, blocks = wire.split(codec.part_bytes(x.numel()))
        self.choose(codec, x, None, room)
        if room.rest is None:
            room.rest = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
        room.rest.copy_(x)
        self.take_out(room, None, room.rest)
        inner = inner_kernels(self.codecs, codec.inner, x.device)
        inner.encode(codec.inner, room.rest, blocks, draw, room.inner)
        self._pack(codec, room, indices, values, None)

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        room = self.room(codec, grad.numel(), grad.device, workspace)
        indices, values, blocks = wire.split(codec.part_bytes(grad.numel()))
        self.choose(codec, grad, residual, room)
        self.take_out(room, grad, residual)  # then their sum is zero there
        inner = inner_kernels(self.codecs, codec.inner, grad.device)
        inner.encode_feedback(codec.inner, grad, residual, blocks, draw, room.inner)
        self._pack(codec, room, indices, values, residual)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self.add(codec, parts_of(codec, wire, out.numel()), out, alpha, workspace)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        total, ranks = out, len(wires[0])
        if out.dtype != torch.float32:
            room = self.room(codec, out.numel(), out.device, workspace)
            if room.rest is None:
                room.rest = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
            total = room.rest
        total.zero_()
        self.add(codec, wires, total, 1.0, workspace)
        total.mul_(float(np.float32(1) / np.float32(ranks)))
        if total is not out:
            out.copy_(total)

    def _pack(self, codec: Any, room: Room, indices: Tensor, values: Tensor, residual: Tensor | None) -> None:
        """Write the rounding errors of the values to the residual, over those of the inner code."""
        where, count = room.row[1:], room.row[:1]
        self.entries.pack_indices(where, count, 0, room.numel, indices)
        self.entries.pack_values(room.values, codec.values, values, where, count, residual)
