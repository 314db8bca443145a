"""Optimizers whose ranks exchange something else than gradients, compressed: where a hook would come too early."""

from .adam import OneBitAdam
from .lion import DistributedLion
from .replicated import keep_gradients

__all__ = ["DistributedLion", "OneBitAdam", "keep_gradients"]
