"""PowerSGD on a GPU: what launches the kernels of csrc/power_sgd.cu."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ... import kernel_cache
from ...codec_types import PowerSGDLike
from ...power_sgd import RUN, Matrices, PowerSGDKernels
from ..runtime.device import THREADS, Argument, device_for, launch_rows

FILE = "power_sgd.cu"
WARPS = THREADS // 32


class PowerSGD(PowerSGDKernels):
    """A warp takes a line or a tile; a block of threads takes a matrix, where its columns count as a whole."""

    def prepare(self, codec: PowerSGDLike, dtype: torch.dtype, device: torch.device) -> None:
        with kernel_cache.task(type(codec).__name__):
            super().prepare(codec, dtype, device)

    def draw(self, matrices: Matrices, draw: Tensor, start: Tensor) -> None:
        launch_rows(FILE, "power_sgd_draw", start, draw)

    def take(self, matrices: Matrices, x: Tensor, whole: Tensor) -> None:
        _launch("take", matrices, matrices.lines, x, whole)

    def left(self, matrices: Matrices, x: Tensor, start: Tensor, out: Tensor) -> None:
        _launch("left", matrices, matrices.lines, np.int32(matrices.rank), x, start, out)

    def orthonormalise(self, matrices: Matrices, left: Tensor) -> None:
        _of_matrices("orthonormalise", matrices, left)

    def right(self, matrices: Matrices, x: Tensor, left: Tensor, out: Tensor) -> None:
        parts: Tensor | None = matrices.memory.buffers.get("parts")
        if parts is None:
            parts = torch.empty(matrices.tiles * matrices.rank * RUN, dtype=torch.float32, device=x.device)
            matrices.memory.buffers["parts"] = parts
        rank = np.int32(matrices.rank)
        _launch("tiles", matrices, matrices.tiles, rank, x, left, parts)
        _launch("right", matrices, matrices.strips * matrices.rank, rank, parts, out)

    def settle(self, matrices: Matrices, left: Tensor, right: Tensor) -> None:
        _of_matrices("settle", matrices, left, right)

    def follow(self, matrices: Matrices, right: Tensor, start: Tensor) -> None:
        _of_matrices("follow", matrices, right, start)

    def add(self, matrices: Matrices, numbers: Tensor, out: Tensor, alpha: float, fresh: bool, status: Tensor) -> None:
        fields = numbers.split([matrices.whole, matrices.left, matrices.right])
        _of_matrices("odd", matrices, *fields, status)
        target = out, np.float32(alpha), np.int32(fresh)
        _launch("add", matrices, matrices.lines, np.int32(matrices.rank), *fields, *target)

    def leave(self, matrices: Matrices, left: Tensor, right: Tensor, total: Tensor, residual: Tensor) -> None:
        _launch("leave", matrices, matrices.lines, np.int32(matrices.rank), left, right, total, residual)


def _launch(name: str, matrices: Matrices, warps: int, *arguments: Argument) -> None:
    """A kernel of which so many warps have something to do."""
    if not warps:
        return
    table = matrices.table, np.int32(len(matrices.rows))
    device_for(matrices.table.device).launch(FILE, f"power_sgd_{name}", -(-warps // WARPS), (*table, *arguments))


def _of_matrices(name: str, matrices: Matrices, *arguments: Argument) -> None:
    """A kernel of which a block of threads takes each piece."""
    count = len(matrices.rows)
    function = device_for(matrices.table.device).function(FILE, f"power_sgd_{name}")
    function(count, THREADS, (matrices.table, np.int32(count), np.int32(matrices.rank), *arguments))
