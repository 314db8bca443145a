"""How a kernel of csrc/ gets onto a GPU: compiled at run time, loaded by CuPy, launched on torch's current stream."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...memory import address
from . import compiler

#: Threads of a block, unless a kernel says otherwise.
THREADS = 256
#: Elements that a warp takes at a time.
ROW = 256
#: How the kernels name a format that is stored.
STORED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: How the kernels name what values are packed as.
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
SUFFIXES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
#: Most blocks of threads for each multiprocessor.
SHARES = 64
#: How full the last wave of blocks has to be where there are several: as many as the GPU holds at once are a wave.
FULL = 0.9

#: An argument of a kernel: a tensor without gaps is passed as the address of its first element, None as a null pointer,
#: an int as an integer of up to 64 bits, a NumPy scalar as the bytes it is. A Python float is refused: it is ambiguous.
Argument = Tensor | np.generic | int | None


def passed(args: Sequence[Argument]) -> tuple[np.generic | int, ...]:
    """The arguments as CuPy gets them; it converts Python integers fastest.

    Raises:
        ValueError: a tensor has gaps.
    """
    return tuple([address(a) if isinstance(a, Tensor) else 0 if a is None else a for a in args])


class Function(Protocol):
    """A compiled kernel: launches and returns at once. It neither allocates nor synchronises.

    The tensors must live until the launch has run. The caching allocator of torch sees to that for tensors of the
    current stream; for any other, `Tensor.record_stream` is the caller's to call.
    """

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
            RuntimeError: the source does not compile, or cannot be loaded.
        """

    @abstractmethod
    def wave(self, file: str, name: str, threads: int = THREADS) -> int:
        """How many blocks of so many threads of that kernel the GPU holds at once.

        Raises:
            RuntimeError: as for `function`.
        """

    def grid(self, file: str, name: str, turns: int) -> int:
        """How many blocks of a kernel to launch that goes over a gradient: they stride over so many turns."""
        return full_waves(turns, self.wave(file, name), SHARES * self.sm_count)

    def launch(self, file: str, name: str, turns: int, args: Sequence[Argument]) -> None:
        """Launch such a kernel."""
        self.function(file, name)(self.grid(file, name, turns), THREADS, args)


