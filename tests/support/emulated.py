"""A GPU that is not there: the kernels of csrc/ run on CPU tensors, in the checked build of `cuda_on_cpu`.

with emulated_gpu(), use_backend("cuda"):
    codec.encode(...)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cuda_on_cpu import Module, ptx
from gradwire.compress.backends.cuda.runtime.device import DEVICES, THREADS, Argument, Device, Function
from gradwire.compress.backends.memory import address
from nvrtc import build
from torch import Tensor

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CPU = torch.device("cpu")


class EmulatedDevice(Device):
    """Runs kernels on the CPU. Few multiprocessors, so that grids are tiny and threads have to stride.

    Args:
        check: whether the source runs in the checked build.
        architecture: run what NVRTC makes of the source for it, without these checks, and not the source.

    Attributes:
        launches: the kernels launched so far, by name, oldest first.
        options: what every launch is given besides, for example `order="reverse"`, `seed=1` or `races="block"`.
    """

    def __init__(
        self,
        *,
        check: bool = True,
        sm_count: int = 2,
        csrc: Path = CSRC,
        architecture: int | None = None,
        **options: Any,
    ) -> None:
        self.sm_count = sm_count
        self.check = check
        self.csrc = csrc
        self.architecture = architecture
        self.options = options
        self.launches: list[str] = []
        self._functions: dict[tuple[str, str], Function] = {}

    def function(self, file: str, name: str) -> Function:
        if (file, name) not in self._functions:
            if self.architecture is None:
                module = _module(self.csrc / file, self.check)
            else:
                module = ptx_module(file, name, build(file, self.architecture).ptx)
            kernel = module.get_function(name, ftz=False)

            def launch(grid: int, block: int, args: Sequence[Argument]) -> None:
                for given in args:
                    if isinstance(given, Tensor):
                        address(given)  # refuses what a GPU would be refused
                self.launches.append(name)
                _only_these_keep_stacks(module)
                kernel((grid,), (block,), args, **self.options)

            self._functions[file, name] = launch
        return self._functions[file, name]

    def wave(self, file: str, name: str, threads: int = THREADS) -> int:
        return 2 * self.sm_count


_modules: dict[tuple[Path, bool], Module] = {}


def _module(file: Path, check: bool) -> Module:
    """Each file is compiled once a process at most; the shared object is kept for the next one."""
    if (file, check) not in _modules:
        _modules[file, check] = Module(file, check=check, include=[file.parent / "include"])
    return _modules[file, check]


#: Modules of one kernel each, by the C++ that stands for it; and those that ran last.
_ptx_modules: dict[str, Module] = {}
_ran_last: OrderedDict[Path, Module] = OrderedDict()
#: Modules that keep their stacks: each may hold thousands of a process's 65,530 mappings.
MOST_STACKS = 16


def ptx_module(file: str, name: str, text: str) -> Module:
    """One kernel of csrc/`file`, as NVRTC has compiled it."""
    code = ptx.translate(text, (CSRC / file).read_text("utf-8"), name)
    if code not in _ptx_modules:
        _ptx_modules[code] = Module(f"{Path(file).stem}.ptx", code=code, options=ptx.OPTIONS)
    return _ptx_modules[code]


def _only_these_keep_stacks(module: Module) -> None:
    """Give back the stacks of the module that has not run for longest: a process may have so many mappings."""
    _ran_last[module.path] = module
    _ran_last.move_to_end(module.path)
    if len(_ran_last) > MOST_STACKS:
        _ran_last.popitem(last=False)[1].library.emulator_give_back()


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
