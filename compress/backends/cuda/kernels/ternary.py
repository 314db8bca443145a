"""Ternary on a GPU: csrc/ternary.cu."""

from __future__ import annotations

import numpy as np

from ...codec_types import TernaryLike
from ..block_codec import Numbers
from .terngrad import TernGrad


class Ternary(TernGrad):
    encoder = "ternary"
    draws = False

    def encode_options(self, codec: TernaryLike) -> Numbers:
        return (np.int32(codec.block),)
