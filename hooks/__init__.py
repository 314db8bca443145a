"""DDP communication hooks, sharded models, periodic synchronisation, and the exchanges behind them."""

from .ddp import CompressState, compress_hook
from .fsdp import compress_fsdp
from .local import LocalUpdates
from .optimizers import Recommendation, recommend
from .sparse import sparse_all_reduce
from .statistics import Statistics

__all__ = [
    "CompressState",
    "LocalUpdates",
    "Recommendation",
    "Statistics",
    "compress_fsdp",
    "compress_hook",
    "recommend",
    "sparse_all_reduce",
]
