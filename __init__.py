"""gradwire: gradient compression for PyTorch's distributed data parallel training.

>>> state = gradwire.CompressState(model, gradwire.TopK(density=0.01))
>>> model.register_comm_hook(state, gradwire.compress_hook)
"""

__version__ = "0.2.0"

from . import optim
from .compress import (
    CODECS,
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    Lead,
    Momentum,
    OneBit,
    Outliers,
    PowerSGD,
    RandomK,
    Residual,
    Ternary,
    TernGrad,
    Threshold,
    TopK,
    Tracking,
    schedules,
)
from .hooks import (
    Aggregate,
    CompressState,
    LocalUpdates,
    Meeting,
    MeetingLost,
    OuterSGD,
    Rounds,
    compress_fsdp,
    compress_hook,
    compress_stage,
    recommend,
    sparse_all_reduce,
)

__all__ = [
    "CODECS",
    "QSGD",
    "Aggregate",
    "Cast",
    "ChunkedTopK",
    "Codec",
    "CompressState",
    "Identity",
    "Lead",
    "LocalUpdates",
    "Meeting",
    "MeetingLost",
    "Momentum",
    "OneBit",
    "OuterSGD",
    "Outliers",
    "PowerSGD",
    "RandomK",
    "Residual",
    "Rounds",
    "TernGrad",
    "Ternary",
    "Threshold",
    "TopK",
    "Tracking",
    "__version__",
    "compress_fsdp",
    "compress_hook",
    "compress_stage",
    "optim",
    "recommend",
    "schedules",
    "sparse_all_reduce",
]
