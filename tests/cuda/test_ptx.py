"""The compiler's own output runs: NVRTC's PTX, as C++, on the CPU (`cuda_on_cpu.ptx`).

sm_75 … sm_90 get one PTX, word for word, and sm_100 and sm_120 another one with few differences; each is run once.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_on_cpu import KERNEL, EmulationError, Module
from cuda_on_cpu.ptx import OPTIONS, PtxError, translate
from emulated import EmulatedDevice, emulated_gpu
from gradwire.compress import CODECS, Codec, OneBit, RandomK, Threshold
from gradwire.compress.backends.cuda.runtime.compiler import CSRC
from gradwire.compress.codec import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import ARCHITECTURES, FILES, build
from parity import equal
from preloaded import PLAIN_PYTHON
from strategies import KINDS

ROOT = Path(__file__).resolve().parents[2]


def program(file: str, architecture: int) -> str:
    """A file's PTX, but for the lines that name the architecture."""
    return re.sub(r"^\.(version|target) .*", "", build(file, architecture).ptx, flags=re.MULTILINE)


def distinct(files: Sequence[str]) -> list[int]:
    """The first of the architectures that share what these files are compiled to."""
    first: dict[tuple[str, ...], int] = {}
    for architecture in ARCHITECTURES:
        first.setdefault(tuple(program(file, architecture) for file in files), architecture)
    return list(first.values())


# ---- what runs


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES)
def test_every_instruction_is_understood(file: str, every: bool) -> None:
    """Of sm_90, which other tests compile as well; `every` one takes the compiler's time."""
    source = (CSRC / file).read_text("utf-8")
    for architecture in distinct([file]) if every else (90,):
        code = translate(build(file, architecture).ptx, source)
        assert re.findall(KERNEL, code) == re.findall(KERNEL, source)


@pytest.mark.parametrize("codec", [c for c in CODECS if not isinstance(c, RandomK | Threshold)], ids=str)
def test_what_the_compiler_made_of_the_kernels_writes_the_reference_s_bytes(codec: Codec) -> None:
    """A share of the contract, on the PTX of one architecture: float32, and OneBit in half precision."""
    kinds = st.lists(st.sampled_from(tuple(KINDS)), min_size=2, max_size=4)
    dtypes = DTYPES if isinstance(codec, OneBit) else (torch.float32,)

    @settings(max_examples=5, deadline=None)
    @given(numel=st.sampled_from([1, 257, 5003, 9001]), kinds=kinds, offset=st.integers(0, 1))
    def agree(numel: int, kinds: list[str], offset: int) -> None:
        assert all(equal(codec, numel, kinds, dtype, offset) for dtype in dtypes)

    with emulated_gpu(EmulatedDevice(architecture=90)) as device:
        agree()
    assert device.launches


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_contract_holds_for_what_the_compiler_made_of_the_kernels(architecture: int) -> None:
    if architecture not in distinct(FILES):
        pytest.skip("the PTX of an architecture before")
    suite = [f"tests/compress/test_{name}.py" for name in ("backends", "entries", "vectors", "momentum")]
    # pytest in a process that has imported Hypothesis already cannot rewrite its assertions.
    command = [
        PLAIN_PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not cuda",
        "-k",
        "cuda",
    ]
    done = subprocess.run(
        [*command, "--ptx", str(architecture), *suite], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) > 60


# ---- what instructions mean


def run(body: str, *values: int, results: int = 1, stores: bool = False) -> list[int]:
    """What a kernel of these instructions leaves in %r10, %r11 … or, if it `stores` by itself, at %rd1. It is given
    32-bit values in %r0, %r1 …"""
    parameters = "\n".join(f"\t.param .u32 f_param_{i + 1}," for i in range(len(values))).rstrip(",")
    loads = "\n".join(f"\tld.param.u32 %r{i}, [f_param_{i + 1}];" for i in range(len(values)))
    results_at = range(0 if stores else results)
    ending = "\n".join(f"\tst.global.u32 [%rd1+{4 * i}], %r{10 + i};" for i in results_at)
    ptx = f""".version 9.0
.target sm_90
.address_size 64
.visible .entry f(
\t.param .u64 f_param_0{"," if values else ""}
{parameters}
)
{{
\t.reg .pred %p<8>;
\t.reg .b16 %rs<8>;
\t.reg .f32 %f<8>;
\t.reg .b32 %r<20>;
\t.reg .b64 %rd<8>;
\tld.param.u64 %rd1, [f_param_0];
{loads}
{body}
{ending}
\tret;
}}
"""
    source = "__global__ void f(" + ", ".join(["u32* out", *(f"int v{i}" for i in range(len(values)))]) + ") {}"
    out = np.zeros(results, np.uint32)
    given = [np.array([value], np.uint32).view(np.int32)[0] for value in values]
    Module("f.ptx", code=translate(ptx, source), options=OPTIONS).get_function("f")((1,), (1,), (out, *given))
    return out.tolist()


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


