"""OneBit on a GPU: csrc/onebit.cu."""

from __future__ import annotations

import numpy as np

from ...codec_types import OneBitLike
from ..block_codec import Blocks, Numbers


class OneBit(Blocks):
    file, encoder, decoder = "onebit.cu", "onebit", "onebit"

    def encode_options(self, codec: OneBitLike) -> Numbers:
        return np.int32(codec.block), np.int32(codec.scale == "sided")

    def decode_options(self, codec: OneBitLike) -> Numbers:
        return (np.int32(codec.block),)
