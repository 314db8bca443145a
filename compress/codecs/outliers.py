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
from ..backends.places import finite_places, sound_places
from ..codec import BlockCodec, Codec, check_number
from ..formats.entries import VALUE_DTYPES, index_fields, value_fields
from ..formats.wire import Part
from .topk import TopK

#: Elements of a piece: 1 MB of float32.
PIECE = 1 << 18


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
    """In torch, around a backend's kernels of `TopK` and of the inner code. The host of a GPU does not wait."""

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
        return workspace

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
        indices, values, blocks = wire.split(codec.part_bytes(len(x)))
        inner, room = self._part(codec.inner, len(x), workspace)
        row, found, selecting = self._entries(codec, len(x), workspace)
        with workspace.scratch.open(len(x), x.device) as total:
            self.topk.encode_raw(codec.selection, total.copy_(x), None, row, found, None, selecting)
            at, taken = finite_places(row, found)
            total.index_copy_(0, at, total[at].masked_fill_(taken, 0.0))
            inner.encode(codec.inner, total, blocks, draw, room)
        self.entries.pack_indices(row[1:], row[:1], 0, len(x), indices)
        self.entries.pack_values(found, codec.values, values)

    def encode_feedback(
        self, codec: Outliers, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        indices, values, blocks = wire.split(codec.part_bytes(len(grad)))
        inner, room = self._part(codec.inner, len(grad), workspace)
        row, found, selecting = self._entries(codec, len(grad), workspace)
        # What is not finite stays, and its block of the inner code shows it.
        self.topk.withhold(codec.selection, grad, residual, row, found, workspace.scratch, selecting)
        inner.encode_feedback(codec.inner, grad, residual, blocks, draw, room)
        self.entries.pack_indices(row[1:], row[:1], 0, len(grad), indices)
        # What the values' rounding leaves goes over what the inner code has left there.
        self.entries.pack_values(found, codec.values, values, row[1:], row[:1], residual)

    def _entries(self, codec: Outliers, numel: int, workspace: Workspace) -> tuple[Tensor, Tensor, Workspace]:
        """Room for a row of plain entries, int32 [1 + k], and their values, float32 [k]; and that of the selection."""
        _, room = self._part(codec.selection, numel, workspace)
        found: tuple[Tensor, Tensor] | None = room.buffers.get("found")
        if found is None:
            row = torch.zeros(1 + codec.k(numel), dtype=torch.int32, device=workspace.status.device)
            found = room.buffers["found"] = row, torch.zeros_like(row[1:], dtype=torch.float32)
        return *found, room

    def decode_add(self, codec: Outliers, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self._decode(codec, parts_of(codec, wire, len(out)), out, alpha, workspace)

    def decode_mean(self, codec: Outliers, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        self._decode(codec, wires, out, None, workspace)

    def _decode(
        self, codec: Outliers, wires: Sequence[Tensor], out: Tensor, alpha: float | None, workspace: Workspace
    ) -> None:
        """`decode_add`, or `decode_mean` where `alpha` is None; on CPUs in pieces that a second-level cache holds."""
        indices, values, blocks = wires
        numel, ranks, device, block = len(out), len(blocks), out.device, codec.inner.block_size
        k = codec.k(numel)
        row = torch.zeros(ranks, 1 + k, dtype=torch.int32, device=device)
        found = torch.zeros(ranks, k, dtype=torch.float32, device=device)
        self.entries.unpack_indices(indices, 0, numel, row[:, 0], row[:, 1:])
        self.entries.unpack_values(values, codec.values, found)
        times = 1.0 if alpha is None else alpha
        if device.type == "cpu":
            piece = max(PIECE // block, 1) * block
            entries = [self._counting(*lists, numel, workspace) for lists in zip(row, found, strict=True)]
            bounds = torch.arange(0, numel + piece, piece, device="cpu")
            cuts = [torch.searchsorted(at, bounds).tolist() for at, _ in entries]
        else:  # the host does not know which count: others are put behind the last element, where nothing reads them
            piece, places = numel, row[:, 1:].long()
            sound = sound_places(places, torch.arange(k, device=device) < row[:, :1], 0, numel)
            workspace.status += torch.stack([row[:, 0].sum() - sound.sum(), (sound & ~found.isfinite()).sum()])
            entries = list(zip(places.masked_fill(~sound, numel), found, strict=True))
            cuts = [[0, k]] * ranks
        in_place = device.type == "cpu" and out.dtype == torch.float32
        with workspace.scratch.open(min(piece, numel) + 1, device) as total:
            for number, start in enumerate(range(0, numel, piece)):
                target = out[start : start + piece]
                begin = start // block * codec.inner.wire_bytes(block)
                sums = target if in_place else total
                part = sums[: len(target)]
                if alpha is None:
                    part.zero_()
                elif not in_place:
                    part.copy_(target)
                inner, room = self._part(codec.inner, len(target), workspace)
                codes = blocks[:, begin : begin + codec.inner.wire_bytes(len(target))]
                for code, (at, value), cut in zip(codes, entries, cuts, strict=True):
                    first, last = cut[number : number + 2]
                    here = at[first:last] - start
                    instead = sums.index_select(0, here) + times * value[first:last]
                    inner.decode_add(codec.inner, code, part, times, room)
                    sums.index_copy_(0, here, instead)
                if alpha is None:
                    divide(part, ranks, target)
                elif not in_place:
                    target.copy_(part)

    @staticmethod
    def _counting(row: Tensor, values: Tensor, numel: int, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Places, int64, and values of those entries of a row that count; the others are noted."""
        used = min(int(row[0]), len(values))
        at, values = row[1 : 1 + used], values[:used]
        ascending = used == 0 or (at[0] >= 0 and at[-1] < numel and bool((at[1:] > at[:-1]).all()))
        at = at.long()
        if not ascending:
            sound = sound_places(at, torch.ones(used, dtype=torch.bool, device="cpu"), 0, numel)
            at, values = at[sound], values[sound]
        workspace.status[0] += int(row[0]) - len(at)
        workspace.status[1] += (~values.isfinite()).sum()
        return at, values
