"""The passes of `compress.feedback.tracking` and `compress.feedback.momentum` on a GPU, each in one launch."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..kernels import MomentumKernels, TrackingKernels
from .entries import Entries
from .runtime.device import SUFFIXES, launch_rows

FILE = "momentum.cu"


class Tracking(TrackingKernels):
    """A warp takes a row."""

    def change(self, grad: Tensor, momentum: Tensor, share: float, out: Tensor) -> None:
        launch_rows(FILE, f"tracking_change_{SUFFIXES[grad.dtype]}", grad, momentum, out, np.float32(share))

    def follow(self, estimate: Tensor, mean: Tensor) -> bool:
        launch_rows(FILE, "tracking_follow", estimate, mean)
        return False  # the host does not wait to know

    def divide(self, grad: Tensor, magnitudes: Tensor, out: Tensor) -> None:
        launch_rows(FILE, f"magnitudes_divide_{SUFFIXES[grad.dtype]}", grad, magnitudes, out)

    def multiply(self, mean: Tensor, magnitudes: Tensor, beta: float) -> None:
        launch_rows(FILE, "magnitudes_multiply", mean, magnitudes, np.float32(beta), np.float32(1.0 - beta))


class Momentum(MomentumKernels):
    """As `Tracking`; of the few entries that `mask` is about torch takes care."""

    def enter(self, grad: Tensor, momentum: Tensor, beta: float, nesterov: bool, out: Tensor) -> None:
        name = f"momentum_enter_{SUFFIXES[grad.dtype]}"
        launch_rows(FILE, name, grad, momentum, out, np.float32(beta), np.int32(nesterov))

    def add(self, momentum: Tensor, places: Tensor, values: Tensor) -> None:
        Entries().add(momentum, places, values)
