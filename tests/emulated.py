"""A GPU that is not there: the kernels of csrc/ run on CPU tensors, in the checked build of `cuda_on_cpu`.

with emulated_gpu(), use_backend("cuda"):
    codec.encode(...)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cuda_on_cpu import Module
from gradwire.compress.backends.addresses import address
from gradwire.compress.backends.cuda.device import DEVICES, Argument, Device, Function
from torch import Tensor

CSRC = Path(__file__).resolve().parent.parent / "csrc"
CPU = torch.device("cpu")


class EmulatedDevice(Device):
    """Runs kernels on the CPU. Few multiprocessors, so that grids are tiny and threads have to stride.

    Attributes:
        launches: the kernels launched so far, by name, oldest first.
        options: what every launch is given besides, for example `order="reverse"`, `seed=1` or `races="block"`.
    """

    def __init__(self, *, check: bool = True, sm_count: int = 2, csrc: Path = CSRC, **options: Any) -> None:
        self.sm_count = sm_count
        self.check = check
        self.csrc = csrc
        self.options = options
        self.launches: list[str] = []
        self._functions: dict[tuple[str, str], Function] = {}

    def function(self, file: str, name: str) -> Function:
        if (file, name) not in self._functions:
            kernel = _module(self.csrc / file, self.check).get_function(name, ftz=False)

            def launch(grid: int, block: int, args: Sequence[Argument]) -> None:
                for given in args:
                    if isinstance(given, Tensor):
                        address(given)  # refuses what a GPU would be refused
                self.launches.append(name)
                kernel((grid,), (block,), args, **self.options)

            self._functions[file, name] = launch
        return self._functions[file, name]


_modules: dict[tuple[Path, bool], Module] = {}


def _module(file: Path, check: bool) -> Module:
    """Each file is compiled once a process at most; the shared object is kept for the next one."""
    if (file, check) not in _modules:
        _modules[file, check] = Module(file, check=check, include=[file.parent])
    return _modules[file, check]


def forget(csrc: Path) -> None:
    """Give back what the modules of a directory hold, which will not be used again."""
    for file, check in [key for key in _modules if key[0].parent == csrc]:
        _modules.pop((file, check)).library.emulator_give_back()


@contextmanager
def emulated_gpu(device: EmulatedDevice | None = None) -> Iterator[EmulatedDevice]:
    """Within the block CPU tensors lie on a GPU, as far as the backend "cuda" can tell."""
    device = device or EmulatedDevice()
    before = DEVICES.get(CPU)
    DEVICES[CPU] = device
    try:
        yield device
    finally:
        del DEVICES[CPU]
        if before is not None:
            DEVICES[CPU] = before
