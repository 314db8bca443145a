"""QSGD on a GPU: csrc/qsgd.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..block_codec import Blocks, Numbers


class QSGD(Blocks):
    file, encoder, decoder = "qsgd.cu", "qsgd", "qsgd"
    draws = True

    def encode_options(self, codec: Any) -> Numbers:
        return np.int32(codec.block), np.int32(codec.bits), np.int32(codec.norm == "l2")

    def decode_options(self, codec: Any) -> Numbers:
        return np.int32(codec.block), np.int32(codec.bits)
