"""Horovod's PyTorch interface, over torch.distributed's Gloo and NCCL.

>>> import gradwire.hooks.horovod as hvd  # instead of: import horovod.torch as hvd
"""

from .mpi_ops import *  # noqa: F403
