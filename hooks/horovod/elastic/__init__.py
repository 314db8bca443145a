"""Elastic training: a state that survives restarts, a sampler that goes on where it was, and torchrun to restart."""

from ..errors import HorovodInternalError, HostsUpdatedInterrupt
from .sampler import ElasticSampler
from .state import TorchState, run

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "TorchState", "run"]
