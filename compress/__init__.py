"""Codecs: gradients to bytes and back. Nothing here knows of a network."""

import torch

from . import schedules
from .codec import BlockCodec, Codec, new_draw
from .codecs.cast import Cast, Identity
from .codecs.chunked_topk import ChunkedTopK
from .codecs.eden import EDEN
from .codecs.onebit import OneBit
from .codecs.outliers import Outliers
from .codecs.power_sgd import PowerSGD
from .codecs.qsgd import QSGD
from .codecs.random_k import RandomK
from .codecs.ternary import Ternary
from .codecs.terngrad import TernGrad
from .codecs.threshold import Threshold
from .codecs.topk import TopK
from .feedback.base import Feedback
from .feedback.lead import Lead
from .feedback.magnitudes import Magnitudes
from .feedback.momentum import Momentum
from .feedback.residual import Residual
from .feedback.tracking import Tracking
from .patches import PatchError, PatchReader, PatchWriter
from .sparse_codec import SparseCodec

#: One example of every codec. Contract tests, benchmarks and the command line take the codecs from here.
CODECS: tuple[Codec, ...] = (
    OneBit(),
    QSGD(),
    TernGrad(),
    EDEN(),
    EDEN(levels=2),
    Ternary(),
    TopK(),
    Threshold(),
    RandomK(),
    PowerSGD(),
    ChunkedTopK(),
    Cast(torch.float16),
    Cast(torch.bfloat16),
    Identity(),
)

__all__ = [
    "CODECS",
    "EDEN",
    "QSGD",
    "BlockCodec",
    "Cast",
    "ChunkedTopK",
    "Codec",
    "Feedback",
    "Identity",
    "Lead",
    "Magnitudes",
    "Momentum",
    "OneBit",
    "Outliers",
    "PatchError",
    "PatchReader",
    "PatchWriter",
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