NAN, OTHER_NAN, INFINITY, MINUS_ZERO, LOWEST = 0x7FFFFFFF, 0x7FC12345, 0x7F800000, 1 << 31, 1 << 31
#: (form, operands, result): what C++ would do otherwise, or not at all.
MEANINGS = (
    ("shl.b32", (1, 32), 0),
    ("shl.b32", (3, 31), 1 << 31),
    ("shr.u32", (1 << 31, 33), 0),
    ("shr.s32", (LOWEST, 99), 0xFFFFFFFF),
    ("add.s32", (0x7FFFFFFF, 1), LOWEST),
    ("div.s32", (LOWEST, 0xFFFFFFFF), LOWEST),
    ("rem.s32", ((1 << 32) - 7, 3), 0xFFFFFFFF),
    ("div.u32", (0xFFFFFFFF, 0xFFFFFFFF), 1),
    ("mul.lo.s32", (0xFFFFFFFF, 5), (1 << 32) - 5),
    ("mul.hi.u32", (0xD2511F53, 0x12345678), 0xD2511F53 * 0x12345678 >> 32),
    ("mul.hi.s32", (0xFFFFFFFF, 0xFFFFFFFF), 0),
    ("min.s32", (1, 0xFFFFFFFF), 0xFFFFFFFF),
    ("min.u32", (1, 0xFFFFFFFF), 1),
    ("max.relu.s32", ((1 << 32) - 3, (1 << 32) - 7), 0),
    ("abs.s32", ((1 << 32) - 3,), 3),
    ("popc.b32", (0xF0F0,), 8),
    ("brev.b32", (1,), 1 << 31),
    ("bfind.shiftamt.u32", (1,), 31),
    ("bfind.shiftamt.u32", (0,), 0xFFFFFFFF),
    ("prmt.b32", (0x33221100, 0x77665544, 0x7410), 0x77441100),
    ("prmt.b32", (0x80, 0, 0x8888), 0xFFFFFFFF),
    ("bfi.b32", (0xFF, 0, 4, 8), 0xFF0),
    ("bfi.b32", (0xFF, 0, 28, 8), 0xF0000000),
    ("bfe.u32", (0x12345678, 8, 12), 0x456),
    ("bfe.u32", (0xF0000000, 28, 8), 0xF),  # beyond the register there is nothing
    ("bfe.u32", (0xFF, 0, 0), 0),
    ("bfe.u32", (0x12345678, 0, 32), 0x12345678),
    ("bfe.s32", (0x8F00, 8, 8), 0xFFFFFF8F),
    ("bfe.s32", (0x7F00, 8, 8), 0x7F),
    ("bfe.s32", (LOWEST, 28, 8), 0xFFFFFFF8),
    ("bfe.s32", (0xFF, 0, 0), 0),
    ("bfe.u32", (0xABCD, 0x108, 0x108), 0xAB),  # a byte of each operand counts
    ("add.rn.f32", (bits(1), OTHER_NAN), NAN),
    ("sub.rn.f32", (INFINITY, INFINITY), NAN),
    ("div.rn.f32", (bits(1), MINUS_ZERO), INFINITY | 1 << 31),
    ("mul.rn.f32", (bits(2e-45), bits(0.5)), 0),  # subnormal, half of which rounds to even
    ("min.f32", (OTHER_NAN, bits(2)), bits(2)),
    ("min.f32", (OTHER_NAN, OTHER_NAN), NAN),
    ("min.f32", (0, MINUS_ZERO), MINUS_ZERO),
    ("max.f32", (MINUS_ZERO, 0), 0),
    ("neg.f32", (OTHER_NAN,), OTHER_NAN | 1 << 31),
    ("copysign.f32", (MINUS_ZERO, bits(1.5)), bits(-1.5)),
    ("copysign.f32", (bits(2.5), OTHER_NAN | 1 << 31), OTHER_NAN),
    ("cvt.rzi.s32.f32", (bits(-1.9),), (1 << 32) - 1),
    ("cvt.rzi.s32.f32", (bits(3e9),), 0x7FFFFFFF),
    ("cvt.rzi.s32.f32", (OTHER_NAN,), 0),
    ("cvt.rzi.u32.f32", (bits(-5),), 0),
    ("cvt.rni.s32.f32", (bits(2.5),), 2),
    ("cvt.rn.f32.s32", (0xFFFFFFFF,), bits(-1)),
    ("cvt.rn.f32.u32", (0xFFFFFFFF,), bits(2.0**32)),
    ("cvt.s32.s8", (0x80,), 0xFFFFFF80),
    ("cvt.rn.f16.f32", (bits(65520),), 0x7C00),
    ("cvt.rn.f16.f32", (bits(2.0**-25),), 0),
    ("cvt.rn.f16.f32", (OTHER_NAN,), 0x7FFF),
    ("cvt.f32.f16", (0x0001,), bits(2.0**-24)),
)


