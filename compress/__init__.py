"""Codecs: gradients to bytes and back. Nothing here knows of a network."""

import torch

from .cast import Cast, Identity
from .codec import BlockCodec, Codec, SparseCodec, new_draw
from .feedback import Feedback, Residual
from .onebit import OneBit
from .qsgd import QSGD
from .terngrad import TernGrad
from .topk import TopK
from .tracking import Tracking

#: One example of every codec. Contract tests, benchmarks and the command line take the codecs from here.
CODECS: tuple[Codec, ...] = (
    OneBit(),
    QSGD(),
    TernGrad(),
    TopK(),
    Cast(torch.float16),
    Cast(torch.bfloat16),
    Identity(),
)

__all__ = [
    "CODECS",
    "QSGD",
    "BlockCodec",
    "Cast",
    "Codec",
    "Feedback",
    "Identity",
    "OneBit",
    "Residual",
    "SparseCodec",
    "TernGrad",
    "TopK",
    "Tracking",
    "new_draw",
]
