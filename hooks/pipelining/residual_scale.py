"""Residuals of scaled gradients, which follow the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..training.grad_scaler import LossScale
from .tensor_coder import TensorCoder


class ResidualScale:
    """Brings the residuals of some coders to the loss scale of each step.

    Args:
        source: the GradScaler, or a function that returns the scale; None: nothing is known of it.

    Attributes:
        coders: those whose residuals follow.
        scale: in whose units the residuals are.

    Raises:
        TypeError: `source` is none of these.
    """

    def __init__(self, source: torch.amp.GradScaler | Callable[[], float] | None) -> None:
        self._ask = source if callable(source) else None
        self._loss_scale = LossScale(None if callable(source) else source)
        self.coders: list[TensorCoder] = []
        self.scale: float | Tensor = 1.0
        #: Residuals as they were when the GradScaler was updated last, by coder and index.
        self._before: dict[tuple[int, str], Tensor] = {}

    def begin(self) -> None:
        """Take over loaded residuals, which are of the scale 1."""
        self.scale = 1.0
        self._before.clear()
        self._loss_scale.updated()
        self._follow(self._now(), loaded=True)

    def follow(self) -> None:
        """Called before each message."""
        if self._ask is not None or (self._loss_scale.skips and self._loss_scale.updated()):
            self._follow(self._now())

    def _now(self) -> float | Tensor:
        scale = self._loss_scale.scale if self._ask is None else float(self._ask())
        if scale is None or (isinstance(scale, float) and not 0 < scale < math.inf):
            return self.scale  # a residual keeps its value beside what is not finite
        return scale.clone() if isinstance(scale, Tensor) else scale  # the GradScaler changes its tensor in place

    @torch.no_grad()
    def _follow(self, scale: float | Tensor, loaded: bool = False) -> None:
        factor, self.scale = scale / self.scale, scale
        for number, coder in enumerate(self.coders):
            for index, residual in coder.residuals.items():
                before = self._before.get((number, index))
                if self._loss_scale.skips and not loaded:
                    before = torch.zeros_like(residual) if before is None else before
                    if isinstance(factor, Tensor):
                        residual.copy_(torch.where(factor < 1, before, residual))
                    elif factor < 1:  # the step was skipped, and may have had gradients of any size
                        residual.copy_(before)
                if isinstance(factor, Tensor) or factor != 1:
                    residual.mul_(factor)
                if self._loss_scale.skips:
                    self._before[number, index] = residual.clone() if before is None else before.copy_(residual)