def test_instructions_mean_what_the_hardware_does() -> None:
    """One kernel, which holds all of them."""
    body, expected = [], []
    for i, (form, operands, result) in enumerate(MEANINGS):
        for j, operand in enumerate(operands):
            body.append(f"mov.u32 %r{j}, {operand - (1 << 32) if operand >> 31 else operand};")
        read, target = [f"%r{j}" for j in range(len(operands))], "%r10"
        if form == "cvt.f32.f16":
            body.append("cvt.u16.u32 %rs0, %r0;")
            read = ["%rs0"]
        if form == "cvt.rn.f16.f32":
            target = "%rs1"
        body.append(f"{form} {target}, {', '.join(read)};")
        if target == "%rs1":
            body.append("cvt.u32.u16 %r10, %rs1;")
        body.append(f"st.global.u32 [%rd1+{4 * i}], %r10;")
        expected.append(result)
    got = run("\n".join(body), results=len(MEANINGS), stores=True)
    wrong = [(*m, hex(g)) for m, g in zip(MEANINGS, got, strict=True) if m[2] != g]
    assert wrong == []


def test_comparisons_with_nan() -> None:
    truths = {"eq": 0, "ne": 0, "ltu": 1, "equ": 1, "neu": 1, "gt": 0, "nan": 1, "num": 0}
    body = [f"setp.{how}.f32 %p1, %r0, %r1;\nselp.u32 %r{10 + i}, 1, 0, %p1;" for i, how in enumerate(truths)]
    assert run("\n".join(body), bits(1), NAN, results=len(truths)) == list(truths.values())


def test_parts_of_a_register_and_guards() -> None:
    body = """mov.b32 {%rs0, %rs1}, %r0; mov.b32 %r10, {%rs1, %rs0}; setp.eq.s32 %p1, %r0, 0;
@%p1 bra $L_1; @!%p1 add.s32 %r10, %r10, 1; $L_1: mov.b64 %rd2, {%r10, %r0}; mov.b64 {_, %r11}, %rd2;"""
    assert run(body, 0x00010002, results=2) == [0x00020002, 0x00010002]
    body = "{ .reg .b16 tmp; mov.b32 {tmp, %rs0}, %r0; } cvt.u32.u16 %r10, %rs0;"
    assert run(body, 0x00010002) == [1]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("add.f32 %f1, %f2, %f3;", r"f, line 16 of the PTX: add\.f32 .* not among the forms"),  # may be contracted
        ("fma.rn.ftz.f32 %f1, %f2, %f3, %f1;", "fma.rn.ftz.f32"),
        ("call.uni (retval0), g, (param0);", "call.uni"),
        ("add.s32 %r1, %r2, %x3;", "register %x3 is not declared"),
        ("add.s32 %r1, %r2;", "add.s32 with 2 operands"),
        ("shfl.sync.bfly.b32 %r1|%p1, %r1, 1, 31, -1; @%p1 ret;", "in range is asked for"),
        # Those that a GPU would not forgive:
        ("add.s64 %rd1, %rd1, 2; ld.global.u32 %r1, [%rd1];", "misaligned access to 4 bytes"),
        ("mov.u32 %r1, 400; ld.shared.u32 %r2, [%r1];", "out-of-bounds shared memory"),
        ("mov.u32 %r1, 0; div.u32 %r2, %r1, %r1;", "division by zero"),
    ],
)
def test_what_is_not_known_or_wrong_is_refused(body: str, complaint: str) -> None:
    with pytest.raises((PtxError, EmulationError), match=complaint):
        run(body)
