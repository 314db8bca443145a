"""Codecs on the CPU: numba kernels over threads of our own.

Kernels release the GIL and share no state, so any thread may run them at any time; numba's own parallel loops abort
when two threads enter them at once. A call is split over `torch.get_num_threads()` threads when each gets enough to
do, which never changes a byte. Nothing is allocated by a call once its workspace has met the same number of threads
and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import Backend, Workspace
from ..addresses import address, rows_at
from . import common, dense
from .blocks import TILE, scratch_bytes
from .common import KINDS, CpuKernels, inverse, note, reserved, run
from .topk import Entries, TopK


class _Blocks(CpuKernels):
    """Codecs of one record a block; a subclass names its kernels and says what they need to know of the codec."""

    def block(self, codec: Any) -> int:
        return int(codec.block)

    def encode_block(self, codec: Any, draw: Tensor | None) -> Kernel:
        raise NotImplementedError

    def decode_block(self, codec: Any) -> Kernel:
        raise NotImplementedError

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        self._split(codec, numel, workspace)
        return workspace

    def _split(self, codec: Any, numel: int, workspace: Workspace) -> tuple[int, int, int, int]:
        """Blocks, pieces to run them in, the address of the first piece's scratch, and bytes from one to the next."""
        count = -(-numel // self.block(codec))
        pieces = common.pieces_of(numel, count)
        size = -(-scratch_bytes(self.block(codec)) // 64) * 64
        return count, pieces, reserved(workspace, "scratch", pieces * size), size

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self._encode(codec, x, 0, wire, draw, workspace)

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        self._encode(codec, grad, address(residual, torch.float32), wire, draw, workspace)

    def _encode(
        self, codec: Any, x: Tensor, residual: int, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        kernel, rest = self.encode_block(codec, draw)
        numel, source, target = x.numel(), (KINDS[x.dtype], address(x)), address(wire, torch.uint8)
        count, pieces, scratch, size = self._split(codec, numel, workspace)

        def job(first: int, last: int, piece: int) -> None:
            kernel(source, residual, target, (numel, first, last), *rest, scratch + piece * size)

        run(job, count, pieces)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self._decode(codec, wire[None], out, (float(alpha), 1, 1.0), workspace)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        self._decode(codec, wires[0], out, (1.0, 0, inverse(wires[0].shape[0])), workspace)

    def _decode(
        self, codec: Any, wires: Tensor, out: Tensor, how: tuple[float, int, float], workspace: Workspace
    ) -> None:
        kernel, rest = self.decode_block(codec)
        numel, target = out.numel(), (KINDS[out.dtype], address(out))
        sources = *rows_at(wires, torch.uint8), wires.shape[0]
        count, pieces, scratch, size = self._split(codec, numel, workspace)

        def job(first: int, last: int, piece: int) -> tuple[int, int]:
            result: tuple[int, int] = kernel(target, sources, (numel, first, last), how, *rest, scratch + piece * size)
            return result

        note(workspace, run(job, count, pieces))


#: A kernel, and what it needs to know of the codec.
Kernel = tuple[Callable, tuple]


def _draw(codec: Any, draw: Tensor | None) -> tuple[int, int, int, int]:
    """Whether to draw, and seed, step and stream."""
    if draw is None or not codec.stochastic:
        return 0, 0, 0, 0
    seed, step, stream = draw.tolist()
    return 1, seed, step, stream


class OneBit(_Blocks):
    def encode_block(self, codec: Any, draw: Tensor | None) -> Kernel:
        return dense.onebit_encode, (codec.block, int(codec.scale == "sided"))

    def decode_block(self, codec: Any) -> Kernel:
        return dense.onebit_decode, (codec.block,)


class QSGD(_Blocks):
    def encode_block(self, codec: Any, draw: Tensor | None) -> Kernel:
        return dense.qsgd_encode, (codec.block, codec.bits, int(codec.norm == "l2"), _draw(codec, draw))

    def decode_block(self, codec: Any) -> Kernel:
        return dense.qsgd_decode, (codec.block, codec.bits)


class TernGrad(_Blocks):
    def encode_block(self, codec: Any, draw: Tensor | None) -> Kernel:
        return dense.terngrad_encode, (codec.block, float(codec.clip), _draw(codec, draw))

    def decode_block(self, codec: Any) -> Kernel:
        return dense.terngrad_decode, (codec.block,)


class Cast(_Blocks):
    """Identity too: a cast to float32."""

    def block(self, codec: Any) -> int:
        return TILE

    def stored(self, codec: Any) -> int:
        return KINDS[getattr(codec, "dtype", torch.float32)]

    def encode_block(self, codec: Any, draw: Tensor | None) -> Kernel:
        return dense.cast_encode, (self.stored(codec),)

    def decode_block(self, codec: Any) -> Kernel:
        return dense.cast_decode, (self.stored(codec),)


BACKEND = Backend(
    kernels={
        "onebit": OneBit(),
        "qsgd": QSGD(),
        "terngrad": TernGrad(),
        "topk": TopK(),
        "cast": Cast(),
        "identity": Cast(),
    },
    entries=Entries(),
)
