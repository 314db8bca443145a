"""Ternary on a GPU: csrc/ternary.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..block_codec import Numbers
from .terngrad import TernGrad


class Ternary(TernGrad):
    encoder = "ternary"
    draws = False

    def encode_options(self, codec: Any) -> Numbers:
        return (np.int32(codec.block),)
