"""OneBit: means of the two signs."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .. import Kernels, Workspace
from ..codec_types import OneBitLike
from .arithmetic import F32, NAN, add, block_lengths, block_sums, in_blocks, numbers


class OneBit(Kernels):
    def encode(self, codec: OneBitLike, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        a = numbers(x)
        rows, lengths = in_blocks(a, codec.block), block_lengths(len(a), codec.block)
        below = rows < 0
        zero = F32(0)
        with np.errstate(all="ignore"):
            if codec.scale == "sided":
                count = below.sum(axis=1).astype(F32)
                negative = block_sums(np.where(below, rows, zero)) / np.maximum(count, F32(1))
                positive = block_sums(np.where(below, zero, rows)) / np.maximum(lengths - count, F32(1))
            else:
                positive = block_sums(np.abs(rows)) / lengths
                negative = zero - positive
        sound = np.isfinite(negative) & np.isfinite(positive)
        (part,) = codec.parts(len(a))
        record = part.view(wire.numpy())
        record["negative"][:, 0] = np.where(sound, negative + zero, NAN)  # + 0 turns -0 into 0
        record["positive"][:, 0] = np.where(sound, positive + zero, NAN)
        record["signs"] = np.packbits(below & sound[:, None], axis=1, bitorder="little")

    def decode_add(self, codec: OneBitLike, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        (part,) = codec.parts(out.numel())
        record = part.view(wire.numpy())
        signs = np.unpackbits(record["signs"], axis=1, bitorder="little")
        add(out, alpha, np.where(signs, record["negative"], record["positive"]))
        sound = np.isfinite(record["negative"]) & np.isfinite(record["positive"])
        workspace.status[1] += int((~sound).sum())
