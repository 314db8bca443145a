"""Launches a compiled kernel with the calling form of CuPy's RawModule, and checks what it is given."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .compiler import EmulationError, Module

ORDERS = ("forward", "reverse", "random")
RACES = ("off", "block", "all")
SHARED_LIMIT, SHARED_OPT_IN_LIMIT = 48 * 1024, 227 * 1024
#: Bytes around each private copy of an array that belong to nobody.
GAP = 1 << 16
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


class Parameter(NamedTuple):
    """A kernel's parameter, from its C++ type.

    Attributes:
        kind: f(loat), i(nteger), u(nsigned), b(ool), v(oid) or s(truct): the parameter's, or what it points to.
        size: bytes, likewise.
    """

    pointer: bool
    read_only: bool
    kind: str
    size: int

    @staticmethod
    def parse(text: str) -> Parameter:
        """From "f4" (a float) or "Pcf4" (a pointer to const floats; "m": to ones that may be written)."""
        pointer = text.startswith("P")
        kind = text[2:] if pointer else text
        return Parameter(pointer, text.startswith("Pc"), kind[0], int(kind[1:]))

    def __str__(self) -> str:
        value = f"{self.kind}{self.size}"
        return f"{'const ' * self.read_only}{value}*" if self.pointer else value


@dataclass
class Span:
    """The bytes that an array argument gives a kernel.

    Attributes:
        shift: races are found in cells of 2^shift bytes, the size of an element or 4 bytes.
        address: where the kernel finds them: at `base`, or in a private copy.
    """

    base: int
    size: int
    shift: int
    read_only: bool
    address: int

    @property
    def end(self) -> int:
        return self.base + self.size


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
        copies = _private_copies(arrays) if self.module.check else []
        slots = [np.array([spans[value].address], np.uint64) if isinstance(value, tuple) else value for value in values]
        self._launch(grid, block, shared_mem, chosen, slots, arrays)
        del copies

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
            return _scalar(where, parameter, given)
        if given is None:
            return np.array([0], np.uint64)
        span = _span(where, parameter, given)
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


def _scalar(where: str, parameter: Parameter, given: Any) -> np.ndarray[Any, Any]:
    kind, size = parameter.kind, parameter.size
    if isinstance(given, bool):
        return np.array([given], np.bool_)
    if isinstance(given, float) and not isinstance(given, np.generic):
        # CuPy passes it as a double, of which a float parameter would read the lower half.
        if str(parameter) != "f8":
            raise EmulationError(f"{where}: pass np.float32(...), not a Python float, for {parameter}")
        return np.array([given], np.float64)
    if isinstance(given, int):
        if kind not in "iub":
            raise EmulationError(f"{where}: int given for {parameter}")
        bits = 8 * size
        lowest, highest = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind == "i" else (0, (1 << bits) - 1)
        if not lowest <= given <= highest:
            raise EmulationError(f"{where}: {given} does not fit {parameter}")
        return np.array([given], np.dtype(f"{kind}{size}"))
    if isinstance(given, np.generic | np.ndarray):
        value = np.array(given).reshape(1)
        if value.itemsize != size or (kind in "fiub" and value.dtype.kind != kind):
            raise EmulationError(f"{where}: {value.dtype} given for {parameter}")
        return value
    raise EmulationError(f"{where}: cannot pass {type(given).__name__}")


def _span(where: str, parameter: Parameter, given: Any) -> Span:
    """The memory of a NumPy array or a torch tensor on the CPU, from its first element to its last."""
    if isinstance(given, np.ndarray):
        if not given.flags.c_contiguous:
            raise EmulationError(f"{where}: array is not contiguous")
        address, size, item = given.ctypes.data, given.nbytes, given.itemsize
        kinds, writable = given.dtype.kind, given.flags.writeable
    elif hasattr(given, "data_ptr"):
        if given.device.type != "cpu":
            raise EmulationError(f"{where}: tensor is on {given.device}")
        address, item, writable = given.data_ptr(), given.element_size(), True
        last = sum((n - 1) * stride for n, stride in zip(given.shape, given.stride(), strict=True))
        size = (last + 1) * item if given.numel() else 0
        # torch has no arithmetic for most unsigned types, so its int32 stands for both.
        kinds = "fs" if given.is_floating_point() else "iub"
    else:
        raise EmulationError(f"{where}: pointer expected, got {type(given).__name__}")
    _check_elements(where, parameter, item, kinds, size)
    return Span(address, size, {1: 0, 2: 1}.get(item, 2), parameter.read_only or not writable, address)


def _check_elements(where: str, parameter: Parameter, item: int, kinds: str, size: int) -> None:
    kind, wanted = parameter.kind, parameter.size
    bytes_of_anything = kind == "v" or (kind == "u" and wanted == 1)
    vectors = kind == "s" and wanted % item == 0 and size % wanted == 0  # float4 over floats
    if item != wanted and not bytes_of_anything and not vectors:
        raise EmulationError(f"{where}: kernel wants {parameter}, array has {item}-byte items")
    if item == wanted and wanted > 1 and kind in "fiu" and set(kinds) <= set("fsiub") and kind not in kinds:
        raise EmulationError(f"{where}: kernel wants {parameter}, array has elements of kind {kinds[0]!r}")


def _private_copies(spans: Sequence[Span]) -> list[np.ndarray[Any, Any]]:
    """Give each array a copy with wide gaps around it, so that no overrun can land in another one.

    Views that overlap have to stay where they are.
    """
    ordered = sorted(spans, key=lambda span: span.base)
    if any(first.end > second.base for first, second in itertools.pairwise(ordered)):
        return []
    copies = []
    for span in spans:
        memory = np.empty(span.size + 2 * GAP, np.uint8)
        start = memory.ctypes.data + GAP
        span.address = start + (span.base - start) % 256  # aligned as the original is
        ctypes.memmove(span.address, span.base, span.size)
        copies.append(memory)
    return copies
