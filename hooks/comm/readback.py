"""Asynchronous copies of numbers from a device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """A copy of a tensor in flight; on a GPU the host goes on meanwhile.

    Args:
        numbers: computed on the current stream.
        memory: of an earlier readback that has been read, to be used again.
    """

    def __init__(self, numbers: Tensor, memory: Tensor | None = None) -> None:
        self.memory, self._copied = numbers, None
        if numbers.is_cuda:
            if memory is None or memory.shape != numbers.shape or memory.dtype != numbers.dtype:
                memory = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True, device="cpu")
            self.memory = memory
            memory.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> list[list[int]]:
        """The rows of the matrix. Waits for kernels launched before the copy, and for none after it."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[list[int]] = self.memory.tolist()
        return found
