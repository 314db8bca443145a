"""Codecs of one record a block: how the CPU runs their numba kernels.

Two kernels serve a codec, on the blocks `first` to `last` of `span` = (elements, first, last), so that threads can
share a call. *Encode* takes a = x, or x + residual unless `residual` is 0, writes the code of a, and then puts
a - decoded into the residual. *Decode* adds `alpha` times what each of `ranks` wires says, in rank order, to zero, or
to what `out` holds if `add`, multiplies by `scale`, and returns how many codes it skipped and how many records were not
finite. A block that is being worked on stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import Kernels, LowPrecisionVector, MomentumInput, Workspace, kernel_cache
from ..kernels import B, C, CodecLike
from ..memory import address, rows_at
from . import low_precision
from .runtime.blocks import How, scratch_bytes
from .runtime.dtypes import KINDS, Source
from .runtime.threads import inverse, note, pieces_of, reserved, run, whole_lines

#: Elements of a residual that are float32 at a time where it is kept in fewer bytes: 128 KB.
WIDE_ELEMENTS = 1 << 15


class CpuKernels(Kernels[C]):
    """Kernels that numba compiles."""

    def prepare(self, codec: C, dtype: torch.dtype, device: torch.device) -> None:
        """Compile, or load from the cache, everything that this codec runs."""
        with kernel_cache.task(type(codec).__name__):
            super().prepare(codec, dtype, device)


#: A kernel, and what it needs to know of the codec.
Kernel = tuple[Callable, tuple]


class Blocks(CpuKernels[B]):
    """Codecs of one record a block; a subclass names its kernels and says what they need to know of the codec."""

    def block(self, codec: B) -> int:
        return codec.block_size

    def scratch(self, codec: B) -> int:
        """Bytes that a piece works in."""
        return scratch_bytes(self.block(codec))

    def encode_block(self, codec: B, draw: Tensor | None) -> Kernel:
        raise NotImplementedError

    def decode_block(self, codec: B) -> Kernel:
        raise NotImplementedError

    def workspace(self, codec: B, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        self._split(codec, numel, workspace)
        return workspace

    def _split(self, codec: B, numel: int, workspace: Workspace) -> tuple[int, int, int, int]:
        """Blocks, pieces to run them in, the address of the first piece's scratch, and bytes from one to the next."""
        count = -(-numel // self.block(codec))
        pieces = pieces_of(numel, count)
        known = workspace.buffers.get("pieces")
        if known is None or known[0] != codec or known[1] < pieces:
            size = whole_lines(self.scratch(codec))
            known = codec, pieces, reserved(workspace, "scratch", pieces * size), size
            workspace.buffers["pieces"] = known
        return count, pieces, known[2], known[3]

    def encode(self, codec: B, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self._encode(codec, _source_of(x), x.numel(), 0, wire, draw, workspace)

    def encode_feedback(
        self, codec: B, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        kept = address(residual, torch.float32)
        self._encode(codec, _source_of(grad), grad.numel(), kept, wire, draw, workspace)

    def _encode(
        self,
        codec: B,
        source: Source,
        numel: int,
        residual: int,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        kernel, rest = self.encode_block(codec, draw)
        target = address(wire, torch.uint8)
        count, pieces, scratch, size = self._split(codec, numel, workspace)

        def job(first: int, last: int, piece: int) -> None:
            kernel(source, residual, target, (numel, first, last), *rest, scratch + piece * size)

        run(job, count, pieces)

    def encode_low_precision(
        self,
        codec: B,
        grad: Tensor,
        residual: LowPrecisionVector,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """With some blocks of the residual as float32 at a time, which stay in cache."""
        block, numel = self.block(codec), grad.numel()
        if block % low_precision.BLOCK or residual.dtype not in low_precision.PASSES:
            super().encode_low_precision(codec, grad, residual, wire, draw, workspace)
            return
        kernel, rest = self.encode_block(codec, draw)
        read, write = low_precision.PASSES[residual.dtype]
        source, target = _source_of(grad), address(wire, torch.uint8)
        parts = low_precision.places(*residual.parts)
        count, pieces, scratch, size = self._split(codec, numel, workspace)
        at_once = max(1, WIDE_ELEMENTS // block)
        room_bytes = whole_lines(4 * min(at_once, count) * block + low_precision.SPARE)

        def job(first: int, last: int, piece: int) -> None:
            room = rooms + piece * room_bytes
            for begin in range(first, last, at_once):
                end = min(begin + at_once, last)
                span = begin * block, min(end * block, numel)
                there = room + low_precision.SPARE - 4 * span[0]
                read(there, *parts, span, room)
                kernel(source, there, target, (numel, begin, end), *rest, scratch + piece * size)
                write(there, *parts, span, room)

        with workspace.scratch.open(pieces * room_bytes // 4, grad.device) as memory:
            rooms = address(memory)
            run(job, count, pieces)

    def encode_momentum(
        self,
        codec: B,
        x: MomentumInput,
        residual: Tensor,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        """In the same pass: the kernel reads what comes out of the momentum."""
        if x.source is None:
            super().encode_momentum(codec, x, residual, wire, draw, workspace)
        else:
            kept = address(residual, torch.float32)
            self._encode(codec, x.source, x.numel(), kept, wire, draw, workspace)

    def decode_add(self, codec: B, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self._decode(codec, wire[None], out, (float(alpha), 1, 1.0), workspace)

    def decode_mean(self, codec: B, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        self._decode(codec, wires[0], out, (1.0, 0, inverse(wires[0].shape[0])), workspace)

    def _decode(self, codec: B, wires: Tensor, out: Tensor, how: How, workspace: Workspace) -> None:
        kernel, rest = self.decode_block(codec)
        numel, target, ranks = out.numel(), _source_of(out), wires.shape[0]
        sources = *rows_at(wires, torch.uint8), ranks
        count, pieces, scratch, size = self._split(codec, numel, workspace)

        def job(first: int, last: int, piece: int) -> tuple[int, int]:
            result: tuple[int, int] = kernel(target, sources, (numel, first, last), how, *rest, scratch + piece * size)
            return result

        note(workspace, run(job, count, pieces))


def _source_of(x: Tensor) -> Source:
    return KINDS[x.dtype], address(x)


Draw = tuple[int, int, int, int]  # whether to draw, seed, step, stream


def _draw(codec: CodecLike, draw: Tensor | None) -> tuple[int, int, int, int]:
    """Whether to draw, and seed, step and stream."""
    if draw is None or not codec.stochastic:
        return 0, 0, 0, 0
    seed, step, stream = draw.tolist()
    return 1, seed, step, stream
