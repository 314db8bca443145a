"""QSGD on a GPU: csrc/qsgd.cu."""

from __future__ import annotations

import numpy as np

from ...codec_types import QSGDLike
from ..block_codec import Blocks, Numbers


class QSGD(Blocks):
    file, encoder, decoder = "qsgd.cu", "qsgd", "qsgd"
    draws = True

    def encode_options(self, codec: QSGDLike) -> Numbers:
        return np.int32(codec.block), np.int32(codec.bits), np.int32(codec.norm == "l2")

    def decode_options(self, codec: QSGDLike) -> Numbers:
        return np.int32(codec.block), np.int32(codec.bits)
