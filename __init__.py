"""gradwire: gradient compression for PyTorch's distributed data parallel training.

>>> state = gradwire.CompressState(model, gradwire.TopK(density=0.01))
>>> model.register_comm_hook(state, gradwire.compress_hook)
"""

__version__ = "0.1.0"

from .compress import (
    CODECS,
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    Momentum,
    OneBit,
    Outliers,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
    schedules,
)
from .hooks import CompressState, LocalUpdates, compress_hook, recommend, sparse_all_reduce

__all__ = [
    "CODECS",
    "QSGD",
    "Cast",
    "ChunkedTopK",
    "Codec",
    "CompressState",
    "Identity",
    "LocalUpdates",
    "Momentum",
    "OneBit",
    "Outliers",
    "Residual",
    "TernGrad",
    "Ternary",
    "TopK",
    "Tracking",
    "__version__",
    "compress_hook",
    "recommend",
    "schedules",
    "sparse_all_reduce",
]
