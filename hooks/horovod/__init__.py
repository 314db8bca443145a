"""Horovod's PyTorch interface, over torch.distributed's Gloo and NCCL.

>>> import gradwire.hooks.horovod as hvd  # instead of: import horovod.torch as hvd
"""

from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .mpi_ops import *  # noqa: F403
from .optimizer import DistributedOptimizer
