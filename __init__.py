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
    OneBit,
    Outliers,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
)
from .hooks import CompressState, LocalUpdates, compress_hook, sparse_all_reduce

__all__ = [
    "CODECS",
    "QSGD",
    "Cast",
    "ChunkedTopK",
    "Codec",
    "CompressState",
    "Identity",
    "LocalUpdates",
    "OneBit",
    "Outliers",
    "Residual",
    "TernGrad",
    "Ternary",
    "TopK",
    "Tracking",
    "__version__",
    "compress_hook",
    "sparse_all_reduce",
]
