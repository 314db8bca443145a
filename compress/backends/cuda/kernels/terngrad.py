"""TernGrad on a GPU: csrc/ternary.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..block_codec import Blocks, Numbers


class TernGrad(Blocks):
    file, encoder, decoder = "ternary.cu", "terngrad", "ternary"
    draws = True

    def encode_options(self, codec: Any) -> Numbers:
        return np.int32(codec.block), np.float32(codec.clip)

    def decode_options(self, codec: Any) -> Numbers:
        return (np.int32(codec.block),)
