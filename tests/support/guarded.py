"""Memory between pages that nobody may touch: who reads or writes past either end is killed on the spot."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

FILL = 0xA5


class Room:
    """Some pages, of which one tensor at a time lies at the very front or the very back.

    Args:
        pages: how many there are between the two guards.
    """

    def __init__(self, pages: int = 16) -> None:
        size = mmap.PAGESIZE
        self._memory = np.frombuffer(mmap.mmap(-1, (pages + 2) * size), np.uint8)
        self._guards = [(self._memory.ctypes.data + at * size, size) for at in (0, pages + 1)]
        self._protect(0)
        self.memory = self._memory[size : (pages + 1) * size]
        self.memory[:] = FILL
        self._free = self.memory[:0]

    def _protect(self, how: int) -> None:
        for address, size in self._guards:
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), how) == 0

    def close(self) -> None:
        """Let the memory be freed like any other."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def put(self, tensor: Tensor, end: str) -> Tensor:
        """A copy of `tensor` at one end, "front" or "back"."""
        size = tensor.numel() * tensor.element_size()
        used = self.memory[len(self.memory) - size :] if end == "back" else self.memory[:size]
        self._free = self.memory[: len(self.memory) - size] if end == "back" else self.memory[size:]
        self._free[-mmap.PAGESIZE :] = self._free[: mmap.PAGESIZE] = FILL
        return torch.from_numpy(used).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def untouched(self) -> bool:
        """Whether nothing was written beside the tensor, as far as a page; beyond the ends nothing can be."""
        return bool((self._free[: mmap.PAGESIZE] == FILL).all() and (self._free[-mmap.PAGESIZE :] == FILL).all())
