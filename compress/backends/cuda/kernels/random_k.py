"""RandomK on a GPU: csrc/random_k.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import Workspace, kernel_cache
from ...random_k import RandomKKernels
from ...sparse import whole_rows
from ..runtime.device import SUFFIXES, THREADS, Argument, device_for, grid_for, launch_rows

FILE = "random_k.cu"


class RandomK(RandomKKernels):
    """A thread draws an element and a warp takes a row of the gradient. The host does not wait."""

    def workspace(self, codec: Any, numel: int, device: torch.device) -> Workspace:
        workspace = Workspace.on(device)
        workspace.buffers["odd"] = torch.zeros(1, dtype=torch.int32, device=device)
        return workspace

    def prepare(self, codec: Any, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            device_for(device).function(FILE, "random_k_begin")

    def encode(self, codec: Any, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        odd = self._check(x, None, wire, draw, workspace)
        k = codec.k(len(x))
        _launch(f"random_k_read_{SUFFIXES[x.dtype]}", k, wire, x, wire, odd, np.int64(len(x)), np.int64(k))

    def encode_feedback(
        self, codec: Any, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        odd = self._check(grad, residual, wire, draw, workspace)
        launch_rows(FILE, f"random_k_enter_{SUFFIXES[grad.dtype]}", grad, residual, odd)
        k = codec.k(len(grad))
        _launch("random_k_take", k, wire, residual, wire, odd, np.int64(len(grad)), np.int64(k))

    @staticmethod
    def _check(x: Tensor, residual: Tensor | None, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> Tensor:
        """Begin a wire, and find whether anything is not finite."""
        odd = _flags(workspace, 1)
        _launch("random_k_begin", 1, wire, draw, wire, odd)
        launch_rows(FILE, f"random_k_check_{SUFFIXES[x.dtype]}", x, residual, odd)
        return odd

    def decode_add(self, codec: Any, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        odd = self._add([wire[None, :16], wire[None, 16:]], out, alpha, workspace)
        _launch("random_k_spoil", len(out), out, out, np.int64(len(out)), odd)

    def decode_mean(self, codec: Any, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        total = out
        if out.dtype != torch.float32:
            total = workspace.buffers.get("total", out)
            if total.dtype != torch.float32:
                total = workspace.buffers["total"] = torch.empty(len(out), dtype=torch.float32, device=out.device)
        total.zero_()
        odd, ranks = self._add(wires, total, 1.0, workspace), len(wires[0])
        scale = np.float32(1) / np.float32(ranks)
        launch_rows(FILE, f"random_k_mean_{SUFFIXES[out.dtype]}", total, out, odd, np.int32(ranks), scale)

    @staticmethod
    def _add(wires: Sequence[Tensor], out: Tensor, alpha: float, workspace: Workspace) -> Tensor:
        """Add all ranks' values; returns which ranks have some that are not finite."""
        (words, values), ranks = wires, len(wires[0])
        k = values.shape[1] // 4
        odd = _flags(workspace, ranks).zero_()
        rows = whole_rows(words), np.int64(words.stride(0)), whole_rows(values), np.int64(values.stride(0))
        what = out, np.int64(len(out)), np.int64(k), np.float32(alpha), *rows, np.int32(ranks), odd, workspace.status
        _launch("random_k_add", k, out, *what)
        return odd


def _flags(workspace: Workspace, ranks: int) -> Tensor:
    """A word for each rank, at least; a workspace that was made without a codec has none yet."""
    odd: Tensor | None = workspace.buffers.get("odd")
    if odd is None or len(odd) < ranks:
        odd = workspace.buffers["odd"] = torch.zeros(ranks, dtype=torch.int32, device=workspace.status.device)
    return odd


def _launch(name: str, threads: int, like: Tensor, *arguments: Argument) -> None:
    """A kernel in which so many threads have something to do."""
    device = device_for(like.device)
    device.function(FILE, name)(grid_for(threads, device), THREADS, arguments)
