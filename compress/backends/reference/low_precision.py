"""Vectors of float32 kept in fewer bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..low_precision import BLOCK, LEAST_STEP, MOST_BITS, SHARE, STEP_BITS, LowPrecisionKernels
from .arithmetic import F32, in_blocks, numbers


class LowPrecision(LowPrecisionKernels):
    def to_bfloat16(self, x: Tensor, out: Tensor) -> None:
        words = _sound(numbers(x)).view(np.uint32)
        nearest = words + (0x7FFF + (words >> 16 & 1))
        out.view(torch.int16).copy_(torch.from_numpy((nearest >> 16).astype(np.uint16).view(np.int16)))

    def to_int8(self, x: Tensor, codes: Tensor, steps: Tensor) -> None:
        rows = in_blocks(_sound(numbers(x)), BLOCK)
        share = np.abs(rows).max(axis=1) * F32(SHARE)
        up = (share.view(np.uint32) + np.uint32(STEP_BITS) & ~np.uint32(STEP_BITS)).view(F32)
        found = np.maximum(up, F32(LEAST_STEP))
        steps.numpy()[:] = found
        codes.numpy()[:] = np.rint(rows * (F32(1) / found)[:, None]).reshape(-1)[: len(x)]

    def from_bfloat16(self, x: Tensor, out: Tensor) -> None:
        out.numpy().view(np.uint32)[:] = x.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16

    def from_int8(self, codes: Tensor, steps: Tensor, out: Tensor) -> None:
        out.numpy()[:] = codes.numpy().astype(F32) * np.repeat(steps.numpy(), BLOCK)[: len(codes)]


def _sound(values: np.ndarray) -> np.ndarray:
    """What is not finite as zero, and nothing beyond the largest bfloat16."""
    most = np.uint32(MOST_BITS).view(F32)
    return np.clip(np.where(np.isfinite(values), values, F32(0)), -most, most)
