"""Ternary: trits of the least error."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .. import Workspace
from ..codec_types import TernaryLike
from .arithmetic import F32, NAN, TINY, block_lengths, block_sums, in_blocks, numbers, power_of_two_scale
from .terngrad import TernGrad

#: How often the level is refined.
LLOYD_STEPS = 2


class Ternary(TernGrad):
    def encode(self, codec: TernaryLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        a = numbers(x)
        rows, lengths = in_blocks(a, codec.block), block_lengths(len(a), codec.block)
        magnitudes = np.abs(rows)
        zero = F32(0)

        def mean_above(threshold: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """The sum of the magnitudes above a threshold, and their mean; 0 where there are none."""
            above = magnitudes > threshold[:, None]
            total = block_sums(np.where(above, magnitudes, zero))
            return total, total / np.maximum(above.sum(axis=1), 1).astype(F32)

        with np.errstate(all="ignore"):
            total, largest = block_sums(magnitudes), magnitudes.max(axis=1)
            sound = np.isfinite(total)  # then every element is finite
            p, _ = power_of_two_scale(np.where(sound, largest, zero))
            level, best = np.zeros_like(total), np.zeros_like(total)
            threshold = total / lengths * F32(0.5)
            while (sound & (threshold < largest)).any():
                kept, mean = mean_above(threshold)
                gain = (kept * p) * (mean * p)  # as if the largest magnitude were about 1: never beyond float32
                level, best = np.where(gain > best, mean, level), np.maximum(gain, best)
                threshold = np.maximum(threshold + threshold, TINY)
            for _ in range(LLOYD_STEPS):
                _, level = mean_above(level * F32(0.5))
        some = (magnitudes > (level * F32(0.5))[:, None]) & sound[:, None]
        trit = some.astype(np.uint8) + (some & (rows < 0))
        self.write(codec.parts(len(a))[0], wire, np.where(sound, level, NAN), trit)
