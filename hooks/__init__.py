"""DDP communication hooks and the exchanges behind them."""

from .ddp import CompressState, compress_hook
from .sparse import sparse_all_reduce
from .statistics import Statistics

__all__ = ["CompressState", "Statistics", "compress_hook", "sparse_all_reduce"]
