"""TernGrad: drawn trits."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...formats.wire import Part
from .. import Kernels, Workspace
from ..codec_types import TernGradLike
from .arithmetic import (
    F32,
    LANES,
    NAN,
    TINY,
    add,
    block_lengths,
    block_sums,
    in_blocks,
    levels_of,
    numbers,
    power_of_two_scale,
    uniform,
)


class TernGrad(Kernels):
    def encode(self, codec: TernGradLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        a = numbers(x)
        rows, lengths = in_blocks(a, codec.block), block_lengths(len(a), codec.block)
        magnitudes = np.abs(rows)
        largest = (magnitudes.view(np.uint32).max(axis=1)).view(F32)
        p, inverse_p = power_of_two_scale(largest)
        with np.errstate(all="ignore"):
            scaled = magnitudes * p[:, None]
            sigma = np.sqrt(block_sums(scaled * scaled) / lengths)
            scaled_scale = np.fmin(largest * p, F32(codec.clip) * sigma)
            scale = scaled_scale * inverse_p
            scale = np.where((largest > 0) & (scale == 0), TINY, scale)
            sound = np.isfinite(largest)
            r = in_blocks(uniform(draw if codec.stochastic else None, len(a)), codec.block)
            level = levels_of(np.where(sound[:, None], magnitudes, F32(0)), p, scaled_scale, 1, r)
        self.write(codec.parts(len(a))[0], wire, np.where(sound, scale, NAN), level + (level & (rows < 0)))

    @staticmethod
    def write(part: Part, wire: Tensor, scale: np.ndarray, trit: np.ndarray) -> None:
        """The records of scales [blocks] and trits [blocks, block]."""
        record = part.view(wire.numpy())
        record["scale"][:, 0] = scale
        record["trits"] = packed(trit)

    def decode_add(self, codec: TernGradLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        (part,) = codec.parts(out.numel())
        record = part.view(wire.numpy())
        signed = unpacked(record["trits"], workspace)
        workspace.status[1] += int((~np.isfinite(record["scale"])).sum())
        with np.errstate(all="ignore"):
            add(out, alpha, signed * record["scale"])


POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def packed(trit: np.ndarray) -> np.ndarray:
    """Trits [blocks, block], 2 for minus, as bytes [blocks, block / 5]."""
    planes = trit.reshape(len(trit), -1, 5, LANES)
    return (planes * POWERS).sum(axis=2, dtype=np.uint8).reshape(len(trit), -1)


def unpacked(trits: np.ndarray, workspace: Workspace) -> np.ndarray:
    """Their inverse: 0, 1 and -1, float32; zeros in the place of bytes that are none, which are counted."""
    planes = trits.reshape(len(trits), -1, 1, LANES)
    sound = planes < 243
    workspace.status[0] += int((~sound).sum())
    trit = np.where(sound, planes // POWERS % 3, 0)
    return np.array([0, 1, -1], F32)[trit].reshape(len(trits), -1)
