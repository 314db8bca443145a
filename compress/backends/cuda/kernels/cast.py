"""Cast and Identity on a GPU: csrc/cast.cu."""

from __future__ import annotations

import numpy as np
import torch

from ...codec_types import CastLike
from ..block_codec import Blocks, Numbers
from ..runtime.device import ROW, STORED


class Cast(Blocks):
    """Identity too: a cast to float32."""

    file, encoder, decoder = "cast.cu", "cast", "cast"

    def block(self, codec: CastLike) -> int:
        return ROW

    def encode_options(self, codec: CastLike) -> Numbers:
        return (np.int32(STORED[getattr(codec, "dtype", torch.float32)]),)

    def decode_options(self, codec: CastLike) -> Numbers:
        return self.encode_options(codec)
