"""Horovod's PyTorch interface, over torch.distributed's Gloo and NCCL: change one line of the script.

>>> import gradwire.hooks.horovod as hvd  # instead of: import horovod.torch as hvd

Launch it with torchrun, mpirun, srun or plain python (`runtime.launch`). Operations match across ranks by name, in
whatever order they are called (`consensus`, `runtime`); `compression=` also takes gradwire's codecs (`compression`).
"""

from . import elastic
from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .mpi_ops import *  # noqa: F403
from .mpi_ops import __all__ as _operations
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm

__all__ = [  # noqa: PLE0604
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    *_operations,
]
