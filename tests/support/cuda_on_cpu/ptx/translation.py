"""A kernel's PTX as C++: one statement for each instruction, on the line where the PTX has it, so that messages name
the line of the PTX. Registers are variables, labels are labels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..compiler import KERNEL
from .forms import FORMS
from .text import CTYPES, Array, Instruction, Kernel, Mark, PtxError, parse

SPECIAL = {
    f"%{name}.{axis}": f"{variable}.{axis}"
    for name, variable in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))
    for axis in "xyz"
} | {"%laneid": "emulator_lane()"}
#: What a register holds before it is written.
RUBBISH = {
    "pred": "true",
    "f32": "same_bits<float>(0x7F8ABCDEu)",
    "f64": "same_bits<double>(0x7FF8ABCD01234567ull)",
    **{f"{k}{n}": f"({CTYPES[f'{k}{n}']})0xDEADBEEFDEADBEEFull" for k in "usb" for n in (8, 16, 32, 64)},
}
SHUFFLES = {"bfly": ("xor_", 31), "down": ("down_", 31), "up": ("up_", 0), "idx": ("", 31)}
ATOMICS = {"add": "atomicAdd", "or": "atomicOr", "exch": "atomicExch", "max": "atomicMax", "min": "atomicMin"}

MEMORY = re.compile(
    r"(ld|st)(\.volatile)?(?:\.(param|global|shared|local))?(?:\.wb)?(?:\.(v2|v4))?\.([usb](?:8|16|32|64)|f(?:32|64))"
)
ATOMIC = re.compile(r"(atom|red)(?:\.relaxed\.gpu)?\.(global|shared)\.(add|or|exch|max|min)\.([ub](?:32|64))")
SHUFFLE = re.compile(r"shfl\.sync\.(bfly|down|up|idx)\.b32")


#: How often each thread of a block has executed each line of the PTX.
COUNTS = (
    'extern "C" __attribute__((visibility("default"))) unsigned ptx_counts[{0}][256]; unsigned ptx_counts[{0}][256];'
)


def translate(ptx: str, source: str, name: str | None = None, counted: bool = False) -> str:
    """CUDA C++ for the kernels in `ptx`, or for one of them: g++ takes seconds for a large one. PTX has lost which
    parameters are pointers; `source`, the `.cu`, says. `counted` code counts in `ptx_counts` what blocks of at most 256
    threads execute.

    Raises:
        PtxError: an instruction is unknown, or the source is not that of the PTX.
    """
    kernels = parse(ptx, name)
    if not kernels:
        raise PtxError(f"no kernel {name or ''} in the PTX")
    lines = [""] * (2 + ptx.count("\n"))
    lines[0] = '#include "ptx_on_cpu.h"'
    shared = {array.name: array for kernel in kernels for array in kernel.shared}
    lines[1] = "".join(_shared(array) for array in shared.values())  # kernels that name it share it
    lines[1] += COUNTS.format(len(lines)) if counted else ""
    for kernel in kernels:
        for line, code in _Writer(kernel, source, counted).lines():
            lines[line - 1] += code + " "
    return "\n".join(lines)


def _symbol(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _shared(array: Array) -> str:
    name, ctype = _symbol(array.name), CTYPES[array.type]
    return (
        f"static inline uint64_t at_{name}() {{ static __attribute__((aligned({array.align}))) {ctype} {name}"
        f"[{array.length}]; return ptx_shared_address({name}); }} "
    )


class _Writer:
    """Writes one kernel."""

    def __init__(self, kernel: Kernel, source: str, counted: bool) -> None:
        self.kernel, self.counted = kernel, counted
        self.shared = {array.name for array in kernel.shared}
        self.local = {array.name for array in kernel.local}
        self.parameters = self._parameters(source)
        self.words = kernel.words()

    def _parameters(self, source: str) -> list[tuple[str, str]]:
        """(C++ type, name) of each, from the source, and as wide as the PTX says."""
        name, widths = self.kernel.name, self.kernel.parameters
        begun = next((found for found in re.finditer(KERNEL, source) if found[1] == name), None)
        if begun is None:
            raise PtxError(f"the source has no kernel {name}")
        parameters = []
        for declared in source[begun.end() : source.index(")", begun.end())].split(","):
            ctype, at = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", declared, re.DOTALL).groups()  # type: ignore[union-attr]
            if ctype.endswith("*"):
                ctype = "const void*" if ctype.startswith("const ") else "void*"
            parameters.append((ctype, at))
        sizes = [64 if "*" in ctype or ctype in ("i64", "u64") else 32 for ctype, _ in parameters]
        if sizes != [int(width[1:]) for width in widths]:
            raise PtxError(f"{name} takes {widths} in the PTX, and {[ctype for ctype, _ in parameters]} in the source")
        names = {"i64": "long long", "u64": "unsigned long long", "u32": "unsigned"}
        return [(names.get(ctype, ctype), f"a_{at}") for ctype, at in parameters]

    def lines(self) -> list[tuple[int, str]]:
        """C++ and the line of the PTX that it stands for, in order."""
        kernel = self.kernel
        signature = ", ".join(f"{ctype} {name}" for ctype, name in self.parameters)
        found = [(kernel.line, f"__global__ void {kernel.name}({signature}) {{ {self._declarations()}")]
        for one in kernel.body:
            if isinstance(one, Mark):
                found.append((one.line, one.text if one.text in "{}" else f"{_symbol(one.text)}:;"))
                continue
            try:
                code = self.statement(one)
            except PtxError as error:
                raise PtxError(f"{kernel.name}, line {one.line} of the PTX: {error}") from None
            code = f"++ptx_counts[{one.line - 1}][threadIdx.x]; {code}" if self.counted else code
            guard = one.guard and f"if ({'!' * one.guard.startswith('!')}{self._name(one.guard.lstrip('!'))}) "
            found.append((one.line, f"{guard}{{ {code} }}" if guard else code))
        return [*found, (found[-1][0], "}")]

    def _declarations(self) -> str:
        special = {name.partition(".")[0] for name in SPECIAL}
        used = sorted(w for w in self.words if w in self.kernel.registers or (w.startswith("%") and w not in special))
        registers = [f"{CTYPES[t]} {self._name(r)} = {RUBBISH[t]};" for r in used for t in [self.kernel.type_of(r)]]
        local = [f"alignas({a.align}) {CTYPES[a.type]} {_symbol(a.name)}[{a.length}];" for a in self.kernel.local]
        return " ".join(registers + local)

    # ---- operands

    def _name(self, register: str) -> str:
        return "x_" + _symbol(register.removeprefix("%"))

    def read(self, operand: str, kind: str) -> str:
        """An operand's bits, read as `kind`."""
        ctype = CTYPES[kind]
        if operand in SPECIAL:
            return f"({ctype}){SPECIAL[operand]}"
        if operand.startswith("%"):
            return self._bits(self._name(operand), self.kernel.type_of(operand), kind)
        if re.fullmatch(r"0f[0-9A-F]{8}|0d[0-9A-F]{16}", operand):
            wide = operand[1] == "d"
            return self._bits(f"0x{operand[2:]}{'ull' if wide else 'u'}", "u64" if wide else "u32", kind)
        if re.fullmatch(r"-?\d+", operand) and kind != "f32":
            return f"({ctype}){operand}{'ll' if operand.startswith('-') else 'ull'}"
        if re.fullmatch(r"0x[0-9A-F]+U", operand) and kind != "f32":
            return f"({ctype}){operand[:-1]}ull"
        if operand in self.shared:
            return f"({ctype})at_{_symbol(operand)}()"
        if operand in self.local and ctype.endswith("64_t"):
            return f"({ctype}){_symbol(operand)}"
        raise PtxError(f"operand {operand!r}, read as {kind}, is not understood")

    @staticmethod
    def _bits(code: str, declared: str, kind: str) -> str:
        """A value of one type, the bits of which are read as another."""
        if (declared == "pred") != (kind == "pred"):
            raise PtxError(f"{declared} is read as {kind}")
        if declared == kind:
            return code
        if "f" in (declared[0], kind[0]):
            if declared[1:] != kind[1:]:
                raise PtxError(f"{declared} is read as {kind}")
            code = f"same_bits<{CTYPES[kind] if kind[0] == 'f' else f'uint{kind[1:]}_t'}>({code})"
        return f"({CTYPES[kind]}){code}"

    def write(self, target: str, value: str, kind: str) -> str:
        """What stores a value of type `kind` in a register, wider ones than the value too."""
        if target == "_":
            return f"(void)({value});"
        declared = self.kernel.type_of(target)
        return f"{self._name(target)} = {self._bits(f'({CTYPES[kind]})({value})', kind, declared)};"

    def address(self, operand: str, space: str | None, size: int) -> str:
        found = re.fullmatch(r"\[([\w$%.]+)(?:\+(-?\d+))?\]", operand)
        if found is None:
            raise PtxError(f"address {operand!r} is not understood")
        at = f"{self.read(found[1], 'u64')} + {found[2] or 0}"
        return f"ptx_shared({at}, {size})" if space == "shared" else at

    # ---- instructions

    def statement(self, one: Instruction) -> str:
        opcode, operands = one.opcode, one.operands
        form = FORMS.get(opcode)
        braces = any(operand.startswith("{") for operand in operands)
        if form is not None and not braces:
            if len(operands) != 1 + len(form.operands):
                raise PtxError(f"{opcode} with {len(operands)} operands")
            values = [f"({self.read(o, kind)})" for o, kind in zip(operands[1:], form.operands, strict=True)]
            return self.write(operands[0], form.code.format(*values), form.result)
        if opcode in ("mov.b32", "mov.b64") and braces:
            return self._parts(opcode, operands)
        if (found := MEMORY.fullmatch(opcode)) is not None:
            return self._memory(found, operands)
        if (found := ATOMIC.fullmatch(opcode)) is not None:
            return self._atomic(found, operands)
        if (found := SHUFFLE.fullmatch(opcode)) is not None:
            return self._shuffle(found, operands)
        return self._control(opcode, operands)

    def _control(self, opcode: str, operands: Sequence[str]) -> str:
        match opcode, *operands:
            case (("bra" | "bra.uni"), label):
                return f"goto {_symbol(label)};"
            case ["ret"]:
                return "return;"
            case "bar.sync", "0":
                return "__syncthreads();"
            case "bar.red.or.pred", target, "0", vote:
                return self.write(target, f"__syncthreads_or({self.read(vote, 'pred')})", "pred")
            case "bar.warp.sync", mask:
                return f"__syncwarp({self.read(mask, 'u32')});"
            case "vote.sync.ballot.b32", target, vote, mask:
                return self.write(target, f"__ballot_sync({self.read(mask, 'u32')}, {self.read(vote, 'pred')})", "b32")
            case ["membar.gl"] | ["fence.acq_rel.gpu"]:
                return "emulator_fence();"
        raise PtxError(f"{opcode} {', '.join(operands)} is not among the forms that are understood")

    def _parts(self, opcode: str, operands: Sequence[str]) -> str:
        """mov between a register and the parts of it, the lowest first."""
        kind, bits = opcode[4:], int(opcode[5:])
        target, source = operands
        names = [name.strip() for name in (target if target.startswith("{") else source).strip("{}").split(",")]
        part = bits // len(names)
        if target.startswith("{"):
            whole = f"(uint64_t){self.read(source, kind)}"
            writes = [self.write(n, f"{whole} >> {part * i}", f"b{part}") for i, n in enumerate(names) if n != "_"]
            return " ".join(writes)
        reads = [f"(uint64_t){self.read(name, f'b{part}')} << {part * i}" for i, name in enumerate(names)]
        return self.write(target, " | ".join(reads), kind)

    def _memory(self, form: re.Match[str], operands: Sequence[str]) -> str:
        what, volatile, space, vector, kind = form.groups()
        count, size = int((vector or "v1")[1:]), int(kind[1:]) // 8
        if volatile and (what, space, vector) != ("ld", "global", None):
            raise PtxError(f"{form[0]} is not understood")
        if space == "param":
            if what == "st" or count > 1:
                raise PtxError(f"{form[0]} is not understood")
            return self._parameter(kind, operands)
        group, where = operands if what == "ld" else reversed(operands)
        names = [name.strip() for name in group.strip("{}").split(",")]
        if len(names) != count:
            raise PtxError(f"{form[0]} of {group}")
        words = f"PtxWords<{CTYPES[kind]}, {count}>"
        at = f"ptx_words<{CTYPES[kind]}, {count}>({self.address(where, space, size * count)})"
        if what == "st":
            values = ", ".join(self.read(name, kind) for name in names)
            return f"*{at} = {words}{{{{{values}}}}};"
        writes = " ".join(self.write(name, f"w.at[{i}]", kind) for i, name in enumerate(names))
        others = f"emulator_atomic({at}, {size}); " if volatile else ""  # it may wait for them
        return f"{{ {others}const {words} w = *{at}; {writes} }}"

    def _parameter(self, kind: str, operands: Sequence[str]) -> str:
        found = re.fullmatch(rf"\[{self.kernel.name}_param_(\d+)\]", operands[1])
        if found is None:
            raise PtxError(f"parameter {operands[1]} is not understood")
        (ctype, name), width = self.parameters[int(found[1])], self.kernel.parameters[int(found[1])]
        if width[1:] != kind[1:]:
            raise PtxError(f"{kind} of a parameter that is {width}")
        value = f"(uint64_t){name}" if "*" in ctype else self._bits(name, "f32" if ctype == "float" else kind, kind)
        return self.write(operands[0], value, kind)

    def _atomic(self, form: re.Match[str], operands: Sequence[str]) -> str:
        name, space, what, kind = form.groups()
        *target, place, value = operands  # `red` returns nothing
        if len(target) != (name == "atom"):
            raise PtxError(f"{name} with {len(operands)} operands")
        ctype = CTYPES[kind]
        at = f"&ptx_words<{ctype}, 1>({self.address(place, space, int(kind[1:]) // 8)})->at[0]"
        code = f"{ATOMICS[what]}({at}, {self.read(value, kind)})"
        return self.write(target[0], code, kind) if target else f"{code};"

    def _shuffle(self, form: re.Match[str], operands: Sequence[str]) -> str:
        target, value, argument, segment, mask = operands
        register, _, found = target.partition("|")
        if self.words[found] > 1:
            raise PtxError("whether a shuffle's lane was in range is asked for, which is not understood")
        function, last = SHUFFLES[form[1]]
        width = f"ptx_width({self.read(segment, 'u32')}, {last})"
        call = f"{self.read(mask, 'u32')}, {self.read(value, 'b32')}, {self.read(argument, 'u32')}, {width}"
        return self.write(register, f"__shfl_{function}sync({call})", "b32")
