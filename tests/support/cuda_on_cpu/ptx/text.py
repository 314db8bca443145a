"""PTX as NVRTC writes it: kernels, what they declare, and their instructions."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

#: Bits and C++ types of what PTX declares.
CTYPES = {
    "pred": "bool",
    "f32": "float",
    "f64": "double",
    **{f"{kind}{bits}": f"{'' if kind == 's' else 'u'}int{bits}_t" for kind in "usb" for bits in (8, 16, 32, 64)},
}


class PtxError(ValueError):
    """PTX that is not understood, and so not run."""


class Array(NamedTuple):
    """A `.shared` or `.local` variable."""

    name: str
    align: int
    type: str
    length: int


class Instruction(NamedTuple):
    """`guard` is "%p1", "!%p1" or empty; `operands` are as written."""

    line: int
    guard: str
    opcode: str
    operands: tuple[str, ...]


class Mark(NamedTuple):
    """A label, or one of the braces around a scope with registers of its own."""

    line: int
    text: str


@dataclass
class Kernel:
    """One entry.

    Attributes:
        parameters: their types, "u64" for a pointer too.
        registers: types by name; "%r7" has that of "%r" unless it is there itself.
    """

    name: str
    line: int
    parameters: list[str]
    registers: dict[str, str] = field(default_factory=dict)
    local: list[Array] = field(default_factory=list)
    shared: list[Array] = field(default_factory=list)
    body: list[Instruction | Mark] = field(default_factory=list)

    def words(self) -> Counter[str]:
        """How often each register, variable or label is named."""
        found: Counter[str] = Counter()
        for one in self.body:
            if isinstance(one, Instruction):
                found.update(re.findall(r"[%\w$]+", " ".join((one.guard, *one.operands))))
        return found

    def type_of(self, register: str) -> str:
        """Of a register, "b32" for example.

        Raises:
            PtxError: nobody has declared it.
        """
        found = self.registers.get(register) or self.registers.get(register.rstrip("0123456789"))
        if found is None:
            raise PtxError(f"{self.name}: register {register} is not declared")
        return found


ENTRY = re.compile(r"\.visible \.entry (\w+)\(([^)]*)\)\s*((?:\.\w+ [\d, ]+\s*)*)\{")
ARRAY = re.compile(r"\.(shared|local) \.align (\d+) \.(\w+)\s+([\w$]+)(?:\[(\d+)\])?")
STATEMENT = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[$\w]+):|(?P<text>[^;]*);)")


def parse(ptx: str, only: str | None = None) -> list[Kernel]:
    """The kernels of a module, in order, or one of them.

    Raises:
        PtxError: something at the top of the module, or in a kernel, is unknown.
    """
    ptx = re.sub(r"//[^\n]*", "", ptx)
    kernels, outside, end = [], [], 0
    for entry in ENTRY.finditer(ptx):
        outside.append(ptx[end : entry.start()])
        if only not in (None, entry[1]):
            end = ptx.index("\n}", entry.end()) + 2
            continue
        parameters = re.findall(r"\.param \.(\w+) ", entry[2])
        kernel = Kernel(entry[1], 1 + ptx.count("\n", 0, entry.start()), parameters)
        end = _body(kernel, ptx, entry.end())
        kernels.append(kernel)
    shared = list(_arrays("".join([*outside, ptx[end:]])))
    for kernel in kernels:
        words = kernel.words()
        kernel.shared += [array for array in shared if array.name in words]
    return kernels


def _arrays(outside: str) -> list[Array]:
    """The shared variables of the module. Global ones, the constants of the source, are named by no instruction."""
    found = []
    for statement in filter(None, map(str.strip, re.split(r"[;\n]", outside))):
        array = ARRAY.fullmatch(statement)
        if array is not None and array[1] == "shared":
            found.append(Array(array[4], int(array[2]), array[3], int(array[5] or 1)))
        elif re.match(r"\.(version|target|address_size|global) ", statement) is None:
            raise PtxError(f"{statement!r} at the top of the module is not understood")
    return found


def _body(kernel: Kernel, ptx: str, begin: int) -> int:
    """Read a kernel from behind its brace; returns where it ends."""
    depth, at, line, counted = 1, begin, 1 + ptx.count("\n", 0, begin), begin
    while True:
        found = STATEMENT.match(ptx, at)
        if found is None:
            raise PtxError(f"{kernel.name}: no end")
        start, at = found.start(found.lastgroup or 0), found.end()
        line, counted = line + ptx.count("\n", counted, start), start
        if found["brace"]:
            depth += 1 if found["brace"] == "{" else -1
            if depth == 0:
                return at
            kernel.body.append(Mark(line, found["brace"]))
        elif found["label"]:
            kernel.body.append(Mark(line, found["label"]))
        elif found["text"].startswith("."):
            _declaration(kernel, found["text"], line, depth)
        else:
            kernel.body.append(_instruction(found["text"], line))


def _declaration(kernel: Kernel, text: str, line: int, depth: int) -> None:
    words = text.split(None, 2)
    array = ARRAY.fullmatch(text.strip())
    if words[0] == ".pragma":
        return
    if words[0] == ".reg" and words[1][1:] in CTYPES:
        for name in map(str.strip, words[2].split(",")):
            kernel.registers[re.sub(r"<\d+>$", "", name)] = words[1][1:]
    elif array is not None and depth == 1:
        rooms = kernel.local if array[1] == "local" else kernel.shared
        rooms.append(Array(array[4], int(array[2]), array[3], int(array[5] or 1)))
    else:
        raise PtxError(f"{kernel.name}, line {line}: {text.strip()!r} is not understood")


def _instruction(text: str, line: int) -> Instruction:
    guard, opcode, rest = re.fullmatch(r"(?:@(!?%\w+)\s+)?(\S+)\s*(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    operands = tuple(map(str.strip, re.split(r",(?![^{]*\})", rest))) if rest.strip() else ()
    return Instruction(line, guard or "", opcode, operands)
