"""DDP's options that change how its hook has to reduce."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.algorithms import join
from torch.nn.parallel import DistributedDataParallel

from ...compress.feedback.base import Feedback
from ..comm.between_steps import undivided_module


def check_options(model: DistributedDataParallel, strategy: Feedback | None) -> None:
    """Raise ValueError for options under which DDP's hook cannot reduce."""
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            'torch._dynamo.config.optimize_ddp="python_reducer" calls hooks with other arguments: set it to '
            '"ddp_optimizer"'
        )
    if getattr(model, "_delay_all_reduce_params", ()):
        raise ValueError(
            "DistributedDataParallel reduces the parameters of delay_all_reduce_named_params by itself, after the "
            "communication hook, and they may differ between ranks: leave out delay_all_reduce_named_params and "
            "param_to_hook_all_reduce"
        )
    clips = strategy is not None and strategy.largest_norm is not None
    if clips and model.static_graph and getattr(model, "skip_all_reduce_unused_params", False):
        raise ValueError(
            f"error_feedback={strategy} waits for the norm of all gradients; with static_graph=True and "
            "skip_all_reduce_unused_params=True the end of the pass is not known: leave out one of the three"
        )


undivided_module(join)  # a rank that has joined takes steps outside of backward passes


def join_mode(model: nn.Module | None) -> tuple[bool, bool]:
    """A pair: True if the model is in `DDP.join`, and True if means are over the ranks that have not joined."""
    joins = getattr(getattr(model, "_join_config", None), "enable", False)
    return joins, joins and not getattr(model, "_divide_by_initial_world_size", True)


def frees_buckets(model: nn.Module | None) -> bool:
    """True if DDP frees its buckets' memory after each backward pass."""
    return getattr(model, "lazy_bucket_allocation", False)


def finalized_by_hand(model: nn.Module | None) -> bool:
    """True if the user decides when DDP applies the means, within the backward pass or after it.

    Raises:
        RuntimeError: DDP then counts parameters' uses too late.
    """
    if not getattr(model, "require_manual_backward_finalization", False):
        return False
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(model, option):
            raise RuntimeError(
                f"gradwire keeps what DDP({option}=True) throws away, and must know of it when backward ends: "
                "leave out require_manual_backward_finalization, or that"
            )
    return True


def strides_in_bucket(parameter: Tensor, buffer: Tensor) -> tuple[int, ...]:
    """Strides of a gradient in DDP's bucket: as of when DDP made the bucket, which only a gradient that is a view of it
    tells. Else the parameter's if they leave no gap, or contiguous ones."""
    grad = parameter.grad
    if grad is not None and grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
        return grad.stride()
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= size
    return parameter.stride()
