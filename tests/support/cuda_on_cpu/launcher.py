"""Launches a compiled kernel with the calling form of CuPy's RawModule, and checks what it is given."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .arguments import Parameter, Span, array_span, private_copies, scalar_bytes
from .compiler import EmulationError, compile_module

ORDERS = ("forward", "reverse", "random")
RACES = ("off", "block", "all")
SHARED_LIMIT, SHARED_OPT_IN_LIMIT = 48 * 1024, 227 * 1024
MESSAGE_BYTES = 2048

#: The runtime keeps one grid in global variables.
_one_grid_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Options:
    """How a grid is run.

    Attributes:
        order: of the threads and blocks: "forward", "reverse" or "random".
        seed: for the random order.
        resident: how many blocks are in flight at once.
        preempt: a thread may be interrupted at one access in `preempt`; 0: only where it waits.
        races: what the checked build reports: conflicts among "all" threads, of the same "block" only, or none ("off").
            "block" is for kernels whose last block reads what the others left.
        ftz: flush subnormal floats to zero, as CuPy's compiler does unless told otherwise, and as gradwire does not.
        shared_optin: allow the shared memory that a kernel has to ask for.
    """

    order: str = "random"
    seed: int = 0
    resident: int = 1
    preempt: int = 0
    races: str = "all"
    ftz: bool = False
    shared_optin: bool = False


class _Range(ctypes.Structure):
    """`Range` of runtime/state.h."""

    _fields_ = (
        ("base", ctypes.c_size_t),
        ("size", ctypes.c_uint64),
        ("shift", ctypes.c_int32),
        ("read_only", ctypes.c_int32),
        ("cells", ctypes.c_void_p),
    )


class _Options(ctypes.Structure):
    """`Options` of runtime/state.h."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("order", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("preempt", ctypes.c_int32),
        ("races", ctypes.c_int32),
        ("flush_subnormals", ctypes.c_int32),
        ("range_count", ctypes.c_int32),
        ("ranges", ctypes.POINTER(_Range)),
        ("accesses", ctypes.c_uint64),
    )


