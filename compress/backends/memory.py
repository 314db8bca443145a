"""Memory of tensors: as addresses for kernels, and used again by one bucket after another.

A tensor becomes an address, which a kernel reads and writes without asking how its elements lie, only here, so that
memory with gaps, of another type or of lazily negated numbers is an error, and never read as something else.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

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


class ScratchPool:
    """float32 memory that somebody works in for a while, used again by the next: as many vectors as are open at a time,
    however many buckets there are. Each thread has its own."""

    def __init__(self) -> None:
        self.clear()

    @contextmanager
    def open(self, numel: int, device: torch.device) -> Iterator[Tensor]:
        """A vector of any content, float32 [numel]; on a GPU for the current stream alone."""
        free = self._free[get_ident(), torch.cuda.current_stream(device) if device.type == "cuda" else device]
        place = next((place for place, room in enumerate(free) if len(room) >= numel), -1)
        room = free.pop(place) if free else None
        if room is None or len(room) < numel:  # in the place of the longest that is too short
            room = torch.empty(numel, dtype=torch.float32, device=device)
        try:
            yield room[:numel]
        finally:
            insort(free, room, key=len)

    def clear(self) -> None:
        """Drop what is not open: buckets are others now, and may be smaller. DDP's first step has one for all."""
        #: By thread, and device or a GPU's stream, in whose order one use follows another; lists ascend in length.
        self._free: defaultdict[tuple[int, object], list[Tensor]] = defaultdict(list)
