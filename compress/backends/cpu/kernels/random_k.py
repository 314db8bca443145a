"""Random-k on the CPU: `backends.random_k` in passes over the gradient, and one over what is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import Workspace
from ...addresses import address, rows_at
from ...kernels import divide
from ...random_k import RandomKKernels, words_of
from ..block_codec import CpuKernels
from ..runtime.blocks import (
    Rows,
    all_finite,
    copy,
    element,
    largest_bits,
    random_bits,
    read_block,
    scratch_bytes,
)
from ..runtime.dtypes import INF_BITS, KINDS, LOW, TILE, ZERO, Source, int_at, width
from ..runtime.simd import compiled, get_f32, store
from ..runtime.threads import inverse, pieces_of, reserved, run, whole_lines

F32 = torch.float32

Words = tuple[int, int, int]  # seed, step, bucket

#: Of one piece.
SCRATCH = whole_lines(scratch_bytes(TILE))

#: How many entries are drawn at a time.
AT_ONCE = 64


@compiled
def draw_entries(words: Words, numel: int, k: int, first: int, last: int, indices: int, scratch: int) -> None:
    """Which elements `words` stand for, from the entry `first` on, a multiple of `AT_ONCE`, until `last`."""
    seed, step, bucket = words
    for begin in range(first, last, AT_ONCE):
        random_bits(scratch, seed, step, bucket, begin >> 2, 2 * AT_ONCE)
        start, over = begin * numel // k, begin * numel % k
        for i in range(min(AT_ONCE, last - begin)):
            length = numel // k
            over += numel % k
            if over >= k:  # ⌊(i + 1)·n/k⌋ without dividing
                over -= k
                length += 1
            store(indices + 4 * (begin + i), np.int32(start + (int_at(scratch + 4 * i) * length >> 32)))
            start += length


@compiled
def sum_is_finite(x: Source, residual: int, first: int, last: int, scratch: int) -> bool:
    """Whether x + residual is; 0 stands for no residual."""
    for start in range(first, last, TILE):
        a = read_block(x[0], x[1], residual, start, min(TILE, last - start), TILE, scratch)
        if largest_bits(a, TILE) >= INF_BITS:
            return False
    return True


@compiled
def add_in(x: Source, residual: int, first: int, last: int, scratch: int) -> None:
    """residual += x."""
    for start in range(first, last, TILE):
        n = min(TILE, last - start)
        copy(residual + 4 * start, read_block(x[0], x[1], residual, start, n, TILE, scratch), 4 * n)


@compiled
def read_entries(x: Source, indices: int, values: int, first: int, last: int, scratch: int) -> None:
    kind, source = x
    for i in range(4 * first, 4 * last, 4):
        store(values + i, element(kind, source + int_at(indices + i) * width(kind), scratch))


@compiled
def take_entries(residual: int, indices: int, first: int, last: int, values: int) -> None:
    """What is drawn leaves the residual; of -0 the sign stays, as it does in v - (0 + v)."""
    for i in range(4 * first, 4 * last, 4):
        place = residual + 4 * int_at(indices + i)
        v = get_f32(place)
        store(values + i, v)
        store(place, v - (v + ZERO))


@compiled
def add_entries(values: int, indices: int, first: int, last: int, out: int, alpha: float) -> None:
    """out += alpha · values."""
    times = np.float32(alpha)
    for i in range(4 * first, 4 * last, 4):
        place = out + 4 * int_at(indices + i)
        store(place, get_f32(place) + times * get_f32(values + i))


@compiled
def mean_entries(values: Rows, ranks: int, indices: int, first: int, last: int, out: int, scale: float) -> None:
    """out = scale · the sum of the ranks' values, in rank order."""
    factor = np.float32(scale)
    for i in range(4 * first, 4 * last, 4):
        total = ZERO
        for r in range(ranks):
            total = total + get_f32(values[0] + r * values[1] + i)
        store(out + 4 * int_at(indices + i), total * factor)


