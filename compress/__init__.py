"""Codecs: gradients to bytes and back. Nothing here knows of a network."""

import torch

from . import schedules
from .cast import Cast, Identity
from .chunked import ChunkedTopK
from .codec import BlockCodec, Codec, SparseCodec, new_draw
from .feedback import Feedback, Residual
from .momentum import Momentum
from .onebit import OneBit
from .outliers import Outliers
from .power_sgd import PowerSGD
from .qsgd import QSGD
from .random_k import RandomK
from .ternary import Ternary
from .terngrad import TernGrad
from .threshold import Threshold
from .topk import TopK
from .tracking import Tracking

#: One example of every codec. Contract tests, benchmarks and the command line take the codecs from here.
CODECS: tuple[Codec, ...] = (
    OneBit(),
    QSGD(),
    TernGrad(),
    Ternary(),
    TopK(),
    Threshold(),
    RandomK(),
    PowerSGD(),
    ChunkedTopK(),
    Outliers(OneBit()),
    Cast(torch.float16),
    Cast(torch.bfloat16),
    Identity(),
)

__all__ = [
    "CODECS",
    "QSGD",
    "BlockCodec",
    "Cast",
    "ChunkedTopK",
    "Codec",
    "Feedback",
    "Identity",
    "Momentum",
    "OneBit",
    "Outliers",
    "PowerSGD",
    "RandomK",
    "Residual",
    "SparseCodec",
    "TernGrad",
    "Ternary",
    "Threshold",
    "TopK",
    "Tracking",
    "new_draw",
    "schedules",
]
