"""TernGrad on a GPU: csrc/ternary.cu."""

from __future__ import annotations

import numpy as np

from ...codec_types import TernGradLike
from ..block_codec import Blocks, Numbers


class TernGrad(Blocks):
    file, encoder, decoder = "ternary.cu", "terngrad", "ternary"
    draws = True

    def encode_options(self, codec: TernGradLike) -> Numbers:
        return np.int32(codec.block), np.float32(codec.clip)

    def decode_options(self, codec: TernGradLike) -> Numbers:
        return (np.int32(codec.block),)
