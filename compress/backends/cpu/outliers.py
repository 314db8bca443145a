"""Outliers on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import Kernels, Workspace, kept
from ..addresses import address
from ..outliers import OutlierKernels, Room, inner_kernels
from . import patching
from .blocks import SPARE, TILE, end_sum, scratch_bytes
from .kernels import KINDS, Blocks, CpuKernels, inverse, note, pieces_of, reserved, run, whole_lines

I32, F32 = torch.int32, torch.float32
#: Elements that are decoded at once, of every rank: their sum stays in the second-level cache.
CHUNK = 1 << 17
SCRATCH = whole_lines(scratch_bytes(TILE))


class Outliers(OutlierKernels, CpuKernels):
    """The gradient is passed twice: `TopK` reads it and the residual, and the inner code does what it always does, on a
    residual that hides what is selected, or by a kernel that leaves it out itself."""

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kept.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
            Kernels.prepare(self, codec, dtype, device)

    def take_out(self, room: Room, x: Tensor | None, target: Tensor) -> None:
        entries, count = (address(room.row[1:], I32), address(room.values, F32)), int(room.row[0])
        source = (KINDS[F32], 0) if x is None else (KINDS[x.dtype], address(x))
        patching.take_out(entries, count, source, address(target, F32), reserved(room.selection, "patch", SCRATCH))

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        inner = inner_kernels(self.codecs, codec.inner, grad.device)
        if not (isinstance(inner, Blocks) and inner.hides):
            super().encode_feedback(codec, grad, residual, wire, draw, workspace)
            return
        room = self.room(codec, grad.numel(), grad.device, workspace)
        indices, values, blocks = wire.split(codec.part_bytes(grad.numel()))
        self.choose(codec, grad, residual, room)
        hidden = address(room.row[1:], I32), address(room.values, F32), int(room.row[0])
        inner.encode_hiding(codec.inner, grad, residual, blocks, hidden, room.inner)
        # Nothing is left of values that are sent as they are.
        self._pack(codec, room, indices, values, None if codec.values == F32 else residual)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        room = self.room(codec, out.numel(), out.device, workspace)
        *entries, blocks = (part[None] for part in wire.split(codec.part_bytes(out.numel())))
        _, ((where, count),) = self._sound(codec, entries, out.numel(), workspace)
        target, inner = address(out, F32), inner_kernels(self.codecs, codec.inner, out.device)
        patching.add_to_values(where, count, 0, target, float(alpha))
        inner.decode_add(codec.inner, blocks[0], out, alpha, room.inner)
        patching.put(where, count, 0, target)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        *entries, blocks = wires
        numel, ranks, block = out.numel(), len(blocks), codec.inner.block_size
        rows, lists = self._sound(codec, entries, numel, workspace)
        size = max(1, CHUNK // block) * block
        record, bounds = codec.inner.wire_bytes(block), range(0, numel, size)
        # Which of a rank's entries lie in which chunk.
        cuts = [
            np.searchsorted(rows[r, 1 : 1 + count].numpy(), [*bounds, numel]).tolist()
            for r, (_, count) in enumerate(lists)
        ]
        inner, pieces = inner_kernels(self.codecs, codec.inner, out.device), pieces_of(numel, len(bounds))
        work = self._work(codec, min(size, numel), pieces, inner, workspace)
        target, factor = (KINDS[out.dtype], address(out)), inverse(ranks)

        def job(first: int, last: int, piece: int) -> None:
            total, scratch, own = work[piece]
            for c in range(first, last):
                start, n = bounds[c], min(size, numel - bounds[c])
                there, place = total[:n].zero_(), address(total)
                wire = slice(start // block * record, -(-(start + n) // block) * record)
                for r, ((index, value), _) in enumerate(lists):
                    at, count = 4 * cuts[r][c], cuts[r][c + 1] - cuts[r][c]
                    inside = index + at, value + at
                    patching.add_to_values(inside, count, start, place, 1.0)
                    inner.decode_add(codec.inner, blocks[r, wire], there, 1.0, own)
                    patching.put(inside, count, start, place)
                end_sum(target[0], place, target[1], start, n, -(-n // 64) * 64, 0, factor, scratch + SPARE)

        run(job, len(bounds), pieces)
        for _, _, own in work:
            workspace.status.add_(own.status)
            own.status.zero_()

    def _sound(
        self, codec: Any, wires: Sequence[Tensor], numel: int, workspace: Workspace
    ) -> tuple[Tensor, list[tuple[tuple[int, int], int]]]:
        """Each rank's indices, behind how many there were; and where its indices and values are, and how many, of the
        entries that count; the others are noted."""
        indices, values = wires
        rows, found = self.arrived(codec, numel, indices.device, len(indices), workspace)
        self.entries.unpack_indices(indices, 0, numel, rows[:, 0], rows[:, 1:])
        self.entries.unpack_values(values, codec.values, found)
        lists = []
        for row, numbers in zip(rows, found, strict=True):
            where = address(row, I32), address(numbers, F32)
            count, skipped, unsound = patching.keep_sound(*where, len(numbers), numel)
            note(workspace, [(skipped, unsound)])
            lists.append(((where[0] + 4, where[1]), count))
        return rows, lists

    def _work(
        self, codec: Any, size: int, pieces: int, inner: Kernels, workspace: Workspace
    ) -> list[tuple[Tensor, int, Workspace]]:
        """For each piece: room for the sum of a chunk, scratch, and a workspace of the inner code's."""
        known: tuple[Any, list[tuple[Tensor, int, Workspace]]] = workspace.buffers.get("work", (None, []))
        if known[0] != (codec, size) or len(known[1]) < pieces:
            scratch = reserved(workspace, "scratch", pieces * SCRATCH)
            device, padded = torch.device("cpu"), -(-size // 64) * 64
            known = (
                (codec, size),
                [
                    (torch.zeros(padded, dtype=F32), scratch + i * SCRATCH, inner.workspace(codec.inner, size, device))
                    for i in range(pieces)
                ],
            )
            workspace.buffers["work"] = known
        return known[1][:pieces]
