"""EDEN on a GPU: csrc/eden.cu."""

from __future__ import annotations

import numpy as np

from ...kernels import BlockLike
from ..block_codec import Blocks, Numbers


class EDEN(Blocks):
    file = "eden.cu"
    encoder = decoder = "eden"
    draws = True

    def encode_options(self, codec: BlockLike) -> Numbers:
        return (np.int32(codec.block_size),)

    decode_options = encode_options
