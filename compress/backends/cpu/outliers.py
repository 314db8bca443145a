"""Outliers on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import Kernels, Workspace, kept
from ..addresses import address
from ..outliers import OutlierKernels, Room, inner_kernels
from . import picking
from .blocks import SPARE, TILE, end_sum, scratch_bytes
from .chunked import Form, chunk_scratch
from .kernels import KINDS, ChunkedTopK, CpuKernels, Hiding, inverse, note, pieces_of, reserved, run, whole_lines

I32, I64, F32, BYTES = torch.int32, torch.int64, torch.float32, torch.uint8
#: Elements that are decoded at once, of every rank: their sum stays in the second-level cache.
AT_ONCE = 1 << 17
SUM_SCRATCH = whole_lines(scratch_bytes(TILE))
#: Kernels that code a chunk as soon as its entries are picked, by the inner codec's name.
AROUND: dict[str, Callable] = {"onebit": picking.around_onebit, "ternary": picking.around_ternary}


class Outliers(OutlierKernels, CpuKernels):
    """One pass over the gradient where the kernel of the inner code hides entries, else two."""

    index_dtype = I64

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kept.task(type(codec).__name__):
            super().prepare(codec, dtype, device)
            Kernels.prepare(self, codec, dtype, device)

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        if codec.inner.name in AROUND:
            self._encode(codec, x, 0, wire, workspace)
        else:
            super().encode(codec, x, wire, draw, workspace)

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        if codec.inner.name in AROUND:
            self._encode(codec, grad, address(residual, F32), wire, workspace)
        else:
            super().encode_feedback(codec, grad, residual, wire, draw, workspace)

    def _encode(self, codec: Any, x: Tensor, residual: int, wire: Tensor, workspace: Workspace) -> None:
        inner = inner_kernels(self.codecs, codec.inner, x.device)
        assert isinstance(inner, Hiding)
        kernel, options = AROUND[codec.inner.name], inner.options(codec.inner)
        numel, source, target = x.numel(), (KINDS[x.dtype], address(x)), address(wire, BYTES)
        chunks, form = -(-numel // codec.block_size), _form(codec)
        pieces, picking_size = pieces_of(numel, chunks), _picking(codec)
        size = picking_size + whole_lines(inner.scratch(codec.inner))
        scratch = reserved(workspace, "around", pieces * size)

        def job(first: int, last: int, piece: int) -> None:
            own = scratch + piece * size
            kernel(source, residual, target, (numel, first, last), form, *options, own, own + picking_size)

        run(job, chunks, pieces)

    def pick(self, codec: Any, x: Tensor, residual: Tensor | None, target: Tensor, room: Room, wire: Tensor) -> None:
        source, old = (KINDS[x.dtype], address(x)), 0 if residual is None else address(residual, F32)
        span, scratch = (x.numel(), 0, room.chunks), reserved(room.inner, "picking", _picking(codec))
        picking.pick_all(source, old, address(target, F32), span, _form(codec), _lists(room), scratch)

    def settle(self, codec: Any, room: Room, wire: Tensor, residual: Tensor | None) -> None:
        target, size = address(wire, BYTES), room.own + room.inside
        old, span = 0 if residual is None else address(residual, F32), (room.key[1], 0, room.chunks)
        scratch = reserved(room.inner, "picking", _picking(codec))
        picking.pack_all(target, size, old, span, _form(codec), _lists(room), scratch)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        room = self.room(codec, out.numel(), out.device, 1, workspace)
        ((where, count),) = self._entries(codec, wire[None], room, workspace)
        target, inner = address(out, F32), inner_kernels(self.codecs, codec.inner, out.device)
        picking.add_to_values(where, count, 0, target, float(alpha))
        inner.decode_add(codec.inner, room.bring_together(wire[None])[0], out, alpha, room.inner)
        picking.put(where, count, 0, target)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        numel, ranks, block = out.numel(), len(wires[0]), codec.inner.block_size
        room = self.room(codec, numel, out.device, ranks, workspace)
        lists, blocks = self._entries(codec, wires[0], room, workspace), room.bring_together(wires[0])
        size = max(1, AT_ONCE // block) * block
        record, bounds = codec.inner.wire_bytes(block), range(0, numel, size)
        # Which of a rank's entries lie in which range.
        cuts = [
            np.searchsorted(room.index[r, :count].numpy(), [*bounds, numel]).tolist()
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
                    inside = index + 2 * at, value + at
                    picking.add_to_values(inside, count, start, place, 1.0)
                    inner.decode_add(codec.inner, blocks[r, wire], there, 1.0, own)
                    picking.put(inside, count, start, place)
                end_sum(target[0], place, target[1], start, n, -(-n // 64) * 64, 0, factor, scratch + SPARE)

        run(job, len(bounds), pieces)
        for _, _, own in work:
            workspace.status.add_(own.status)
            own.status.zero_()

    def _entries(
        self, codec: Any, wires: Tensor, room: Room, workspace: Workspace
    ) -> list[tuple[tuple[int, int], int]]:
        """Where each rank's indices and values are, and how many, of the entries that count; the others are noted."""
        lists, scratch = [], reserved(room.inner, "picking", _picking(codec))
        size, numel, form = room.own + room.inside, room.key[1], _form(codec)
        for wire, index, value in zip(wires, room.index, room.value, strict=False):
            where = address(index, I64), address(value, F32)
            count, skipped, unsound = picking.list_all(address(wire, BYTES), size, numel, form, *where, scratch)
            note(workspace, [(skipped, unsound)])
            lists.append((where, count))
        return lists

    def _work(
        self, codec: Any, size: int, pieces: int, inner: Kernels, workspace: Workspace
    ) -> list[tuple[Tensor, int, Workspace]]:
        """For each piece: room for the sum of a range, scratch, and a workspace of the inner code's."""
        known: tuple[Any, list[tuple[Tensor, int, Workspace]]] = workspace.buffers.get("work", (None, []))
        if known[0] != (codec, size) or len(known[1]) < pieces:
            scratch = reserved(workspace, "scratch", pieces * SUM_SCRATCH)
            device, padded = torch.device("cpu"), -(-size // 64) * 64
            known = (
                (codec, size),
                [
                    (
                        torch.zeros(padded, dtype=F32),
                        scratch + i * SUM_SCRATCH,
                        inner.workspace(codec.inner, size, device),
                    )
                    for i in range(pieces)
                ],
            )
            workspace.buffers["work"] = known
        return known[1][:pieces]


def _form(codec: Any) -> Form:
    (form,) = ChunkedTopK.form(codec.selection)
    return form


def _picking(codec: Any) -> int:
    """Bytes of scratch to pick in."""
    return whole_lines(chunk_scratch(codec.block_size, codec.k))


def _lists(room: Room) -> picking.Lists:
    return address(room.index[0], I64), address(room.value[0], F32), address(room.counts, I32)
