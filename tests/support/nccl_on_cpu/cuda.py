"""What of torch.cuda and of futures the library calls, on a machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from emulated import EmulatedDevice
from gradwire.compress.backends.cuda.runtime.device import DEVICES, THREADS, Argument, Device, Function
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .machine import Event, Machine, activated, active
from .tensors import DEVICE, Factories, GpuTensor


class Gpu(Device):
    """Launches the kernels of csrc/ on the current stream; the emulator runs them when their turn comes."""

    def __init__(self) -> None:
        self.emulator = EmulatedDevice()
        self.sm_count = self.emulator.sm_count

    def function(self, file: str, name: str) -> Function:
        kernel = self.emulator.function(file, name)

        def launch(grid: int, block: int, args: Sequence[Argument]) -> None:
            for given in args:
                if isinstance(given, Tensor) and not isinstance(given, GpuTensor):
                    raise TypeError(f"{name} is given a tensor on the CPU")
            inner = [given.inner if isinstance(given, GpuTensor) else given for given in args]
            active().launch(lambda: kernel(grid, block, inner))

        return launch

    def wave(self, file: str, name: str, threads: int = THREADS) -> int:
        return self.emulator.wave(file, name, threads)


def _future_init(self: Any, *, devices: Any = None) -> None:
    torch._C.Future.__init__(self, [])
    self.on_device, self.event, self.result = bool(devices), None, None


def _set_result(self: Any, result: Any) -> None:
    if self.on_device and any(isinstance(part, GpuTensor) for part in tree_leaves(result)):
        # As torch: without a tensor of a device in it, nobody who waits for the result waits for the device.
        self.event = active().current.record_event()
    torch._C.Future.set_result(self, result)


def _wait(self: Any) -> Any:
    result = torch._C.Future.wait(self)
    if self.event is not None:
        active().current.wait_event(self.event)
        if isinstance(result, GpuTensor):
            result.record_stream(active().current)
    return result


_run_backward = torch.autograd._engine_run_backward


def _backward(*args: Any, **kwargs: Any) -> Any:
    """`Tensor.backward` leaves the mode; hooks are to find it."""
    with Factories():
        return _run_backward(*args, **kwargs)


@contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    """Within the block torch.cuda is this machine."""
    patch = pytest.MonkeyPatch()
    fakes = {
        "current_stream": lambda device=None: machine.current,
        "Stream": lambda device=None: machine.new_stream(),
        "stream": machine.on,
        "Event": Event,
        "set_device": lambda device: None,
        "current_device": lambda: DEVICE.index,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: machine.waits("torch.cuda.synchronize"),
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(torch.cuda.nvtx, "range", nullcontext)
    for name, fake in {"__init__": _future_init, "set_result": _set_result, "wait": _wait}.items():
        patch.setattr(torch.futures.Future, name, fake)
    patch.setattr(torch.autograd, "_engine_run_backward", _backward)
    patch.setitem(DEVICES, DEVICE, Gpu())
    try:
        with activated(machine):
            yield machine
    finally:
        patch.undo()
