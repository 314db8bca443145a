"""What kernels of `Outliers` have in common: top-k selects, and the kernels of another codec do the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Kernels, Workspace
from .sparse import EntryKernels


def inner_kernels(kernels: Mapping[str, Kernels], inner: Any, device: torch.device) -> Kernels:
    """Those of the backend, or the codec's own where the backend has none."""
    found: Kernels = kernels.get(inner.name) or inner.kernels(device)
    return found


@dataclass
class Room:
    """What a workspace keeps for one codec and length.

    Attributes:
        codec, numel: whose it is.
        selection, inner: the workspaces of the two codecs, with one status.
        rows, values: int32 [ranks, 1 + k] and float32 [ranks, k]: entries as they are, and how many are used.
        rest: float32 [numel], where a gradient is kept without them; made when first needed.
    """

    codec: Any
    numel: int
    selection: Workspace
    inner: Workspace
    rows: Tensor
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
    def take_out(self, room: Room, x: Tensor | None, target: Tensor) -> None:
        """target[index] = -x[index], or zero without x, for the entries of the first row whose value is finite."""

    def choose(self, codec: Any, x: Tensor, residual: Tensor | None, room: Room) -> None:
        """Write the entries of x, or of x + residual, to the first row of `room`. Changes neither."""
        topk: Any = self.codecs["topk"]
        topk.choose(codec.selection, x, residual, room.rows[0], room.values[0], room.selection, update=False)

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        self.room(codec, numel, device, 1, workspace)
        return workspace

    def room(self, codec: Any, numel: int, device: torch.device, ranks: int, workspace: Workspace) -> Room:
        """What the workspace keeps, with entries of at least so many ranks."""
        room: Room | None = workspace.buffers.get("outliers")
        if room is None or (room.codec, room.numel) != (codec, numel):
            selection = self.codecs["topk"].workspace(codec.selection, numel, device)
            inner = inner_kernels(self.codecs, codec.inner, device).workspace(codec.inner, numel, device)
            selection.status = inner.status = workspace.status
            room = Room(codec, numel, selection, inner, *self._rows(codec, numel, ranks, device))
            workspace.buffers["outliers"] = room
        elif len(room.rows) < ranks:
            room.rows, room.values = self._rows(codec, numel, ranks, device)
        return room

    @staticmethod
    def _rows(codec: Any, numel: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
        k = codec.k(numel)
        rows = torch.zeros(ranks, 1 + k, dtype=torch.int32, device=device)
        return rows, torch.zeros(ranks, k, dtype=torch.float32, device=device)

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.codecs["topk"].prepare(codec.selection, dtype, device)
        inner = inner_kernels(self.codecs, codec.inner, device)
        for kind in {dtype, torch.float32}:  # without feedback it is given what is left, as float32
            inner.prepare(codec.inner, kind, device)

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        room = self.room(codec, x.numel(), x.device, 1, workspace)
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
        room = self.room(codec, grad.numel(), grad.device, 1, workspace)
        indices, values, blocks = wire.split(codec.part_bytes(grad.numel()))
        self.choose(codec, grad, residual, room)
        self.take_out(room, grad, residual)  # then their sum is zero there
        inner = inner_kernels(self.codecs, codec.inner, grad.device)
        inner.encode_feedback(codec.inner, grad, residual, blocks, draw, room.inner)
        self._pack(codec, room, indices, values, residual)

    def _pack(self, codec: Any, room: Room, indices: Tensor, values: Tensor, residual: Tensor | None) -> None:
        """What rounding leaves of the values goes to the residual, in the place of what the inner code left there."""
        row, found = room.rows[0], room.values[0]
        self.entries.pack_indices(row[1:], row[:1], 0, room.numel, indices)
        self.entries.pack_values(found, codec.values, values, row[1:], row[:1], residual)
