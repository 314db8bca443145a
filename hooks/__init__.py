"""DDP communication hooks, periodic synchronisation, and the exchanges behind them."""

from .ddp import CompressState, compress_hook
from .local import LocalUpdates
from .sparse import sparse_all_reduce
from .statistics import Statistics

__all__ = ["CompressState", "LocalUpdates", "Statistics", "compress_hook", "sparse_all_reduce"]
