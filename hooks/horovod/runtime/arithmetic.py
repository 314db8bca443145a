"""Numbers: those that a script gives, and of tensors shares, factors, and sums over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def number(name: str, value: Any) -> float:
    """A number that a script gives as the argument `name`; ValueError if it is none."""
    try:
        if not isinstance(value, (str, bytes)):  # which float() would read
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ValueError(f"{name}={value!r}: expected a number")


def integers(name: str, values: Any, expected: str) -> list[int]:
    """Whole numbers that a script gives as the argument `name`; ValueError if they are none: nothing is rounded."""
    try:
        given = list(values)
        whole = [int(value) for value in given]
        if not any(isinstance(one, (str, bytes)) or one != i for one, i in zip(given, whole, strict=True)):
            return whole
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ValueError(f"{name}={values!r}: expected {expected}")


def shares(rows: int, size: int) -> list[int]:
    """Numbers of rows of each of `size` ranks; the first ranks get one more of a remainder."""
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
