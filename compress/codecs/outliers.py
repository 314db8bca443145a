"""Outliers: the largest elements exactly, and all the others in another code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import Backend, Kernels, SparseKernels, Workspace, backend_for
from ..backends.kernels import divide, parts_of
from ..backends.places import sound_places
from ..codec import BlockCodec, Codec, check_number
from ..formats.entries import VALUE_DTYPES, index_fields, value_fields
from ..formats.wire import Part
from .topk import TopK


@dataclass(frozen=True)
class Outliers(Codec):
    """The k largest magnitudes as `TopK` sends them, and the rest in a code of blocks (as outliers of weights beside
    their low-bit codes: Dettmers et al., "SpQR", ICLR 2024).

    Gradients are heavy-tailed within a block: a code of few levels caps the outliers, which then arrive late and swell
    the residual. With the largest sent beside it, the levels fit what is left.

    k = max(1, ⌈density · n⌉). What is selected counts as zero for the inner code, and what that says of it is not
    heard; only what is not finite stays, so that its whole block is seen to be. What neither has sent is the residual,
    the rounding of values included. Unbiased if the inner code is and values are float32.

    It goes through the exchange "gather": its entries lie anywhere in the gradient, so no slice of the wire is one of
    the gradient, as "two_pass" needs; and most of the gradient has no entry, as "union" and "split" need. That it looks
    for them in the whole gradient is what makes it learn: with the largest 1 % of each 8192 elements the text model of
    docs/tables-learning.md ended 11 % above float32 under SGD, in the place of 2 %.

    Args:
        inner: codes the rest: `OneBit()`, `Ternary()`, `QSGD()` or any other `BlockCodec`.
        density: share of the elements that are sent as they are, in (0, 1]. 0.01 costs 0.41 bits an element.
        values: how these travel: torch.float32, torch.bfloat16 or torch.int8, as in `TopK`.

    Raises:
        TypeError: `inner` is no codec of blocks.
        ValueError: another argument is out of range.
    """

    name: ClassVar[str] = "outliers"
    source: ClassVar[str] = "Dettmers et al. 2024"

    inner: BlockCodec
    density: float = 0.01
    values: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not isinstance(self.inner, BlockCodec):
            raise TypeError(f"inner={self.inner!r}: expected a codec of blocks, such as OneBit(), Ternary() or QSGD()")
        check_number("density", self.density, 0.0, 1.0)
        if self.values not in VALUE_DTYPES:
            raise ValueError(f"values={self.values!r}: expected one of {', '.join(map(str, VALUE_DTYPES))}")

    @property
    def selection(self) -> TopK:
        """The codec of what is sent as it is."""
        return TopK(density=self.density, values=self.values)

    def k(self, numel: int) -> int:
        """The most entries that a gradient of `numel` elements has."""
        return self.selection.k(numel)

    @property
    def stochastic(self) -> bool:
        return self.inner.stochastic

    @property
    def lossless(self) -> bool:
        return self.inner.lossless and self.values == torch.float32

    def with_feedback(self) -> Outliers:
        inner = self.inner.with_feedback()
        assert isinstance(inner, BlockCodec)
        return replace(self, inner=inner)

    @property
    def speed_key(self) -> Outliers:
        return replace(self, density=self.selection.speed_key.density)

    def parts(self, numel: int) -> tuple[Part, ...]:
        if numel >= 1 << 31:
            raise ValueError(f"Outliers sends 32-bit indices and cannot serve {numel} elements: use buckets below 2^31")
        k = self.k(numel)
        entries = Part("indices", index_fields(numel, k), 1), Part("values", value_fields(k, self.values), 1)
        return *entries, *self.inner.parts(numel)

    def kernels(self, device: torch.device) -> Kernels:
        return OutlierKernels.of(backend_for(device))


class OutlierKernels(Kernels[Outliers]):
    """In torch, around a backend's kernels of `TopK` and of the inner code. The host of a GPU does not wait.

    Entries that are not used, or do not count, are put behind the last element, where nothing reads them.
    """

    def __init__(self, backend: Backend) -> None:
        topk = backend.kernels["topk"]
        assert isinstance(topk, SparseKernels)
        self.codecs, self.topk, self.entries = backend.kernels, topk, backend.entries

    @staticmethod
    @cache
    def of(backend: Backend) -> OutlierKernels:
        return OutlierKernels(backend)

    def workspace(self, codec: Outliers, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        for part in (codec.selection, codec.inner):
            self._part(part, numel, workspace)
        self._sum(numel, workspace)
        return workspace

    @staticmethod
    def _sum(numel: int, workspace: Workspace) -> Tensor:
        """Memory for float32 [n + 1], made when it is first asked for."""
        found: Tensor | None = workspace.buffers.get(("sum", numel))
        if found is None:
            found = torch.zeros(numel + 1, dtype=torch.float32, device=workspace.status.device)
            workspace.buffers["sum", numel] = found
        return found

    def _part(self, codec: Codec, numel: int, workspace: Workspace) -> tuple[Kernels, Workspace]:
        """The kernels of the selection or of the inner code, and their memory, made when it is first asked for."""
        part: tuple[Kernels, Workspace] | None = workspace.buffers.get((codec, numel))
        if part is None:
            device = workspace.status.device
            kernels = self.codecs.get(codec.name) or codec.kernels(device)
            part = workspace.buffers[codec, numel] = kernels, kernels.workspace(codec, numel, device)
            part[1].status = workspace.status
        return part

    def prepare(self, codec: Outliers, dtype: torch.dtype, device: torch.device) -> None:
        self.topk.prepare(codec.selection, torch.float32, device)
        inner = self.codecs.get(codec.inner.name) or codec.inner.kernels(device)
        for kind in {dtype, torch.float32}:  # without feedback it is given what is left, as float32
            inner.prepare(codec.inner, kind, device)

    def encode(self, codec: Outliers, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        total = self._sum(len(x), workspace)
        total[:-1].copy_(x)
        indices, values, blocks = wire.split(codec.part_bytes(len(x)))
        row, found, taken = self._select(codec, total, workspace)
        total.index_fill_(0, torch.where(taken, row[1:], len(x)).long(), 0.0)
        inner, room = self._part(codec.inner, len(x), workspace)
        inner.encode(codec.inner, total[:-1], blocks, draw, room)
        self.entries.pack_indices(row[1:], row[:1], 0, len(x), indices)
        self.entries.pack_values(found, codec.values, values)

    def encode_feedback(
        self, codec: Outliers, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        total = self._sum(len(grad), workspace)
        torch.add(grad, residual, out=total[:-1])
        indices, values, blocks = wire.split(codec.part_bytes(len(grad)))
        row, found, taken = self._select(codec, total, workspace)
        total[:-1].copy_(grad)
        total.index_fill_(0, torch.where(taken, row[1:], len(grad)).long(), 0.0)
        # Of the residual there is no element behind the last: the first place taken, if any, stands in for others.
        at = torch.where(taken, row[1:], row[1:].gather(0, taken.byte().argmax()[None])).long()
        residual.index_copy_(0, at, residual[at].masked_fill_(taken.any(), 0.0))
        inner, room = self._part(codec.inner, len(grad), workspace)
        inner.encode_feedback(codec.inner, total[:-1], residual, blocks, draw, room)
        self.entries.pack_indices(row[1:], row[:1], 0, len(grad), indices)
        # What the values' rounding leaves goes over what the inner code has left there.
        self.entries.pack_values(found, codec.values, values, row[1:], row[:1], residual)

    def _select(self, codec: Outliers, total: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
        """The largest of the first n, float32 [n + 1]: a row of plain entries, int32 [1 + k], their values, float32
        [k], and which are taken from the inner code, bool [k]: others are not finite, which their blocks must show."""
        numel, device = len(total) - 1, total.device
        k = codec.k(numel)
        row = torch.zeros(1 + k, dtype=torch.int32, device=device)
        values = torch.zeros(k, dtype=torch.float32, device=device)
        _, room = self._part(codec.selection, numel, workspace)
        self.topk.encode_raw(codec.selection, total[:-1], None, row, values, None, room)
        return row, values, (torch.arange(k, device=device) < row[:1]) & values.isfinite()

    def decode_add(self, codec: Outliers, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        total = self._sum(len(out), workspace)
        total[:-1].copy_(out)
        self._add(codec, parts_of(codec, wire, len(out)), total, alpha, workspace)
        out.copy_(total[:-1])

    def decode_mean(self, codec: Outliers, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        total = self._sum(len(out), workspace).zero_()
        self._add(codec, wires, total, 1.0, workspace)
        divide(total[:-1], len(wires[0]), out)

    def _add(self, codec: Outliers, wires: Sequence[Tensor], total: Tensor, alpha: float, workspace: Workspace) -> None:
        """total += alpha · decoded, rank after rank; float32 [n + 1]."""
        indices, values, blocks = wires
        numel, ranks, device = len(total) - 1, len(blocks), total.device
        k = codec.k(numel)
        row = torch.zeros(ranks, 1 + k, dtype=torch.int32, device=device)
        found = torch.zeros(ranks, k, dtype=torch.float32, device=device)
        self.entries.unpack_indices(indices, 0, numel, row[:, 0], row[:, 1:])
        self.entries.unpack_values(values, codec.values, found)
        claimed, places = row[:, :1], row[:, 1:].long()
        sound = sound_places(places, torch.arange(k, device=device) < claimed, 0, numel)
        workspace.status += torch.stack([claimed.sum() - sound.sum(), (sound & ~found.isfinite()).sum()])
        inner, room = self._part(codec.inner, numel, workspace)
        for at, value, block in zip(places.masked_fill(~sound, numel), found, blocks, strict=True):
            instead = total[at] + alpha * value
            inner.decode_add(codec.inner, block, total[:-1], alpha, room)
            total.index_copy_(0, at, instead)
