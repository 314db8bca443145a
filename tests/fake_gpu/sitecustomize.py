"""A GPU that is not there, for programs that want one: with this folder on PYTHONPATH, and `bin` on PATH, `make
gpu-report` runs from end to end on a CPU.

What is put on "cuda" lies on the CPU, and whatever gradwire does to it runs the kernels of csrc/ in the emulator of
`cuda_on_cpu`; CuPy and compute-sanitizer are stand-ins, and NVRTC is real. The GPU's name says what it is. Times mean
nothing. Each Python process that starts here imports torch and gradwire.
"""

from __future__ import annotations

import contextlib
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

sys.path.append(str(Path(__file__).resolve().parent.parent))

from emulated import CPU, EmulatedDevice
from gradwire.compress import backends
from gradwire.compress.backends.cuda.device import DEVICES

NAME = "emulated GPU"


class OnTheCpu(TorchFunctionMode):
    """Where a call names a GPU it means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: elsewhere(given) for name, given in (kwargs or {}).items()}
        return func(*map(elsewhere, args), **kwargs)


def elsewhere(given: Any) -> Any:
    named = isinstance(given, str) and given.partition(":")[0] == "cuda"
    return CPU if named or (isinstance(given, torch.device) and given.type == "cuda") else given


class Event:
    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Graph:
    """Nothing is captured: a test of captured graphs is left out, with the reason."""

    def __init__(self) -> None:
        import pytest

        pytest.skip("the emulated GPU captures no graphs")


@contextlib.contextmanager
def current(*_: Any) -> Iterator[None]:
    yield


def over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    def instead(*args: Any, **kwargs: Any) -> Any:
        if "nccl" in (kwargs.get("backend"), *args):
            args = tuple("gloo" if given == "nccl" else given for given in args)
            kwargs |= {"backend": "gloo"} if kwargs.get("backend") == "nccl" else {}
        return function(*args, **kwargs)

    return instead


def install() -> None:
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": current,
        "Event": Event,
        "CUDAGraph": Graph,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: types.SimpleNamespace(multi_processor_count=2, name=NAME),
        "current_stream": lambda device=None: types.SimpleNamespace(cuda_stream=0),
        "memory_stats": lambda device=None: {"allocation.all.allocated": 0},
        "set_sync_debug_mode": lambda mode: None,
        "manual_seed_all": lambda seed: None,
        "_sleep": lambda cycles: None,
    }
    for name, fake in fakes.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, fake)
    torch.version.cuda = "13.0"
    dist.is_nccl_available = lambda: True
    dist.init_process_group, dist.new_group = over_gloo(dist.init_process_group), over_gloo(dist.new_group)
    backends._loaders["cpu"] = backends._loaders["cuda"]
    DEVICES[CPU] = EmulatedDevice(check=False)
    OnTheCpu().__enter__()


install()
