"""The way onto a GPU: compiled once, kept in a cache, launched by CuPy on the right stream and device.

CuPy and torch.cuda are stand-ins here, and so is NVRTC where kernels are only launched.
"""

from __future__ import annotations

import builtins
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import CPU
from gradwire.compress.backends.cuda.runtime import compiler
from gradwire.compress.backends.cuda.runtime.device import DEVICES, Gpu, device_for

GPU = torch.device("cuda", 1)
KERNEL = "onebit_encode_f32"
COMPILE_FILE = compiler.compile_file


class FakeDriverError(Exception):
    pass


class FakeRuntimeError(Exception):
    pass


class FakeMachine:
    """Two GPUs, and a record of what was asked of them."""

    def __init__(self) -> None:
        self.capability = (9, 0)
        self.current = 0
        self.stream = 1000
        self.loaded: list[tuple[int, Path]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.streams_made = 0
        self.refusal: Exception | None = None
        self.asked: list[tuple[int, int, int, int]] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: self.current)
        patch.setattr(torch.cuda, "device", self.on)
        patch.setattr(torch.cuda, "get_device_capability", lambda index: self.capability)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(multi_processor_count=132)
        )
        patch.setattr(
            torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=self.stream + index)
        )
        patch.setitem(sys.modules, "cupy", self.cupy())

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def occupancy(self, function: int, threads: int, shared: int) -> int:
        self.asked.append((function, threads, shared, self.current))
        return 6

    def cupy(self) -> Any:
        machine = self

        class RawModule:
            def __init__(self, path: str) -> None:
                if machine.refusal is not None:
                    raise machine.refusal
                machine.loaded.append((machine.current, Path(path)))

            def get_function(self, name: str) -> Any:
                def kernel(grid: Any, block: Any, values: Any, shared_mem: int, stream: Any) -> None:
                    assert isinstance(grid, tuple)
                    assert isinstance(block, tuple)
                    machine.launched.append((name, machine.current, grid, block, values, shared_mem, stream.ptr))

                kernel.ptr = len(name)  # type: ignore[attr-defined]
                return types.SimpleNamespace(kernel=kernel)

        class Stream:
            @staticmethod
            def from_external(stream: Any) -> Any:
                machine.streams_made += 1
                version, pointer = stream.__cuda_stream__()
                assert version == 0
                return types.SimpleNamespace(ptr=pointer)

        cupy: Any = types.ModuleType("cupy")
        cupy.__version__ = "14.0.0"
        cupy.RawModule = RawModule
        cupy.cuda = types.SimpleNamespace(Device=self.on, Stream=Stream)
        cupy.cuda.driver = types.SimpleNamespace(
            CUDADriverError=FakeDriverError, occupancyMaxActiveBlocksPerMultiprocessor=self.occupancy
        )
        cupy.cuda.runtime = types.SimpleNamespace(CUDARuntimeError=FakeRuntimeError)
        return cupy


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[FakeMachine]:
    machine = FakeMachine()
    machine.install(monkeypatch)
    monkeypatch.setattr(compiler, "compile_file", lambda *_: compiler.Compiled(b"code", "", ""))
    monkeypatch.delitem(DEVICES, GPU, raising=False)
    yield machine
    DEVICES.pop(GPU, None)
    DEVICES.pop(torch.device("cuda"), None)


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """As if `module` had never been installed."""
    real = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == module or name.startswith(f"{module}."):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", fake)
    compiler.nvrtc.cache_clear()


@pytest.fixture(autouse=True)
def forget_nvrtc() -> Iterator[None]:
    yield
    compiler.nvrtc.cache_clear()


# ---- the compiler and its cache


def test_what_is_compiled_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.cached_cubin("cast.cu", 90)
    assert first.read_bytes().startswith(b"\x7fELF")
    assert list(cache.glob("*.cubin")) == [first]
    monkeypatch.setattr(compiler, "compile_file", None)  # not needed again
    assert compiler.cached_cubin("cast.cu", 90) == first


