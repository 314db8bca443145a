"""EDEN on a GPU: csrc/eden.cu."""

from __future__ import annotations

import numpy as np

from ...codec_types import EDENLike
from ..block_codec import Blocks, Numbers


class EDEN(Blocks):
    file = "eden.cu"
    draws = True

    def names(self, codec: EDENLike) -> tuple[str, str]:
        form = "eden_bits" if codec.levels == 2 else "eden"
        return f"{form}_encode", f"{form}_decode"

    def encode_options(self, codec: EDENLike) -> Numbers:
        return (np.int32(codec.block_size),)

    decode_options = encode_options
