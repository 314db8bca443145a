"""DDP communication hooks and the exchanges behind them."""

from .ddp import compress_hook
from .sparse import sparse_all_reduce
from .state import CompressState, Statistics

__all__ = ["CompressState", "Statistics", "compress_hook", "sparse_all_reduce"]
