"""Numbers of tensors: shares, factors, and sums over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def shares(rows: int, size: int) -> list[int]:
    """How many of the rows each of `size` ranks gets: what is left over goes to the first ones."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def divide(x: Tensor, by: int) -> None:
    """In place; integers are truncated toward zero."""
    if x.is_floating_point():
        x.div_(by)
    else:
        x.copy_(torch.div(x, by, rounding_mode="trunc"))


def scale(x: Tensor, factor: float) -> None:
    """In place; integers are truncated toward zero."""
    if factor == 1.0:
        return
    if x.is_floating_point():
        x.mul_(factor)
    else:
        x.copy_((x.double() * factor).trunc())


def reduce_rows(rows: Tensor, op: Any) -> Tensor:
    """The reduction over the first dimension, in its order; sums of halves are float32."""
    if op == dist.ReduceOp.SUM:
        wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
        return rows.sum(0, dtype=wide)
    if op == dist.ReduceOp.PRODUCT:
        return rows.prod(0, dtype=rows.dtype)
    return rows.amin(0) if op == dist.ReduceOp.MIN else rows.amax(0)
