"""The passes of `backends.narrow` on a GPU, each in one launch."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..narrow import BLOCK, NarrowKernels
from .device import THREADS, device_for


class Narrow(NarrowKernels):
    """A warp takes a block."""

    def to_bfloat16(self, x: Tensor, out: Tensor) -> None:
        _launch("narrow_to_bf16", x, out)

    def to_int8(self, x: Tensor, codes: Tensor, steps: Tensor) -> None:
        _launch("narrow_to_int8", x, codes, steps)

    def from_bfloat16(self, x: Tensor, out: Tensor) -> None:
        _launch("narrow_from_bf16", x, out)

    def from_int8(self, codes: Tensor, steps: Tensor, out: Tensor) -> None:
        _launch("narrow_from_int8", codes, steps, out)


def _launch(name: str, *tensors: Tensor) -> None:
    numel = tensors[0].numel()
    turns = -(-numel // (BLOCK * (THREADS // 32)))
    device_for(tensors[0].device).launch("narrow.cu", name, turns, (*tensors, np.int64(numel)))
