"""Codecs on a GPU: what launches the kernels of csrc/.

One launch serves a call, or a few where the codec is sparse, on torch's current stream. Nothing here allocates, waits
for the device, or reads from it: the draw's state, a threshold, the status word all stay in device memory, so a call
can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...entries import index_layout
from .. import Backend, Kernels, Selecting, Workspace, kept
from ..drawn import DRAWN
from ..sparse import whole_rows
from .device import THREADS, Argument, device_for
from .entries import Entries
from .outliers import Outliers
from .sparse import SUFFIXES, TopK

#: How the kernels name a format that is stored.
STORED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WARPS = THREADS // 32
#: Elements that the kernels without blocks take at once.
ROW = 256


class _Blocks(Kernels):
    """Codecs of one record a block; a subclass names its kernels and says what they need to know of the codec."""

    #: Kernels are `{encoder}_encode_{suffix}` and `{decoder}_decode_{suffix}` of csrc/`file`.
    file: str
    encoder: str
    decoder: str

    def block(self, codec: Any) -> int:
        return int(codec.block)

    def turns(self, codec: Any, numel: int) -> int:
        """How often blocks of threads take something, all of them together: a warp takes one record at a time."""
        records = -(-numel // self.block(codec))
        return -(-records // WARPS)

    def encode_options(self, codec: Any, draw: Tensor | None) -> tuple[Argument, ...]:
        """What `encode` takes besides the tensors."""
        raise NotImplementedError

    def decode_options(self, codec: Any) -> tuple[Argument, ...]:
        raise NotImplementedError

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kept.task(type(codec).__name__):
            encoding, decoding = f"{self.encoder}_encode", f"{self.decoder}_decode"
            for kernel, kind in ((encoding, dtype), (decoding, dtype), (decoding, torch.float32)):
                device_for(device).function(self.file, f"{kernel}_{SUFFIXES[kind]}")

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self._encode(codec, x, None, wire, draw)

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        self._encode(codec, grad, residual, wire, draw)

    def _encode(self, codec: Any, x: Tensor, residual: Tensor | None, wire: Tensor, draw: Tensor | None) -> None:
        arguments = (x, residual, wire, np.int64(x.numel()), *self.encode_options(codec, draw))
        self._launch(codec, f"{self.encoder}_encode", x, arguments)

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self._decode(codec, wire, 0, 1, out, (np.float32(alpha), np.int32(1), np.float32(1)), workspace)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        (rows,) = wires
        ranks = rows.shape[0]
        mean = np.float32(1), np.int32(0), np.float32(1) / np.float32(ranks)
        self._decode(codec, whole_rows(rows), rows.stride(0), ranks, out, mean, workspace)

    def _decode(
        self,
        codec: Any,
        wires: Tensor,
        pitch: int,
        ranks: int,
        out: Tensor,
        how: tuple[np.generic, ...],
        workspace: Workspace,
    ) -> None:
        # The status word goes last.
        source = wires, np.int64(pitch), np.int32(ranks), *self.decode_options(codec), workspace.status
        self._launch(codec, f"{self.decoder}_decode", out, (out, np.int64(out.numel()), *how, *source))

    def _launch(self, codec: Any, kernel: str, like: Tensor, arguments: Sequence[Argument]) -> None:
        name, turns = f"{kernel}_{SUFFIXES[like.dtype]}", self.turns(codec, like.numel())
        device_for(like.device).launch(self.file, name, turns, arguments)


def drawn(codec: Any, draw: Tensor | None) -> Tensor | None:
    """What the kernels round with: the draw's state, or null for the nearest."""
    return draw if codec.stochastic else None


class OneBit(_Blocks):
    file, encoder, decoder = "sign.cu", "onebit", "onebit"

    def encode_options(self, codec: Any, draw: Tensor | None) -> tuple[Argument, ...]:
        return np.int32(codec.block), np.int32(codec.scale == "sided")

    def decode_options(self, codec: Any) -> tuple[Argument, ...]:
        return (np.int32(codec.block),)


class QSGD(_Blocks):
    file, encoder, decoder = "quantize.cu", "qsgd", "qsgd"

    def encode_options(self, codec: Any, draw: Tensor | None) -> tuple[Argument, ...]:
        return np.int32(codec.block), np.int32(codec.bits), np.int32(codec.norm == "l2"), drawn(codec, draw)

    def decode_options(self, codec: Any) -> tuple[Argument, ...]:
        return np.int32(codec.block), np.int32(codec.bits)


class TernGrad(_Blocks):
    file, encoder, decoder = "ternary.cu", "terngrad", "ternary"

    def encode_options(self, codec: Any, draw: Tensor | None) -> tuple[Argument, ...]:
        return np.int32(codec.block), np.float32(codec.clip), drawn(codec, draw)

    def decode_options(self, codec: Any) -> tuple[Argument, ...]:
        return (np.int32(codec.block),)


class Ternary(TernGrad):
    encoder = "ternary"

    def encode_options(self, codec: Any, draw: Tensor | None) -> tuple[Argument, ...]:
        return (np.int32(codec.block),)


class ChunkedTopK(_Blocks):
    """A block of threads takes a chunk at a time."""

    file, encoder, decoder = "chunked.cu", "chunked", "chunked"

    def block(self, codec: Any) -> int:
        return int(codec.chunk)

    def turns(self, codec: Any, numel: int) -> int:
        return -(-numel // self.block(codec))

    def encode_options(self, codec: Any, draw: Tensor | None) -> tuple[Argument, ...]:
        layout = index_layout(codec.chunk, codec.k)
        form = codec.chunk, codec.k, codec.bits, layout.low_bits, layout.upper_words, layout.low_words
        return tuple(np.int32(number) for number in form)

    def decode_options(self, codec: Any) -> tuple[Argument, ...]:
        return self.encode_options(codec, None)


class Cast(_Blocks):
    """Identity too: a cast to float32."""

    file, encoder, decoder = "cast.cu", "cast", "cast"

    def block(self, codec: Any) -> int:
        return ROW

    def encode_options(self, codec: Any, draw: Tensor | None) -> tuple[Argument, ...]:
        return (np.int32(STORED[getattr(codec, "dtype", torch.float32)]),)

    def decode_options(self, codec: Any) -> tuple[Argument, ...]:
        return self.encode_options(codec, None)


KERNELS: dict[str, Kernels] = {
    "onebit": OneBit(),
    "qsgd": QSGD(),
    "terngrad": TernGrad(),
    "ternary": Ternary(),
    "topk": (TOPK := TopK()),
    "random_k": DRAWN,
    "chunked_topk": ChunkedTopK(),
    "cast": Cast(),
    "identity": Cast(),
}
KERNELS["threshold"] = Selecting(Entries(), TOPK)
KERNELS["outliers"] = Outliers(KERNELS, Entries())
BACKEND = Backend(KERNELS, Entries())
