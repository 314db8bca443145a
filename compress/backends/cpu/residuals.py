"""The passes of `backends.narrow` over CPU tensors, each reading and writing everything once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..addresses import address
from ..low_precision import NarrowKernels
from .formats import TILE
from .kernels import pieces_of, run
from .narrow import PASSES, SPARE, places


class Narrow(NarrowKernels):
    """Each in one pass."""

    def to_bfloat16(self, x: Tensor, out: Tensor) -> None:
        _over(PASSES[torch.bfloat16][1], x, out)

    def to_int8(self, x: Tensor, codes: Tensor, steps: Tensor) -> None:
        _over(PASSES[torch.int8][1], x, codes, steps)

    def from_bfloat16(self, x: Tensor, out: Tensor) -> None:
        _over(PASSES[torch.bfloat16][0], out, x)

    def from_int8(self, codes: Tensor, steps: Tensor, out: Tensor) -> None:
        _over(PASSES[torch.int8][0], out, codes, steps)


def _over(function: Callable, x: Tensor, *parts: Tensor) -> None:
    numel, where = x.numel(), (address(x, torch.float32), *places(*parts))
    tiles = -(-numel // TILE)

    def job(first: int, last: int, piece: int) -> None:
        spare = np.empty(SPARE, np.uint8)
        function(*where, (first * TILE, min(last * TILE, numel)), spare.ctypes.data)

    run(job, tiles, pieces_of(numel, tiles))
