"""Where a tensor becomes an address, which a kernel reads and writes without asking how its elements lie. Only here, so
that memory with gaps, of another type or of lazily negated numbers is an error, and never read as something else."""

from __future__ import annotations

import torch
from torch import Tensor


def address(x: Tensor, dtype: torch.dtype | None = None) -> int:
    """The address of memory without gaps.

    Raises:
        ValueError: the tensor has gaps, or is not of `dtype`.
    """
    if not x.is_contiguous() or x.is_neg() or (dtype is not None and x.dtype != dtype):
        _refuse(x, dtype)
    return x.data_ptr()


def rows_at(rows: Tensor, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """The address of rows that may lie apart, and the bytes from one to the next, which mean nothing if there is one.

    Raises:
        ValueError: a row has gaps, or is not of `dtype`.
    """
    if (rows.shape[1] > 1 and rows.stride(1) != 1) or rows.is_neg() or (dtype is not None and rows.dtype != dtype):
        _refuse(rows, dtype)
    return rows.data_ptr(), rows.stride(0) * rows.element_size()


def _refuse(x: Tensor, dtype: torch.dtype | None) -> None:
    wanted = "" if dtype is None else f" of {dtype}"
    raise ValueError(
        f"a kernel takes memory without gaps{wanted}, got a tensor of shape {tuple(x.shape)}, strides {x.stride()} and "
        f"{x.dtype}: call resolve_neg().contiguous(){'' if dtype is None else f'.to({dtype})'}"
    )
