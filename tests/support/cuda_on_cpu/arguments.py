"""What a kernel takes, what it is given, and the memory that it may touch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .compiler import EmulationError

#: Bytes around each private copy of an array that belong to nobody.
GAP = 1 << 16


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


def scalar_bytes(where: str, parameter: Parameter, given: Any) -> np.ndarray[Any, Any]:
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


def array_span(where: str, parameter: Parameter, given: Any) -> Span:
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


def private_copies(spans: Sequence[Span]) -> list[np.ndarray[Any, Any]]:
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
