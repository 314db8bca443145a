"""The passes of `backends.low_precision` on a GPU, each in one launch."""

from __future__ import annotations

from torch import Tensor

from ..low_precision import LowPrecisionKernels
from .runtime.device import launch_rows


class LowPrecision(LowPrecisionKernels):
    """A warp takes a block."""

    def to_bfloat16(self, x: Tensor, out: Tensor) -> None:
        launch_rows("low_precision.cu", "low_precision_to_bf16", x, out)

    def to_int8(self, x: Tensor, codes: Tensor, steps: Tensor) -> None:
        launch_rows("low_precision.cu", "low_precision_to_int8", x, codes, steps)

    def from_bfloat16(self, x: Tensor, out: Tensor) -> None:
        launch_rows("low_precision.cu", "low_precision_from_bf16", x, out)

    def from_int8(self, codes: Tensor, steps: Tensor, out: Tensor) -> None:
        launch_rows("low_precision.cu", "low_precision_from_int8", codes, steps, out)