def fake_sources(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[str, int]]:
    """A file "a.cu" and its header in `folder`; the compilations are recorded, and instant."""
    (folder / "include").mkdir(parents=True)
    (folder / "a.cu").write_text("// a kernel\n")
    (folder / "include" / "a.cuh").write_text("// its header\n")
    compiled: list[tuple[str, int]] = []

    def compile_file(file: str, architecture: int, options: Sequence[str] = ()) -> compiler.Compiled:
        compiled.append((file, architecture))
        return compiler.Compiled(b"code", "", "")

    monkeypatch.setattr(compiler, "CSRC", folder)
    monkeypatch.setattr(compiler, "compile_file", compile_file)
    return compiled


def test_whatever_changes_the_code_changes_the_key(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_sources(monkeypatch, tmp_path / "csrc")
    paths = [compiler.cached_cubin("a.cu", 90), compiler.cached_cubin("a.cu", 80)]
    (tmp_path / "csrc" / "include" / "a.cuh").write_text("// another header\n")
    paths.append(compiler.cached_cubin("a.cu", 90))
    (tmp_path / "csrc" / "a.cu").write_text("// another kernel\n")
    paths.append(compiler.cached_cubin("a.cu", 90))
    monkeypatch.setattr(compiler, "version", lambda: "99.0")
    paths.append(compiler.cached_cubin("a.cu", 90))
    monkeypatch.setattr(compiler, "OPTIONS", ("-ftz=true", *compiler.OPTIONS))
    paths.append(compiler.cached_cubin("a.cu", 90))
    assert len(set(paths)) == 6


def test_cache_that_cannot_be_written_does_no_harm(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = fake_sources(monkeypatch, tmp_path / "csrc")
    cache.write_text("a file where the folder should be")
    path = compiler.cached_cubin("a.cu", 90)
    assert path.read_bytes() == b"code"
    assert cache not in path.parents
    assert compiler.cached_cubin("a.cu", 90) == path
    assert compiled == [("a.cu", 90)]


def test_source_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken(int* p) { p = 1.0; }\n')
    monkeypatch.setattr(compiler, "CSRC", tmp_path)
    with pytest.raises(RuntimeError, match=r"cannot compile broken.cu for sm_90:\n(.|\n)*broken.cu\(1\)"):
        compiler.compile_file("broken.cu", 90)


@pytest.mark.parametrize(
    ("capability", "architecture"), [((7, 5), 75), ((8, 6), 86), ((9, 0), 90), ((10, 3), 100), ((12, 1), 120)]
)
def test_code_for_the_newest_architecture_that_runs(capability: tuple[int, int], architecture: int) -> None:
    assert compiler.architecture_for(capability, [75, 80, 86, 90, 100, 120]) == architecture


# ---- launching


def test_launches_on_the_current_stream_of_the_right_device(machine: FakeMachine, cache: Path) -> None:
    x, scale = torch.zeros(8), np.float32(2)
    launch = device_for(GPU).function("onebit.cu", KERNEL)
    launch(3, 256, (x[1:], None, 7, scale))
    expected = (KERNEL, 1, (3,), (256,), (x.data_ptr() + 4, 0, 7, scale), 0, 1001)
    assert machine.launched == [expected]
    assert machine.current == 0
    assert machine.loaded == [(1, compiler.cached_cubin("onebit.cu", 90))]

    machine.current, machine.stream = 1, 2000
    launch(3, 256, (x[1:], None, 7, scale))
    assert machine.launched[1] == (*expected[:-1], 2001)


def test_compiles_loads_and_wraps_once(machine: FakeMachine) -> None:
    device = device_for(GPU)
    assert device_for(GPU) is device
    assert device.sm_count == 132
    launch = device.function("onebit.cu", KERNEL)
    assert device.function("onebit.cu", KERNEL) is launch
    device.function("onebit.cu", "onebit_encode_f16")
    for _ in range(3):
        launch(1, 32, ())
    assert len(machine.loaded) == 1
    assert machine.streams_made == 1


def test_asks_once_how_many_blocks_the_gpu_holds(machine: FakeMachine) -> None:
    device = device_for(GPU)
    for _ in range(2):
        assert device.wave("onebit.cu", KERNEL) == 6 * 132
        assert device.wave("onebit.cu", KERNEL, 512) == 6 * 132
    assert machine.asked == [(len(KERNEL), 256, 0, 1), (len(KERNEL), 512, 0, 1)]
    assert machine.current == 0
    device.launch("onebit.cu", KERNEL, 800, ())
    assert machine.launched == [(KERNEL, 1, (400,), (256,), (), 0, 1001)]


def test_device_without_an_index_is_the_current_one(machine: FakeMachine) -> None:
    machine.current = 1
    device = device_for(torch.device("cuda"))
    assert isinstance(device, Gpu)
    assert device.index == 1


# ---- what is missing, in one sentence


def complaint(expected: str) -> Any:
    """One sentence that contains `expected`."""
    return pytest.raises(RuntimeError, match=rf"\A[^\n]*{expected}[^\n]*\Z")


def no_cupy(machine: FakeMachine, patch: pytest.MonkeyPatch) -> None:
    without(patch, "cupy")


def old_cupy(machine: FakeMachine, patch: pytest.MonkeyPatch) -> None:
    cupy: Any = sys.modules["cupy"]
    cupy.__version__ = "12.0.0"
    del cupy.cuda.Stream.from_external


def no_bindings(machine: FakeMachine, patch: pytest.MonkeyPatch) -> None:
    without(patch, "cuda")
    patch.setattr(torch.version, "cuda", "12.8")


def no_nvrtc(machine: FakeMachine, patch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing() -> Any:
        raise RuntimeError("Failure finding libnvrtc.so")

    patch.setattr(nvrtc, "nvrtcVersion", missing)
    compiler.nvrtc.cache_clear()


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [
        (no_cupy, r"launched through CuPy: pip install 'gradwire\[cuda13\]'"),
        (old_cupy, r"CuPy 14 or newer, not 12.0.0"),
        (no_bindings, r"compiled through cuda-bindings: pip install 'gradwire\[cuda12\]'"),
        (no_nvrtc, r"compiled by NVRTC, which is missing: pip install 'gradwire\[cuda13\]'"),
        (lambda machine, _: setattr(machine, "capability", (7, 0)), "capability 7.5 or more, and this one has 7.0"),
        (lambda machine, _: setattr(machine, "capability", (99, 0)), "install a newer one"),
        (lambda _, patch: patch.setattr(torch.version, "hip", "6.0"), "NVIDIA GPU, and this torch is built for ROCm"),
        (lambda _, patch: patch.setattr(torch.version, "cuda", None), "is built without CUDA: install a build with it"),
        (
            lambda _, patch: patch.setattr(torch.cuda, "is_available", lambda: False),
            "install NVIDIA's driver, .*this torch wants 13.0.*CUDA_VISIBLE_DEVICES",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_a_machine_lacks(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, lacking: Any, expected: str
) -> None:
    lacking(machine, monkeypatch)
    with complaint(expected):
        device_for(GPU)


def test_torch_without_cuda_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert compiler.extra() == "pip install 'gradwire[cuda12]' or pip install 'gradwire[cuda13]'"


@pytest.mark.parametrize("error", [FakeDriverError, FakeRuntimeError])
def test_driver_too_old(machine: FakeMachine, error: type[Exception]) -> None:
    device = device_for(GPU)
    machine.refusal = error("NO_BINARY_FOR_GPU")
    with complaint(
        "the driver cannot load onebit_encode_f32 of onebit.cu, .*NO_BINARY_FOR_GPU.*update NVIDIA's driver"
    ):
        device.function("onebit.cu", KERNEL)


def test_cupy_that_does_not_fit(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise AttributeError('numpy has no attribute: bool\\nand more')\n")
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.syspath_prepend(tmp_path)
    with complaint(r"fails to import here \(AttributeError: numpy has no attribute: bool\): .*'gradwire\[cuda13\]'"):
        device_for(GPU)


def test_nvrtc_without_its_builtins(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    monkeypatch.setattr(compiler, "compile_file", COMPILE_FILE)
    failure = nvrtc.nvrtcResult.NVRTC_ERROR_BUILTIN_OPERATION_FAILURE
    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", lambda *_: (failure,))
    with complaint(r"finds no libnvrtc-builtins .*install it again, with pip install 'gradwire\[cuda13\]'"):
        compiler.compile_file("onebit.cu", 90)


def test_tensors_that_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DEVICES, CPU, raising=False)
    with complaint("not on 'cpu'"):
        device_for(CPU)


def test_nothing_is_kept_of_a_device_that_failed(machine: FakeMachine) -> None:
    machine.capability = (7, 0)
    with complaint("capability"):
        device_for(GPU)
    machine.capability = (9, 0)
    assert device_for(GPU).sm_count == 132
