"""QSGD: levels of a block's norm."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .. import Kernels, Workspace
from ..codec_types import QSGDLike
from .arithmetic import F32, NAN, TINY, add, block_sums, in_blocks, levels_of, numbers, power_of_two_scale, uniform


class QSGD(Kernels):
    def encode(self, codec: QSGDLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        a = numbers(x)
        rows, s = in_blocks(a, codec.block), F32(codec.levels)
        magnitudes = np.abs(rows)
        largest = (magnitudes.view(np.uint32).max(axis=1)).view(F32)  # as integers, so that NaN is the largest
        p, inverse_p = power_of_two_scale(largest)
        with np.errstate(all="ignore"):
            if codec.norm == "max":
                norm = largest * p
            else:
                scaled = magnitudes * p[:, None]
                norm = np.sqrt(block_sums(scaled * scaled))
            unit = norm / s * inverse_p
            unit = np.where((largest > 0) & (unit == 0), TINY, unit)
            sound = np.isfinite(largest) & np.isfinite(unit)
            r = in_blocks(uniform(draw if codec.stochastic else None, len(a)), codec.block)
            level = levels_of(np.where(sound[:, None], magnitudes, F32(0)), p, unit * p, codec.levels, r)
        sign = (rows < 0) & (level > 0)
        code = level | sign.astype(np.uint8) << (codec.bits - 1)
        bits = np.unpackbits(code[:, :, None], axis=2, count=codec.bits, bitorder="little")
        (part,) = codec.parts(len(a))
        record = part.view(wire.numpy())
        record["unit"][:, 0] = np.where(sound, unit, NAN)
        record["codes"] = np.packbits(bits.reshape(len(rows), -1), axis=1, bitorder="little")

    def decode_add(self, codec: QSGDLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        (part,) = codec.parts(out.numel())
        record = part.view(wire.numpy())
        bits = np.unpackbits(record["codes"], axis=1, bitorder="little").reshape(part.records, codec.block, codec.bits)
        code = np.packbits(bits, axis=2, bitorder="little")[:, :, 0].reshape(-1)[: out.numel()]
        level = (code & codec.levels).astype(np.int32)
        minus = (code >> (codec.bits - 1)).astype(bool)
        workspace.status[0] += int((minus & (level == 0)).sum())
        workspace.status[1] += int((~np.isfinite(record["unit"])).sum())
        signed = np.where(minus, -level, level).astype(F32)
        with np.errstate(all="ignore"):
            add(out, alpha, signed * np.repeat(record["unit"][:, 0], codec.block)[: out.numel()])