class Module:
    """The kernels of one `.cu` file, or of its text, `code`.

    Args:
        check: build with every check; about ten times slower.
        include: folders whose headers (`.cuh`) the file includes.
        options: more options for g++.

    Attributes:
        kernels: the names of its kernels.
        static_shared: bytes of `__shared__` variables in the whole file.

    Raises:
        EmulationError: g++ is missing, or the file does not compile.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        code: str | None = None,
        check: bool = False,
        include: Sequence[str | Path] = (),
        options: Sequence[str] = (),
    ) -> None:
        self.name = str(path or "kernels.cu")
        self.check = check
        self.path, self.kernels = compile_module(path, code, check=check, include=include, options=options)
        self.library = ctypes.CDLL(str(self.path))
        self.library.emulator_static_shared.restype = ctypes.c_uint64
        self.static_shared = int(self.library.emulator_static_shared())

    def get_function(self, name: str, **options: Any) -> Kernel:
        """The kernel `name`; `options` are defaults for what `Kernel.__call__` takes by keyword."""
        return Kernel(self, name, options)


class Kernel:
    """One kernel of a module.

    Attributes:
        parameters: what it takes.
        accesses: how often its last launch touched memory (checked build).
    """

    def __init__(self, module: Module, name: str, options: Mapping[str, Any]) -> None:
        if name not in module.kernels:
            raise EmulationError(f"no kernel {name!r} in {module.name}; it has {module.kernels}")
        self.module, self.name = module, name
        self.options = replace(Options(), **options)
        self.accesses = 0
        self._run = getattr(module.library, f"emulator_run_{name}")
        signature = ctypes.create_string_buffer(4096)
        getattr(module.library, f"emulator_signature_{name}")(signature)
        self.parameters = [Parameter.parse(word) for word in signature.value.decode().split()]

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int = 0, **options: Any
    ) -> None:
        """Run the grid to its end. `options`, as in `Options`, go before those given to `get_function`.

        Raises:
            EmulationError: CUDA would refuse the launch, an argument is not what the kernel takes, or the kernel did
                something wrong.
        """
        chosen = replace(self.options, **options)
        grid, block = self._dimensions(grid, block)
        self._check_shared(shared_mem, chosen)
        if len(args) != len(self.parameters):
            expected = ", ".join(map(str, self.parameters))
            raise EmulationError(
                f"{self.name}: {len(args)} arguments given, kernel takes {len(self.parameters)}: {expected}"
            )
        spans: dict[tuple[int, int], Span] = {}
        values = [self._value(i, parameter, args[i], spans) for i, parameter in enumerate(self.parameters)]
        arrays = sorted(spans.values(), key=lambda span: span.read_only)  # where views overlap, the writable one counts
        copies = private_copies(arrays) if self.module.check else []
        slots = [np.array([spans[value].address], np.uint64) if isinstance(value, tuple) else value for value in values]
        self._launch(grid, block, shared_mem, chosen, slots, arrays)
        del copies  # alive until here

    def _launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_mem: int,
        chosen: Options,
        slots: Sequence[np.ndarray[Any, Any]],
        arrays: Sequence[Span],
    ) -> None:
        # Two more ranges for the runtime: static and dynamic shared memory.
        ranges = (_Range * (len(arrays) + 2))(
            *(_Range(span.address, span.size, span.shift, span.read_only, None) for span in arrays)
        )
        native = _Options(
            chosen.seed,
            ORDERS.index(chosen.order),
            chosen.resident,
            chosen.preempt,
            RACES.index(chosen.races),
            chosen.ftz,
            len(arrays),
            ranges,
        )
        addresses = (ctypes.c_void_p * (len(slots) + 1))(*(slot.ctypes.data for slot in slots))
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        three = ctypes.c_uint * 3
        with _one_grid_at_a_time:
            failed = self.module.library.emulator_launch(
                self._run,
                addresses,
                three(*grid),
                three(*block),
                ctypes.c_uint(shared_mem),
                ctypes.byref(native),
                message,
                MESSAGE_BYTES,
            )
        self.accesses = native.accesses
        for span in arrays:
            if not span.read_only and span.address != span.base:
                ctypes.memmove(span.base, span.address, span.size)
        if failed:
            raise EmulationError(f"{self.name}: {self._with_line(message.value.decode(errors='replace'))}")

    def _dimensions(self, grid: Sequence[int], block: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        sound = math.prod(block) <= 1024 and block[2] <= 64 and min(*grid, *block) >= 1
        if not sound or grid[0] >= 2**31 or max(grid[1:]) > 65535:
            raise EmulationError(f"{self.name}: invalid launch configuration grid={grid} block={block}")
        return grid, block

    def _check_shared(self, dynamic: int, chosen: Options) -> None:
        limit = SHARED_OPT_IN_LIMIT if chosen.shared_optin else SHARED_LIMIT
        if dynamic + self.module.static_shared > limit:
            raise EmulationError(
                f"{self.name}: {dynamic} dynamic + {self.module.static_shared} static bytes of shared memory "
                f"(of the whole module) are more than {limit}"
            )

    def _value(
        self, i: int, parameter: Parameter, given: Any, spans: dict[tuple[int, int], Span]
    ) -> np.ndarray[Any, Any] | tuple[int, int]:
        """The bytes of argument `i`, or for an array the key of its span, which is added to `spans`."""
        where = f"{self.name} argument {i}"
        if not parameter.pointer:
            return scalar_bytes(where, parameter, given)
        if given is None:
            return np.array([0], np.uint64)
        span = array_span(where, parameter, given)
        # The same array given twice is one span, and writable if either use is.
        known = spans.setdefault((span.base, span.size), span)
        known.read_only &= span.read_only
        known.shift = min(known.shift, span.shift)
        return span.base, span.size

    def _with_line(self, message: str) -> str:
        """Replace the program counter in a message by the line of the `.cu` file."""
        found = re.search(r" @pc=(0x[0-9a-f]+)", message)
        if not found:
            return message
        place = ""
        if shutil.which("addr2line"):
            command = ["addr2line", "-e", str(self.module.path), hex(int(found[1], 16) - 1)]
            place = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            file, _, line = place.split(" (")[0].rpartition(":")
            header = Path(file).suffix in (".cuh", ".h")  # otherwise the unit that was made from the file
            place = f" at {Path(file if header else self.module.name).name}:{line}"
        return message.replace(found[0], place)
