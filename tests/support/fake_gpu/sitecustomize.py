"""A GPU that is not there, for programs that want one: with this folder on PYTHONPATH, and `bin` on PATH, `make
gpu-report` runs from end to end on a CPU.

What is put on "cuda" lies on the CPU, and whatever gradwire does to it runs the kernels of csrc/ in the emulator of
`cuda_on_cpu`; CuPy and compute-sanitizer are stand-ins, and NVRTC is real. Tensors know where they would lie: a call
that mixes devices is refused, as are waits and pinned memory where torch refuses them (`tagging`). The GPU's name says
what it is. Times mean nothing. Each Python process that starts here imports torch and gradwire.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parent.parent))

from emulated import EmulatedDevice
from fake_gpu.tagging import CUDA, OnTheCpu, on_gpu, tag_buckets
from gradwire.compress.backends.cuda.runtime.device import DEVICES, Argument, Function

NAME = "emulated GPU"


class FakeGpu(EmulatedDevice):
    """Runs the kernels; memory of the CPU is out of their reach."""

    def function(self, file: str, name: str) -> Function:
        emulated = super().function(file, name)

        def launch(grid: int, block: int, args: Sequence[Argument]) -> None:
            if any(isinstance(given, torch.Tensor) and not on_gpu(given) for given in args):
                raise RuntimeError(f"CUDA error: an illegal memory access was encountered: {name} got a CPU tensor")
            with torch._C.DisableTorchFunction():
                emulated(grid, block, args)

        return launch


class Event:
    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    wait = synchronize

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Stream:
    """The only one there is: what is launched has run."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = nothing

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Graph:
    """Nothing is captured: a test of captured graphs is left out, with the reason."""

    def __init__(self) -> None:
        import pytest

        pytest.skip("the emulated GPU captures no graphs")


class Nccl:
    """A bare group, as whoever has none of torch's makes it."""

    Options = types.SimpleNamespace

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))


plain_future = torch.futures.Future.__init__


def without_devices(future: torch.futures.Future[Any], *, devices: Any = None) -> None:
    """A future whose value is on no device that the driver would have to know."""
    plain_future(future)


run_backward = torch.autograd._engine_run_backward


def run_backward_on_the_gpu(*args: Any, **kwargs: Any) -> Any:
    """A mode is off while it handles a call, such as `Tensor.backward`; hooks are to find it on."""
    with OnTheCpu():
        return run_backward(*args, **kwargs)


start_plain = threading.Thread.start


def start_on_the_gpu(thread: threading.Thread) -> None:
    """Modes belong to threads, and a GPU is there for all."""
    run = thread.run

    def run_there() -> None:
        with OnTheCpu():
            run()

    setattr(thread, "run", run_there)  # noqa: B010 - a method, says mypy
    start_plain(thread)


then_plain = torch._C.Future.then


def then_on_the_gpu(future: Any, callback: Callable[[Any], Any]) -> Any:
    """Callbacks run on threads that Python has not started."""

    def there(done: Any) -> Any:
        with contextlib.nullcontext() if torch._C._len_torch_function_stack() else OnTheCpu():
            return callback(done)

    return then_plain(future, there)


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
        "get_device_properties": lambda device=None: types.SimpleNamespace(multi_processor_count=2, name=NAME, major=9),
        "is_current_stream_capturing": lambda: False,
        "Stream": Stream,
        "stream": current,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "mem_get_info": lambda device=None: (1 << 30, 1 << 31),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {"allocation.all.allocated": OnTheCpu.allocated},
        "set_sync_debug_mode": lambda mode: setattr(OnTheCpu, "strict", mode == "error"),
        "manual_seed_all": lambda seed: None,
        "_sleep": lambda cycles: None,
    }
    for name, fake in fakes.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, fake)
    torch.version.cuda = "13.0"
    torch.cuda.nccl.version = lambda: (2, 28, 9)
    dist.is_nccl_available = lambda: True
    dist.init_process_group, dist.new_group = over_gloo(dist.init_process_group), over_gloo(dist.new_group)
    DEVICES[CUDA] = DEVICES[torch.device("cuda")] = FakeGpu(check=False)
    for owner, method, instead in (
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch.futures.Future, "__init__", without_devices),
        (torch._C.Future, "then", then_on_the_gpu),
        (threading.Thread, "start", start_on_the_gpu),
        (torch.autograd, "_engine_run_backward", run_backward_on_the_gpu),
        (dist, "ProcessGroupNCCL", Nccl),
    ):
        setattr(owner, method, instead)
    tag_buckets()
    OnTheCpu().__enter__()


install()
