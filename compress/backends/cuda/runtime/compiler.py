"""NVRTC turns the kernels of csrc/ into machine code for one GPU, once; the result stays in a cache.

Our own call, not CuPy's: CuPy appends `-ftz=true`, the last word counts, and a wire is the same bytes everywhere only
if subnormal numbers stay what they are. The sources include nothing but each other, so no CUDA headers are needed.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import kernel_cache

CSRC = Path(__file__).resolve().parents[4] / "csrc"
#: Canonical bytes: no multiply-add in one rounding, subnormals kept, division and square root rounded as IEEE says.
OPTIONS = (
    "--std=c++17",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    f"--include-path={CSRC / 'include'}",
)


@dataclass(frozen=True)
class Compiled:
    """NVRTC's output for one file: machine code, the PTX before it, and the log."""

    cubin: bytes
    ptx: str
    log: str


def extra() -> str:
    """The extra to install, for the CUDA version that torch was built with."""
    major = (torch.version.cuda or "").partition(".")[0]
    names = [f"cuda{major}"] if major in ("12", "13") else ["cuda12", "cuda13"]
    return " or ".join(f"pip install 'gradwire[{name}]'" for name in names)


@functools.cache
def nvrtc() -> Any:
    """The bindings of NVRTC, once they can be called.

    Raises:
        RuntimeError: cuda-bindings or NVRTC itself is missing; the text says what to install.
    """
    try:
        from cuda.bindings import nvrtc as bindings
    except ImportError as error:
        raise RuntimeError(f"gradwire's CUDA kernels are compiled through cuda-bindings: {extra()}") from error
    try:
        _checked(bindings, bindings.nvrtcVersion())
    except Exception as error:  # what is raised for a missing library differs from release to release
        raise RuntimeError(f"gradwire's CUDA kernels are compiled by NVRTC, which is missing: {extra()}") from error
    return bindings


def _checked(bindings: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values that an NVRTC function returned besides its status."""
    status, *values = answer
    if status != bindings.nvrtcResult.NVRTC_SUCCESS:
        _, text = bindings.nvrtcGetErrorString(status)
        raise RuntimeError(f"NVRTC failed: {text.decode()}")
    return tuple(values)


def version() -> str:
    """NVRTC's, for example "13.0"."""
    return ".".join(map(str, _checked(nvrtc(), nvrtc().nvrtcVersion())))


def architecture_for(capability: tuple[int, int], supported: Sequence[int]) -> int:
    """The architecture to compile for, for example 86: machine code runs on later GPUs of the same major version.

    Args:
        capability: the GPU's compute capability.
        supported: what NVRTC can compile for.

    Raises:
        RuntimeError: the GPU is too old for gradwire, or too new for NVRTC.
    """
    major, minor = capability
    if capability < (7, 5):
        raise RuntimeError(
            f"gradwire's CUDA kernels need a GPU of compute capability 7.5 or more, and this one has {major}.{minor}: "
            "use a Turing GPU or a newer one, or move the tensors to the CPU"
        )
    sound = [number for number in supported if number // 10 == major and number % 10 <= minor]
    if not sound:
        raise RuntimeError(
            f"NVRTC {version()} cannot compile for a GPU of compute capability {major}.{minor}, only up to "
            f"{max(supported) / 10}: install a newer one (pip install -U nvidia-cuda-nvrtc for CUDA 13)"
        )
    return max(sound)


def supported_architectures() -> list[int]:
    (numbers,) = _checked(nvrtc(), nvrtc().nvrtcGetSupportedArchs())
    return list(numbers)


def compile_file(file: str, architecture: int, options: Sequence[str] = ()) -> Compiled:
    """Compile csrc/`file` for sm_`architecture`.

    Raises:
        RuntimeError: it does not compile; the text has NVRTC's log.
    """
    bindings = nvrtc()
    source = (CSRC / file).read_bytes()
    (program,) = _checked(bindings, bindings.nvrtcCreateProgram(source, file.encode(), 0, [], []))
    try:
        every = [option.encode() for option in (*OPTIONS, *options, f"--gpu-architecture=sm_{architecture}")]
        (status,) = bindings.nvrtcCompileProgram(program, len(every), every)
        log = _text(bindings, program, "ProgramLog").decode(errors="replace").strip("\0\n")
        if status == bindings.nvrtcResult.NVRTC_ERROR_BUILTIN_OPERATION_FAILURE:
            raise RuntimeError(
                f"NVRTC {version()} finds no libnvrtc-builtins of its version beside it: "
                f"install it again, with {extra()}"
            )
        if status != bindings.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC {version()} cannot compile {file} for sm_{architecture}:\n{log}")
        cubin, ptx = _text(bindings, program, "CUBIN"), _text(bindings, program, "PTX")
        return Compiled(cubin, ptx.decode().strip("\0"), log)
    finally:
        bindings.nvrtcDestroyProgram(program)


def _text(bindings: Any, program: Any, what: str) -> bytes:
    """The program's "CUBIN", "PTX" or "ProgramLog"."""
    (size,) = _checked(bindings, getattr(bindings, f"nvrtcGet{what}Size")(program))
    buffer = bytes(size)  # which the bindings fill in place
    _checked(bindings, getattr(bindings, f"nvrtcGet{what}")(program, buffer))
    return buffer


# ---- the cache


def cached_cubin(file: str, architecture: int) -> Path:
    """A file that holds the machine code of csrc/`file` for sm_`architecture`; compiled when it is not there yet.

    Processes may ask at the same time: one compiles a file, and those that need that one wait for it.
    """
    parts = [f"NVRTC {version()} sm_{architecture}", *OPTIONS[:-1], (CSRC / file).read_text("utf-8")]
    parts += [header.read_text("utf-8") for header in sorted((CSRC / "include").glob("*.cuh"))]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    name = f"{Path(file).stem}-sm_{architecture}-{digest}.cubin"
    places = [folder / name for folder in kernel_cache.folders()]
    for path in (*places, _elsewhere.get(name)):
        if path is not None and os.path.exists(path):
            return path
    target = places[-1] if places else None
    lock = f"{Path(file).stem}-sm_{architecture}.lock"
    with kernel_cache.compile_lock(
        target and target.parent, lambda: target is not None and os.path.exists(target), lock
    ):
        if target is not None and os.path.exists(target):
            return target
        cubin = compile_file(file, architecture).cubin
        if target is not None:
            try:
                kernel_cache.write(target, cubin)
                return target
            except OSError:  # a full disk
                kernel_cache.nothing_kept()
        path = _elsewhere[name] = _own_folder() / name
        kernel_cache.write(path, cubin)
        return path


#: Files that this process could not write to the cache, by name.
_elsewhere: dict[str, Path] = {}


@functools.cache
def _own_folder() -> Path:
    """For this process alone."""
    folder = tempfile.mkdtemp(prefix="gradwire-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