Job = Callable[[int, int, int], Any]  # of what from, until where, with which scratch


class RandomK(RandomKKernels, CpuKernels):
    """The gradient is passed once to see whether all is finite, and once more where a residual takes it in."""

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self._encode(x, 0, wire, draw, workspace)

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        self._encode(grad, address(residual, F32), wire, draw, workspace)

    def _encode(self, x: Tensor, residual: int, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        assert draw is not None
        words, sent = _parts(wire)
        words.copy_(words_of(draw))
        numel, k, source, values = x.numel(), len(sent), (KINDS[x.dtype], address(x)), address(sent, F32)
        over, indices = self._drawn(words, numel, k, workspace)
        if not all(over(numel, TILE, lambda *span: sum_is_finite(source, residual, *span))):
            sent.fill_(torch.nan)  # and the residual stays
        elif residual:
            over(numel, TILE, lambda *span: add_in(source, residual, *span))
            over(k, AT_ONCE, lambda first, last, _: take_entries(residual, indices, first, last, values))
        else:
            over(k, AT_ONCE, lambda *span: read_entries(source, indices, values, *span))

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self._add(*_parts(wire), out, alpha, workspace)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        total = out
        if out.dtype != F32:
            total = workspace.buffers.get("total", out)
            if total.dtype != F32 or total.numel() != out.numel():
                total = workspace.buffers["total"] = torch.empty(out.numel(), dtype=F32, device="cpu")
        total.zero_()
        words, values, ranks = wires[0].view(torch.int32), wires[1].view(F32), len(wires[0])
        k = values.shape[1]
        if bool((words == words[0]).all()) and all(all_finite(address(row, F32), k) for row in values):
            over, indices = self._drawn(words[0], out.numel(), k, workspace)
            what, target, scale = (rows_at(values, F32), ranks, indices), address(total, F32), inverse(ranks)
            over(k, AT_ONCE, lambda first, last, _: mean_entries(*what, first, last, target, scale))
            if total is not out:
                out.copy_(total)
        else:
            for drawn, sent in zip(words, values, strict=True):
                self._add(drawn, sent, total, 1.0, workspace)
            divide(total, ranks, out)

    def _add(self, words: Tensor, sent: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        k, values, target = len(sent), address(sent, F32), address(out, F32)
        if not all_finite(values, k):
            workspace.status[1] += 1
            out.fill_(torch.nan)
            return
        over, indices = self._drawn(words, out.numel(), k, workspace)
        over(k, AT_ONCE, lambda first, last, _: add_entries(values, indices, first, last, target, float(alpha)))

    @staticmethod
    def _drawn(words: Tensor, numel: int, k: int, workspace: Workspace) -> tuple[Callable[[int, int, Job], list], int]:
        """What runs a job over so many things, some at least together, and where the indices lie that `words` stand
        for: ranks share them, so they are mostly there."""
        pieces = pieces_of(numel, -(-k // AT_ONCE))
        scratch, indices = (
            reserved(workspace, name, size) for name, size in (("scratch", pieces * SCRATCH), ("drawn", 4 * k))
        )

        def over(count: int, together: int, job: Job) -> list[Any]:
            def part(first: int, last: int, piece: int) -> Any:
                return job(first * together, min(last * together, count), scratch + piece * SCRATCH)

            return run(part, -(-count // together), pieces)

        low, high, step, bucket = words.tolist()
        which = ((low & LOW) | high << 32, step & LOW, bucket & LOW), numel, k
        if workspace.buffers.get("which") != which:
            over(k, AT_ONCE, lambda first, last, at: draw_entries(*which, first, last, indices, at))
            workspace.buffers["which"] = which
        return over, indices


def _parts(wire: Tensor) -> tuple[Tensor, Tensor]:
    """The words, and the values."""
    return wire[:16].view(torch.int32), wire[16:].view(F32)