def launch_rows(file: str, name: str, first: Tensor, *rest: Argument) -> None:
    """Launch a kernel of which each warp takes a row of elements: on its tensors, and how long the first one is."""
    numel = first.numel()
    turns = -(-numel // (ROW * (THREADS // 32)))
    if turns:
        device_for(first.device).launch(file, name, turns, (first, *rest, np.int64(numel)))


#: The devices by torch device. A test puts an emulated GPU under `torch.device("cpu")`.
DEVICES: dict[torch.device, Device] = {}

_opening = threading.Lock()


def device_for(torch_device: torch.device) -> Device:
    """The GPU that holds the tensors of `torch_device`.

    Raises:
        RuntimeError: it cannot be used; the text says what to install.
    """
    device = DEVICES.get(torch_device)
    if device is None:
        with _opening:
            device = DEVICES.get(torch_device) or _open(torch_device)
            DEVICES[torch_device] = device
    return device


@functools.lru_cache(maxsize=4096)
def full_waves(turns: int, wave: int, most: int) -> int:
    """Blocks, at most `most`, that share so many turns evenly, none of them in a last wave that is nearly empty."""
    blocks = -(-turns // -(-turns // most))
    while (waves := -(-blocks // wave)) > 1 and blocks < FULL * waves * wave:
        blocks = -(-turns // -(-turns // ((waves - 1) * wave)))
    return blocks


def grid_for(threads: int, device: Device) -> int:
    """Blocks for a launch in which so many threads have something to do, or fewer that stride."""
    return min(-(-threads // THREADS), SHARES * device.sm_count)


def _open(torch_device: torch.device) -> Device:
    if torch_device.type != "cuda":
        raise RuntimeError(f"the backend 'cuda' serves tensors on a GPU, not on {str(torch_device)!r}: move them there")
    if torch.version.hip is not None:
        raise RuntimeError("gradwire's CUDA kernels need an NVIDIA GPU, and this torch is built for ROCm")
    if torch.version.cuda is None:
        raise RuntimeError(
            f"torch {torch.__version__} is built without CUDA: install a build with it (https://pytorch.org)"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "torch finds no CUDA device: install NVIDIA's driver, or a newer one (nvidia-smi says which CUDA it is "
            f"for, and this torch wants {torch.version.cuda}), and see that CUDA_VISIBLE_DEVICES hides no GPU"
        )
    return Gpu(torch.cuda.current_device() if torch_device.index is None else torch_device.index)


class Gpu(Device):
    """A real one, by torch's index.

    Raises:
        RuntimeError: CuPy, cuda-bindings or NVRTC is missing, or the GPU is too old.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.sm_count = torch.cuda.get_device_properties(index).multi_processor_count
        self._cupy = _import_cupy()
        self._architecture = compiler.architecture_for(
            torch.cuda.get_device_capability(index), compiler.supported_architectures()
        )
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Function] = {}
        self._waves: dict[tuple[str, str, int], int] = {}
        self._streams: dict[int, Any] = {}
        self._loading = threading.Lock()

    def function(self, file: str, name: str) -> Function:
        found = self._functions.get((file, name))
        if found is None:
            with self._loading:
                found = self._functions[file, name] = self._launcher(self._load(file, name))
        return found

    def wave(self, file: str, name: str, threads: int = THREADS) -> int:
        found = self._waves.get((file, name, threads))
        if found is None:
            with self._loading, torch.cuda.device(self.index):
                driver, kernel = self._cupy.cuda.driver, self._load(file, name)
                each = driver.occupancyMaxActiveBlocksPerMultiprocessor(kernel.ptr, threads, 0)
            found = self._waves[file, name, threads] = max(1, each) * self.sm_count
        return found

    def _load(self, file: str, name: str) -> Any:
        """The kernel as CuPy's Function, for this device alone."""
        cuda = self._cupy.cuda
        try:
            with torch.cuda.device(self.index), cuda.Device(self.index):
                if file not in self._modules:
                    path = compiler.cached_cubin(file, self._architecture)
                    self._modules[file] = self._cupy.RawModule(path=str(path))
                return self._modules[file].get_function(name).kernel
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            raise RuntimeError(
                f"the driver cannot load {name} of {file}, compiled by NVRTC {compiler.version()} for "
                f"sm_{self._architecture} ({error}): update NVIDIA's driver, or {compiler.extra()}"
            ) from error

    def _launcher(self, kernel: Any) -> Function:
        index, stream_for = self.index, self._stream_for

        def launch(grid: int, block: int, args: Sequence[Argument]) -> None:
            if torch.cuda.current_device() != index:  # the driver launches on the current one
                with torch.cuda.device(index):
                    launch(grid, block, args)
                return
            stream = stream_for(torch.cuda.current_stream(index).cuda_stream)
            kernel((grid,), (block,), passed(args), 0, stream)

        return launch

    def _stream_for(self, pointer: int) -> Any:
        """torch's stream as CuPy's; torch has a few dozen at most."""
        stream = self._streams.get(pointer)
        if stream is None:
            stream = self._streams[pointer] = self._cupy.cuda.Stream.from_external(_ExternalStream(pointer))
        return stream


class _ExternalStream:
    """A stream by the protocol that CuPy takes one by: (version of the protocol, cudaStream_t)."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"gradwire's CUDA kernels are launched through CuPy: {compiler.extra()}") from error
    except Exception as error:  # one that is installed, and does not fit NumPy or the driver, raises anything
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RuntimeError(
            f"gradwire's CUDA kernels are launched through CuPy, which fails to import here ({cause}): "
            f"install it again, with {compiler.extra()}"
        ) from error
    if not hasattr(cupy.cuda.Stream, "from_external"):
        raise RuntimeError(f"gradwire needs CuPy 14 or newer, not {cupy.__version__}: {compiler.extra()}")
    return cupy
