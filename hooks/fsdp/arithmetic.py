"""FSDP2's arithmetic around a reduction: dtypes, divisors, and the order of the parameters."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch


def post_divide(group: Any, dtype: torch.dtype) -> float:
    """FSDP's divisor of gradients after the hook. For dtypes with less range than float32, FSDP divides before and
    after the reduction, by powers of two near the square root of the whole divisor."""
    overflows = dtype not in (torch.float32, torch.bfloat16)
    if not only_sums(group, dtype):
        return 1.0
    factor, before = divide_factor(group), 1.0
    while overflows and factor % before == 0 and factor / before > before:
        before *= 2
    return factor / before


def only_sums(group: Any, dtype: torch.dtype) -> bool:
    """True if FSDP reduces by sums, and divides by itself."""
    forced = getattr(group, "force_sum_reduction_for_comms", False) or group.device.type == "mtia"
    return forced or dtype not in (torch.float32, torch.bfloat16)


def divide_factor(group: Any) -> float:
    """FSDP's whole divisor of the sum over the shards, before and after the reduction together."""
    factor = group.gradient_divide_factor
    return float(group.mesh_info.shard_mesh_size if factor is None else factor)


def grad_dtype(parameter: Any) -> torch.dtype | None:
    """The dtype of a parameter's sharded gradients, as the optimizer sees them. Before torch 2.15 it is the
    parameter's own; since then `Tensor.grad_dtype`, if the user has set it. None: as autograd makes them."""
    sharded = parameter.sharded_param
    if not hasattr(parameter, "sharded_grad_dtype"):
        found: torch.dtype | None = sharded.dtype
    elif sharded._has_grad_dtype_override:
        found = sharded.grad_dtype
    else:
        found = parameter.sharded_grad_dtype if parameter._has_sharded_grad_dtype_override else sharded.dtype
    return found


def reduce_order(group: Any) -> list[Any]:
    """A group's parameters in the order of FSDP's reduction. Since torch 2.15 gradients of one dtype lie together."""
    if not hasattr(group, "_reduce_scatter_param_indices"):
        return list(group.fsdp_params)
    by_dtype: dict[torch.dtype | None, list[Any]] = {}
    for parameter in group.fsdp_params:
        by_dtype.setdefault(grad_dtype(parameter), []).append(parameter)
    return [parameter for alike in by_dtype.values() for parameter in alike]


def reduce_dtype(group: Any, parameters: list[Any]) -> torch.dtype:
    """The widest dtype in which FSDP reduces gradients of these parameters of a group. Since torch 2.15 it depends on
    each of them; float32 stands for a dtype that only autograd knows."""
    policy = getattr(group, "mp_policy", None)
    if policy is not None:  # one for the group, before torch 2.15
        dtypes = {policy.reduce_dtype or policy.param_dtype or parameters[0].sharded_param.dtype}
    else:
        dtypes = {p.mp_policy.reduce_dtype or grad_dtype(p) or torch.float32 for p in parameters}
    return reduce(torch.promote_types, dtypes)
