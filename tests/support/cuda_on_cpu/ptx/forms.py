"""What PTX instructions mean, by form: opcode with every modifier. Those that only compute, that is; `translation` has
the rest. The forms are those that NVRTC makes of csrc/ for sm_75 … sm_120, and their siblings of other widths.

PTX's types say how an instruction reads its registers, which are bits: every operand is read as the form says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Form(NamedTuple):
    """`code` is C++ for the result, of type `result`, of operands {0}, {1} … that are read as `operands`."""

    result: str
    operands: tuple[str, ...]
    code: str


SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED_SIGNS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
WIDTHS = (16, 32, 64)


def _integers() -> Iterator[tuple[str, Form]]:
    for bits in WIDTHS:
        unsigned, signed, plain = f"u{bits}", f"s{bits}", f"b{bits}"
        for kind in (unsigned, signed):
            two = (kind, kind)
            for name, sign in (("add", "+"), ("sub", "-")):
                yield f"{name}.{kind}", Form(kind, two, f"{{0}} {sign} {{1}}")
            yield f"mul.lo.{kind}", Form(kind, (unsigned, unsigned), "{0} * (uint64_t){1}")
            yield f"mad.lo.{kind}", Form(kind, (unsigned,) * 3, "{0} * (uint64_t){1} + {2}")
            yield f"min.{kind}", Form(kind, two, "{0} < {1} ? {0} : {1}")
            yield f"max.{kind}", Form(kind, two, "{0} > {1} ? {0} : {1}")
            yield f"div.{kind}", Form(kind, two, "ptx_quotient({0}, {1})")
            yield f"rem.{kind}", Form(kind, two, "{0} - ptx_quotient({0}, {1}) * {1}")
            yield f"shr.{kind}", Form(kind, (kind, "u32"), "ptx_right({0}, {1})")
        yield f"neg.{signed}", Form(signed, (unsigned,), "0 - {0}")
        yield f"abs.{signed}", Form(signed, (signed,), "{0} < 0 ? 0 - {0} : {0}")
        yield f"shl.{plain}", Form(plain, (plain, "u32"), "ptx_left({0}, {1})")
        yield f"shr.{plain}", Form(plain, (plain, "u32"), "ptx_right({0}, {1})")
        yield f"not.{plain}", Form(plain, (plain,), "~{0}")
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            yield f"{name}.{plain}", Form(plain, (plain, plain), f"{{0}} {sign} {{1}}")
    for kind in "us":
        for bits in (16, 32):
            one, wide = f"{kind}{bits}", f"{kind}{2 * bits}"
            yield f"mul.wide.{one}", Form(wide, (one, one), f"({'' if kind == 's' else 'u'}int64_t){{0}} * {{1}}")
        one, wide = f"{kind}32", "int64_t" if kind == "s" else "uint64_t"
        yield f"mul.hi.{one}", Form(one, (one, one), f"({wide}){{0}} * {{1}} >> 32")
    yield "max.relu.s32", Form("s32", ("s32", "s32"), "ptx_positive({0} > {1} ? {0} : {1})")


def _bits() -> Iterator[tuple[str, Form]]:
    for bits in (32, 64):
        kind = f"b{bits}"
        yield f"bfi.{kind}", Form(kind, (kind, kind, "u32", "u32"), "ptx_inserted({0}, {1}, {2}, {3})")
        yield f"popc.{kind}", Form("u32", (kind,), "__builtin_popcountll({0})")
        for one in (f"u{bits}", f"s{bits}"):
            yield f"bfe.{one}", Form(one, (one, "u32", "u32"), "ptx_extracted({0}, {1}, {2})")
    yield "prmt.b32", Form("b32", ("b32", "b32", "b32"), "__byte_perm({0}, {1}, {2})")
    yield "shf.r.wrap.b32", Form("b32", ("b32", "b32", "b32"), "__funnelshift_r({0}, {1}, {2})")
    yield "brev.b32", Form("b32", ("b32",), "__brev({0})")
    yield "bfind.shiftamt.u32", Form("u32", ("u32",), "{0} ? __builtin_clz({0}) : 0xFFFFFFFFu")
    yield "not.pred", Form("pred", ("pred",), "!{0}")
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        yield f"{name}.pred", Form("pred", ("pred", "pred"), f"{{0}} {sign} {{1}}")


def _choices() -> Iterator[tuple[str, Form]]:
    for bits in WIDTHS:
        for kind in (f"u{bits}", f"s{bits}", f"b{bits}"):
            signs = SIGNS | (UNSIGNED_SIGNS if kind[0] == "u" else {})
            for name, sign in signs.items():
                if kind[0] != "b" or name in ("eq", "ne"):
                    yield f"setp.{name}.{kind}", Form("pred", (kind, kind), f"{{0}} {sign} {{1}}")
            yield f"selp.{kind}", Form(kind, (kind, kind, "pred"), "{2} ? {0} : {1}")
            yield f"mov.{kind}", Form(kind, (kind,), "{0}")
    yield "selp.f32", Form("f32", ("f32", "f32", "pred"), "{2} ? {0} : {1}")
    yield "mov.f32", Form("f32", ("f32",), "{0}")
    yield "mov.pred", Form("pred", ("pred",), "{0}")


def _comparisons(kind: str) -> Iterator[tuple[str, Form]]:
    two = (kind, kind)
    for name, sign in SIGNS.items():
        ordered = "{0} == {0} && {1} == {1} && " if name == "ne" else ""
        yield f"setp.{name}.{kind}", Form("pred", two, f"{ordered}{{0}} {sign} {{1}}")
        yield f"setp.{name}u.{kind}", Form("pred", two, f"{{0}} != {{0}} || {{1}} != {{1}} || {{0}} {sign} {{1}}")


def _floats() -> Iterator[tuple[str, Form]]:
    two = ("f32", "f32")
    for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")):
        yield f"{name}.rn.f32", Form("f32", two, f"ptx_canonical({{0}} {sign} {{1}})")
    yield "rcp.rn.f32", Form("f32", ("f32",), "ptx_canonical(1.0f / {0})")
    yield "sqrt.rn.f32", Form("f32", ("f32",), "ptx_canonical(sqrtf({0}))")
    yield "fma.rn.f32", Form("f32", ("f32",) * 3, "ptx_canonical(fmaf({0}, {1}, {2}))")
    yield "min.f32", Form("f32", two, "ptx_min({0}, {1})")
    yield "max.f32", Form("f32", two, "ptx_max({0}, {1})")
    # Bits, since C++ may make another NaN of a NaN.
    yield "abs.f32", Form("b32", ("b32",), "{0} & 0x7FFFFFFFu")
    yield "neg.f32", Form("b32", ("b32",), "{0} ^ 0x80000000u")
    yield "copysign.f32", Form("b32", ("b32", "b32"), "({0} & 0x80000000u) | ({1} & 0x7FFFFFFFu)")
    yield from _comparisons("f32")
    yield "setp.nan.f32", Form("pred", two, "{0} != {0} || {1} != {1}")
    yield "setp.num.f32", Form("pred", two, "{0} == {0} && {1} == {1}")


def _doubles() -> Iterator[tuple[str, Form]]:
    """Whose NaN nobody looks at: they become float32 before they are stored."""
    two = ("f64", "f64")
    for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")):
        yield f"{name}.rn.f64", Form("f64", two, f"{{0}} {sign} {{1}}")
    yield "sqrt.rn.f64", Form("f64", ("f64",), "sqrt({0})")
    yield "mov.f64", Form("f64", ("f64",), "{0}")
    yield "cvt.f64.f32", Form("f64", ("f32",), "(double){0}")
    yield "cvt.rn.f32.f64", Form("f32", ("f64",), "ptx_canonical((float){0})")
    yield from _comparisons("f64")


def _conversions() -> Iterator[tuple[str, Form]]:
    kinds = [f"{kind}{bits}" for kind in "us" for bits in (8, *WIDTHS)]
    for source in kinds:
        yield f"cvt.rn.f32.{source}", Form("f32", (source,), "(float){0}")
        for target in kinds:
            yield f"cvt.{target}.{source}", Form(target, (source,), "{0}")
    for bits in (32, 64):
        for kind, ctype in ((f"u{bits}", f"uint{bits}_t"), (f"s{bits}", f"int{bits}_t")):
            for name, rounded in (("rzi", "truncf"), ("rni", "rintf")):
                yield f"cvt.{name}.{kind}.f32", Form(kind, ("f32",), f"emulator_to_integer<{ctype}>({rounded}({{0}}))")
    yield "cvt.rni.f32.f32", Form("f32", ("f32",), "ptx_canonical(rintf({0}))")
    yield "cvt.f32.f16", Form("f32", ("u16",), "ptx_canonical(emulator_from_half({0}))")
    yield "cvt.rn.f16.f32", Form("u16", ("f32",), "emulator_to_half({0})")


def _spaces() -> Iterator[tuple[str, Form]]:
    """Addresses of shared memory count from its begin, as on a GPU, and so fit 32 bits; the others are the CPU's."""
    for space in ("global", "local"):
        yield f"cvta.{space}.u64", Form("u64", ("u64",), "{0}")
        yield f"cvta.to.{space}.u64", Form("u64", ("u64",), "{0}")
    yield "cvta.shared.u64", Form("u64", ("u64",), "ptx_shared({0}, 0)")


FORMS: dict[str, Form] = dict(
    form for group in (_integers, _bits, _choices, _floats, _doubles, _conversions, _spaces) for form in group()
)
