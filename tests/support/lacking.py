"""Skips for what this torch lacks, by name; and what stands in for it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed import ReduceOp, fsdp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import _ExperimentalConfig

DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters


def needs(what: str, there: bool) -> pytest.MarkDecorator:
    """Skips a test where something is not there."""
    return pytest.mark.skipif(not there, reason=f"torch {torch.__version__} lacks {what}")


def needs_fsdp(*names: str) -> pytest.MarkDecorator:
    """Skips a test where FSDP2's modules have no method of one of these names."""
    lacks = [name for name in names if not hasattr(FSDPModule, name)]
    return needs(f"FSDPModule.{', '.join(lacks)}", not lacks)


def needs_ddp(name: str) -> pytest.MarkDecorator:
    """Skips a test where DDP has no argument, and no property, of this name."""
    return needs(f"DDP's {name}", name in DDP_ARGUMENTS or hasattr(DistributedDataParallel, name))


def no_default_device() -> None:
    """End `torch.set_default_device`. torch 2.6 then fails to say which device is the default, unless the thread
    forgets that there was one."""
    torch.set_default_device(None)
    if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", torch) is None:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


needs_hook = needs_fsdp("set_all_reduce_hook")
needs_reduce_scatter = needs_fsdp("set_custom_reduce_scatter", "set_all_reduce_hook")
RESETS = hasattr(FSDPModule, "reset_iter_state")
GIVES_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
DIMENSIONS = hasattr(fsdp, "DataParallelMeshDims")
#: Torch 2.9 puts shards of uneven shards together in the wrong order, and distributes no empty tensors; 2.13 does both.
UNEVEN = DIMENSIONS
needs_dimensions = needs("fully_shard's dp_mesh_dims", DIMENSIONS)
needs_reset = needs_fsdp("reset_iter_state")
needs_ignored_parameters = needs(
    "fully_shard's ignored_params", "ignored_params" in inspect.signature(fully_shard).parameters
)
needs_skipped_buckets = needs_ddp("skip_all_reduce_unused_params")
SKIPS_BUCKETS = "skip_all_reduce_unused_params" in DDP_ARGUMENTS
needs_all_threads = needs(
    "the profiler's profile_all_threads", "profile_all_threads" in str(_ExperimentalConfig.__init__.__doc__)
)
needs_mixed_precision = needs(
    "a GPU, as it is built for, for DDP's mixed_precision",
    torch.version.cuda is None or torch.cuda.is_available(),
)
needs_premul_sum = needs("ReduceOp.PREMUL_SUM to be called", callable(ReduceOp.PREMUL_SUM))
