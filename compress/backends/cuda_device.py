"""How a kernel of csrc/ gets onto a GPU: compiled at run time, kept in a cache, launched on torch's current stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

#: What a kernel takes: a tensor is passed as the address of its first element, None as a null pointer, an int as an
#: integer of up to 64 bits, a NumPy scalar as the bytes it is. A Python float would be ambiguous and is refused.
Argument = Tensor | np.generic | int | None


class Function(Protocol):
    """A compiled kernel: launches and returns at once. It neither allocates nor synchronises."""

    def __call__(self, grid: int, block: int, args: Sequence[Argument]) -> None: ...


class Device(ABC):
    """One GPU, real or emulated.

    Attributes:
        sm_count: its streaming multiprocessors; a grid is some small multiple of them.
    """

    sm_count: int

    @abstractmethod
    def function(self, file: str, name: str) -> Function:
        """The kernel `name`, an `extern "C"` function of csrc/`file`: compiled once and kept.

        Raises:
            RuntimeError: the source does not compile, or has no such kernel.
        """


#: The devices by torch device. A test puts an emulated GPU under `torch.device("cpu")`.
DEVICES: dict[torch.device, Device] = {}


def device_for(torch_device: torch.device) -> Device:
    """The GPU that holds the tensors of `torch_device`.

    Raises:
        RuntimeError: it cannot be used; the text says what to install.
    """
    if torch_device not in DEVICES:
        raise RuntimeError(f"no CUDA device for {str(torch_device)!r}")
    return DEVICES[torch_device]
