"""What kernels of `Outliers` have in common: entries are picked, and the kernels of another codec do the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Kernels, Workspace


def inner_kernels(kernels: Mapping[str, Kernels], inner: Any, device: torch.device) -> Kernels:
    """Those of the backend, or the codec's own where the backend has none."""
    found: Kernels = kernels.get(inner.name) or inner.kernels(device)
    return found


@dataclass
class Room:
    """What a workspace keeps for one codec, length and number of ranks.

    Attributes:
        key: whose it is.
        inner: the inner codec's workspace, with the same status.
        chunks, own, inside: how many there are, and bytes of a record that are entries and that are the inner code's.
        index, value: integers and float32 [ranks, chunks · k]: entries.
        counts: int32 [chunks]: how many of them are used, where a backend needs to know.
        blocks: uint8 [ranks, chunks · inside]: the inner code's records without what lies between them on the wire.
        rest: float32 [numel], where a gradient is kept without its entries; made when first needed.
    """

    key: tuple[Any, int, int]
    inner: Workspace
    chunks: int
    own: int
    inside: int
    index: Tensor
    value: Tensor
    counts: Tensor
    blocks: Tensor
    rest: Tensor | None = None

    def rest_of(self, x: Tensor) -> Tensor:
        if self.rest is None:
            self.rest = torch.empty(x.numel(), dtype=torch.float32, device=x.device)
        return self.rest

    def bring_together(self, wires: Tensor) -> Tensor:
        """The inner code's wires [ranks, bytes], of those of the whole code."""
        inner = wires.unflatten(1, (self.chunks, -1))[..., self.own :]
        self.blocks[: len(wires)].view(inner.shape).copy_(inner)
        codec, numel, _ = self.key
        return self.blocks[: len(wires), : codec.inner.wire_bytes(numel)]

    def take_apart(self, wire: Tensor) -> None:
        """The inner code's records, to their places on a wire."""
        wire.view(self.chunks, -1)[:, self.own :].copy_(self.blocks[0].view(self.chunks, -1))


class OutlierKernels(Kernels):
    """A backend picks, settles, and decodes.

    Args:
        kernels: of all codecs.
    """

    index_dtype: torch.dtype

    def __init__(self, kernels: Mapping[str, Kernels]) -> None:
        self.codecs = kernels

    @abstractmethod
    def pick(self, codec: Any, x: Tensor, residual: Tensor | None, target: Tensor, room: Room, wire: Tensor) -> None:
        """Keep in `room` what is selected of x, or of x + residual, and make target[index] such that the inner code
        sees zero there: -x[index] where the target is the residual, else 0."""

    @abstractmethod
    def settle(self, codec: Any, room: Room, wire: Tensor, residual: Tensor | None) -> None:
        """Let the residual be what rounding leaves of the values. Then the entries are on the wire."""

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        self.room(codec, numel, device, 1, workspace)
        return workspace

    def room(self, codec: Any, numel: int, device: torch.device, ranks: int, workspace: Workspace) -> Room:
        """What the workspace keeps, with room for at least so many ranks."""
        room: Room | None = workspace.buffers.get("outliers")
        if room is not None and room.key[:2] == (codec, numel) and room.key[2] >= ranks:
            return room
        chunk, k = codec.block_size, codec.k
        chunks, own, inside = -(-numel // chunk), codec.selection.wire_bytes(chunk), codec.inner.wire_bytes(chunk)
        inner = inner_kernels(self.codecs, codec.inner, device).workspace(codec.inner, numel, device)
        inner.status = workspace.status
        index = torch.zeros(ranks, chunks * k, dtype=self.index_dtype, device=device)
        value = torch.zeros_like(index, dtype=torch.float32)
        counts = torch.zeros(chunks, dtype=torch.int32, device=device)
        blocks = torch.zeros(ranks, chunks * inside, dtype=torch.uint8, device=device)
        room = Room((codec, numel, ranks), inner, chunks, own, inside, index, value, counts, blocks)
        workspace.buffers["outliers"] = room
        return room

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        inner = inner_kernels(self.codecs, codec.inner, device)
        for kind in {dtype, torch.float32}:  # without feedback it is given what is left, as float32
            inner.prepare(codec.inner, kind, device)

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        room = self.room(codec, x.numel(), x.device, 1, workspace)
        rest = room.rest_of(x).copy_(x)
        self.pick(codec, x, None, rest, room, wire)
        inner = inner_kernels(self.codecs, codec.inner, x.device)
        inner.encode(codec.inner, rest, self._blocks(codec, room), draw, room.inner)
        room.take_apart(wire)
        self.settle(codec, room, wire, None)

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        room = self.room(codec, grad.numel(), grad.device, 1, workspace)
        self.pick(codec, grad, residual, residual, room, wire)
        inner = inner_kernels(self.codecs, codec.inner, grad.device)
        inner.encode_feedback(codec.inner, grad, residual, self._blocks(codec, room), draw, room.inner)
        room.take_apart(wire)
        self.settle(codec, room, wire, residual)

    @staticmethod
    def _blocks(codec: Any, room: Room) -> Tensor:
        return room.blocks[0, : codec.inner.wire_bytes(room.key[1])]
