"""From a `.cu` file to a shared object: g++ compiles the kernels as they are, behind `include/cuda_on_cpu.h`."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INCLUDE, RUNTIME = HERE / "include", HERE / "runtime"

COMMON = (
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",  # as NVRTC's -fmad=false
    "-fno-strict-aliasing",
    "-g1",  # line tables, to say where a kernel went wrong
)
WARNINGS = (
    "-Wall",
    "-Wno-unknown-pragmas",  # #pragma unroll
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-attributes",
    "-Wno-maybe-uninitialized",
)
#: `-fdata-sections` gives every `__shared__` variable a section, which shared.ld collects; hidden symbols keep the
#: modules of one process apart.
KERNELS = ("-fdata-sections", "-fvisibility=hidden")
FAST = ("-O2",)
#: g++ calls `__tsan_*` before every access to memory and `__ubsan_*` where behaviour is undefined. The runtime has its
#: own functions of these names, so neither sanitizer's library is linked.
CHECKED = (
    "-O1",
    "-DEMULATOR_CHECKS",
    "-fsanitize=thread,bounds,alignment,shift,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow,bool",
    "-fsanitize=unreachable",
    "-fno-sanitize-recover=all",
    "--param=tsan-distinguish-volatile=1",
    "--param=tsan-instrument-func-entry-exit=0",
)


class EmulationError(RuntimeError):
    """A kernel that does not compile, a launch that CUDA would refuse, or a mistake that the checked build found."""


_BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
#: Where a kernel begins in its source; its name.
KERNEL = rf"__global__\s+(?:void\s+)?{_BOUNDS}(?:void\s+)?(\w+)\s*\("


def compile_module(
    path: str | Path | None, code: str | None, *, check: bool, include: Sequence[str | Path], options: Sequence[str]
) -> tuple[Path, list[str]]:
    """The shared object of a `.cu` file, or of its text, `code`, and the names of its kernels."""
    name = str(path or "kernels.cu")
    if code is None:
        code = Path(name).read_text("utf-8")
    source, kernels = translate(code, Path(name).name)
    flags = (*COMMON, *WARNINGS, *KERNELS, *(CHECKED if check else FAST), *options)
    places = (f"-I{INCLUDE}", *(f"-I{folder}" for folder in include))  # any clone's will do: texts are what counts
    headers = _texts(*(Path(folder).glob("*.cuh") for folder in include))
    shared_object = cached(
        ("kernels", source, *flags, headers, _own_texts()),
        ".so",
        lambda target: _build(source, (*flags, *places), _runtime(check, options), target),
    )
    return shared_object, kernels


def translate(text: str, name: str) -> tuple[str, list[str]]:
    """The C++ that stands for a `.cu` file, and the names of its kernels.

    The text itself changes in one way, and keeps its lines: `extern __shared__ T x[];`, for which C++ has no word,
    becomes a pointer. A macro after the text exports each kernel.
    """
    text = re.sub(
        r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w:<> ]+?)\s+(\w+)\s*\[\s*\]\s*;",
        r"\1* \2 = (\1*)emulator_dynamic_shared();",
        text,
    )
    without_comments = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    kernels = re.findall(KERNEL, without_comments)
    exports = "".join(f"EMULATOR_KERNEL({kernel})\n" for kernel in kernels)
    # An unnamed namespace keeps g++'s warnings about what nobody outside could call.
    source = f'#include "cuda_on_cpu.h"\nnamespace {{\n#line 1 "{name}"\n{text}\n}}\n#line 1 "exports"\n{exports}'
    return source, kernels


def _build(source: str, flags: Sequence[str], runtime: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        unit, kernels = Path(folder) / "kernels.cpp", Path(folder) / "kernels.o"
        unit.write_text(source, "utf-8")
        _compile(*flags, "-c", unit, "-o", kernels)
        script = f"-Wl,-T,{HERE / 'shared.ld'}"
        _compile("-shared", "-Wl,-z,noexecstack", script, kernels, runtime, "-o", target)


def _runtime(check: bool, options: Sequence[str]) -> Path:
    """The scheduler, compiled: never instrumented, and the same for every module."""
    own = [option for option in options if option.startswith("-DEMULATOR_")]
    flags = (*COMMON, "-Wall", "-O2", *(["-DEMULATOR_CHECKS"] if check else []), *own)
    main = RUNTIME / "launch.cpp"
    command = (*flags, f"-I{INCLUDE}", "-c", main, "-o")
    return cached(("runtime", *flags, _own_texts()), ".o", lambda target: _compile(*command, target))


def _compile(*arguments: object) -> None:
    command = ["g++", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    except FileNotFoundError:
        raise EmulationError(
            "the CUDA kernels run on the CPU once g++ is installed (Debian: apt install g++)"
        ) from None
    if done.returncode:
        raise EmulationError(f"compile failed: {' '.join(command)}\n{done.stderr}")


def _texts(*files: Any) -> str:
    return "".join(path.read_text("utf-8") for group in files for path in sorted(group))


@functools.cache
def _own_texts() -> str:
    return _texts(INCLUDE.glob("*.h"), RUNTIME.iterdir(), [HERE / "shared.ld"])


def cached(key: tuple[str, ...], suffix: str, make: Callable[[Path], None]) -> Path:
    """What `make` writes, kept from one run of the tests to the next."""
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"cuda-on-cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EmulationError(f"{folder} belongs to another user: what lies there will not be loaded")
    target = folder / f"{digest}{suffix}"
    if not target.exists():
        with (folder / f"{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # xdist's workers want the same kernels at once
            if not target.exists():
                draft = folder / f"{digest}.{os.getpid()}{suffix}"
                make(draft)
                draft.replace(target)
    return target
