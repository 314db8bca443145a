"""Outliers: the largest elements exactly, all others by the kernels of another codec."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, float32, int32

from ... import Kernels, MomentumInput, Workspace, kernel_cache
from ...addresses import address
from ...kernels import parts_of
from ...outliers import OutlierKernels, Room, inner_kernels
from ..block_codec import Blocks, CpuKernels
from ..entries import ENTRY_COST
from ..runtime.blocks import How, element, scratch_bytes
from ..runtime.dtypes import F32, INF_BITS, KINDS, TILE, ZERO, Source, int_at, key_at, width
from ..runtime.fused_inputs import SUMMED, source_of
from ..runtime.simd import compiled, get_f32, get_u32, store
from ..runtime.threads import inverse, note, pieces_of, reserved, run, whole_lines
from .topk_select import Pointers


@compiled
def take_out(entries: Pointers, count: int, x: Source, target: int, scratch: int) -> None:
    """target[index] = -x[index], or zero if x is 0, for entries whose value is finite."""
    index, value = entries
    kind, source = x
    for i in range(0, 4 * count, 4):
        if key_at(value + i) < INF_BITS:
            at = int_at(index + i)
            left = ZERO
            if source:
                left = ZERO - element(kind, source + at * width(kind), scratch)
            store(target + 4 * at, left)


@compiled
def keep_sound(row: int, value: int, k: int, numel: int) -> tuple[int, int, int]:
    """Of the entries behind their number, those move up whose index is in range and above every index in range before
    it. Returns how many they are, how many others, and how many of them are not finite."""
    claimed = int_at(row)
    index, kept, before, unsound = row + 4, 0, -1, 0
    for i in range(0, 4 * min(claimed, k), 4):
        at = int_at(index + i)
        if before < at < numel:
            before = at
            unsound += key_at(value + i) >= INF_BITS
            store(index + kept, get_u32(index + i))
            store(value + kept, get_u32(value + i))
            kept += 4
    return kept >> 2, claimed - (kept >> 2), unsound


@compiled
def add_to_values(entries: Pointers, count: int, out: int, alpha: float) -> None:
    """value = out[index] + alpha · value."""
    index, value = entries
    times = F32(alpha)
    for i in range(0, 4 * count, 4):
        store(value + i, get_f32(out + 4 * int_at(index + i)) + times * get_f32(value + i))


@compiled
def put(entries: Pointers, count: int, out: int) -> None:
    """out[index] = value."""
    index, value = entries
    for i in range(0, 4 * count, 4):
        store(out + 4 * int_at(index + i), get_f32(value + i))


SCRATCH = whole_lines(scratch_bytes(TILE))


def sums(codec: Any, inner: Any) -> bool:
    """Whether the inner code can read what `TopK` has summed up: a block must lie in one tile, since what is too large
    stays as it was by tiles, and what is not finite by blocks."""
    return isinstance(inner, Blocks) and inner.hides and TILE % inner.block(codec.inner) == 0


class Outliers(OutlierKernels, CpuKernels):
    """Two passes: `TopK` reads gradient and residual, and the inner code does what it always does, on a residual
    that hides what is selected, or by a kernel that leaves it out itself. Where its blocks are parts of a tile, the
    first pass leaves the sum of both in the residual, and the second has nothing else to read. Decoding passes over the
    sum once, if the kernel of the inner code takes what is selected too, else three times for each rank."""

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
            Kernels.prepare(self, codec, dtype, device)

    def take_out(self, room: Room, x: Tensor | None, target: Tensor) -> None:
        entries, count = (address(room.row[1:], int32), address(room.values, float32)), int(room.row[0])
        source = (KINDS[float32], 0) if x is None else (KINDS[x.dtype], address(x))
        take_out(entries, count, source, address(target, float32), reserved(room.selection, "patch", SCRATCH))

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        if not self._encode(codec, x, None, wire, workspace):
            super().encode(codec, x, wire, draw, workspace)

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        if not self._encode(codec, grad, residual, wire, workspace):
            super().encode_feedback(codec, grad, residual, wire, draw, workspace)

    def encode_momentum(
        self,
        codec: Any,
        x: MomentumInput,
        residual: Tensor,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        inner = inner_kernels(self.codecs, codec.inner, residual.device)
        if x.source is None or not sums(codec, inner):
            super().encode_momentum(codec, x, residual, wire, draw, workspace)
        else:
            self._encode(codec, x, residual, wire, workspace)

    def _encode(
        self, codec: Any, x: Tensor | MomentumInput, residual: Tensor | None, wire: Tensor, workspace: Workspace
    ) -> bool:
        """Without copies, where the kernel of the inner code hides what is selected."""
        inner, numel = inner_kernels(self.codecs, codec.inner, wire.device), x.numel()
        if not (isinstance(inner, Blocks) and inner.hides):
            return False
        room = self.room(codec, numel, wire.device, workspace)
        indices, values, blocks = wire.split(codec.part_bytes(numel))
        summed = 0 if residual is None or not sums(codec, inner) else self._summed(room, workspace)
        self.choose(codec, x, residual, room, summed)
        source = (SUMMED, summed) if summed else source_of(x)
        hidden = address(room.row[1:], int32), address(room.values, float32), int(room.row[0])
        inner.encode_hiding(codec.inner, source, numel, residual, blocks, hidden, room.inner)
        # Nothing is left of values that are sent as they are.
        self._pack(codec, room, indices, values, None if codec.values == float32 else residual)
        return True

    @staticmethod
    def _summed(room: Room, workspace: Workspace) -> int:
        """The address of a record of `fused_inputs.SUMMED`. Its float32 are not touched, and so take no memory,
        unless a gradient is too large."""
        aside, record = workspace.buffers.get("summed", (None, None))
        if aside is None or aside.numel() != room.numel:
            aside = torch.empty(room.numel, dtype=float32, device="cpu")
            flags = reserved(workspace, "flags", -(-room.numel // TILE))
            record = np.array([address(aside, float32), flags], np.int64)
            workspace.buffers["summed"] = aside, record
        return int(record.ctypes.data)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        if not self._decode(codec, parts_of(codec, wire, out.numel()), out, (float(alpha), 1, 1.0), workspace):
            super().decode_add(codec, wire, out, alpha, workspace)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        if not self._decode(codec, wires, out, (1.0, 0, inverse(len(wires[0]))), workspace):
            super().decode_mean(codec, wires, out, workspace)

    def _decode(self, codec: Any, wires: Sequence[Tensor], out: Tensor, how: How, workspace: Workspace) -> bool:
        """One pass, where the kernel of the inner code takes what counts in the place of what it decodes."""
        inner = inner_kernels(self.codecs, codec.inner, out.device)
        if not (isinstance(inner, Blocks) and inner.shows):
            return False
        lists = np.array(
            [(*where, count) for where, count in self._sound(codec, wires, out.numel(), workspace)], np.int64
        )
        room = self.room(codec, out.numel(), out.device, workspace)
        inner.decode_showing(codec.inner, wires[-1], out, how, lists, room.inner)
        return True

    def add(self, codec: Any, wires: Sequence[Tensor], out: Tensor, alpha: float, workspace: Workspace) -> None:
        inner, target = inner_kernels(self.codecs, codec.inner, out.device), address(out, float32)
        room = self.room(codec, out.numel(), out.device, workspace)
        lists = self._sound(codec, wires, out.numel(), workspace)
        for (where, count), wire in zip(lists, wires[-1], strict=True):
            add_to_values(where, count, target, float(alpha))
            inner.decode_add(codec.inner, wire, out, alpha, room.inner)
            put(where, count, target)

    def _sound(
        self, codec: Any, wires: Sequence[Tensor], numel: int, workspace: Workspace
    ) -> list[tuple[tuple[int, int], int]]:
        """Where each rank's indices and values are, and how many, of the entries that count; the others are noted."""
        indices, values = wires[:2]
        rows, found = self.arrived(codec, numel, indices.device, len(indices), workspace)
        self.entries.unpack_indices(indices, 0, numel, rows[:, 0], rows[:, 1:])
        self.entries.unpack_values(values, codec.values, found)
        places = [(address(row, int32), address(numbers, float32)) for row, numbers in zip(rows, found, strict=True)]
        k, ranks = found.shape[1], len(rows)

        def job(first: int, last: int, piece: int) -> list[tuple[int, int, int]]:
            return [keep_sound(*where, k, numel) for where in places[first:last]]

        kept = list(chain.from_iterable(run(job, ranks, pieces_of(ENTRY_COST * k * ranks, ranks))))
        note(workspace, [(skipped, unsound) for _, skipped, unsound in kept])
        return [((index + 4, value), count) for (index, value), (count, _, _) in zip(places, kept, strict=True)]
