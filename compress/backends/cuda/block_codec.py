"""Codecs of one record a block on a GPU: one launch serves a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import Kernels, Workspace, kernel_cache
from ..kernels import B, CodecLike
from ..sparse import whole_rows
from .runtime.device import SUFFIXES, THREADS, Argument, Function, device_for

WARPS = THREADS // 32
#: Arguments of a kernel that are no tensors.
Numbers = tuple[np.generic, ...]


class Blocks(Kernels[B]):
    """Codecs of one record a block; a subclass names its kernels and says what they need to know of the codec."""

    #: Kernels are `{encoder}_encode_{suffix}` and `{decoder}_decode_{suffix}` of csrc/`file`.
    file: str
    encoder: str
    decoder: str

    def names(self, codec: B) -> tuple[str, str]:
        """Of the kernels that encode and decode, before the suffix."""
        return f"{self.encoder}_encode", f"{self.decoder}_decode"

    def block(self, codec: B) -> int:
        return codec.block_size

    def turns(self, codec: B, numel: int) -> int:
        """⌈records / WARPS⌉: how many blocks of threads a gradient keeps busy, as a warp takes a record at a time."""
        records = -(-numel // self.block(codec))
        return -(-records // WARPS)

    #: True if the kernel that encodes takes a draw, last: null if the codec rounds to nearest.
    draws = False

    def encode_options(self, codec: B) -> Numbers:
        """The arguments of `encode` besides the tensors."""
        raise NotImplementedError

    def decode_options(self, codec: B) -> Numbers:
        raise NotImplementedError

    def prepare(self, codec: B, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            encoding, decoding = self.names(codec)
            for kernel, kind in ((encoding, dtype), (decoding, dtype), (decoding, torch.float32)):
                device_for(device).function(self.file, f"{kernel}_{SUFFIXES[kind]}")

    def encode(self, codec: B, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self._encode(codec, x, None, wire, draw, workspace)

    def encode_feedback(
        self, codec: B, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        self._encode(codec, grad, residual, wire, draw, workspace)

    def _encode(
        self,
        codec: B,
        x: Tensor,
        residual: Tensor | None,
        wire: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        key = "encode", x.numel(), x.dtype
        ready: ReadyLaunch | None = workspace.buffers.get(key)
        if ready is None or ready.codec is not codec:
            options: Numbers = np.int64(x.numel()), *self.encode_options(codec)
            ready = workspace.buffers[key] = self._ready(codec, self.names(codec)[0], x, options)
        arguments = x, residual, wire, *ready.first
        if self.draws:
            arguments = *arguments, draw if codec.stochastic else None
        ready.function(ready.grid, THREADS, arguments)

    def decode_add(self, codec: B, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        how = np.float32(alpha), np.int32(1), np.float32(1)
        self._decoder(codec, out, how, 0, 1).decode(wire, out, workspace)

    def decode_mean(self, codec: B, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        (rows,) = wires
        ranks, pitch = rows.shape[0], rows.stride(0)
        key = "mean", out.numel(), out.dtype, ranks, pitch
        ready: ReadyLaunch | None = workspace.buffers.get(key)
        if ready is None or ready.codec is not codec:
            mean = np.float32(1), np.int32(0), np.float32(1) / np.float32(ranks)
            ready = workspace.buffers[key] = self._decoder(codec, out, mean, pitch, ranks)
        ready.decode(whole_rows(rows), out, workspace)

    def _decoder(self, codec: B, out: Tensor, how: Numbers, pitch: int, ranks: int) -> ReadyLaunch:
        source: Numbers = np.int64(pitch), np.int32(ranks), *self.decode_options(codec)
        return self._ready(codec, self.names(codec)[1], out, (np.int64(out.numel()), *how), source)

    def _ready(self, codec: B, kernel: str, like: Tensor, first: Numbers, last: Numbers = ()) -> ReadyLaunch:
        device, name = device_for(like.device), f"{kernel}_{SUFFIXES[like.dtype]}"
        grid = device.grid(self.file, name, self.turns(codec, like.numel()))
        return ReadyLaunch(codec, device.function(self.file, name), grid, first, last)


@dataclass(frozen=True, slots=True)
class ReadyLaunch:
    """A launch of which all is known but the tensors: what a workspace keeps of a call that comes again.

    Attributes:
        first, last: arguments among the tensors; tensors of the workspace too.
    """

    codec: CodecLike
    function: Function
    grid: int
    first: tuple[Argument, ...]
    last: Numbers = ()

    def decode(self, wires: Tensor, out: Tensor, workspace: Workspace) -> None:
        # The status word goes last.
        self.function(self.grid, THREADS, (out, *self.first, wires, *self.last, workspace.status))
