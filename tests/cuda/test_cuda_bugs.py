"""Bugs that kernels have, put into ours: the emulator's checked build, or the reference, must object to each."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import EmulationError
from emulated import CSRC, EmulatedDevice, emulated_gpu, forget
from gradwire.compress import (
    QSGD,
    ChunkedTopK,
    Codec,
    OneBit,
    TernGrad,
    TopK,
)
from parity import equal


@dataclass(frozen=True)
class Bug:
    """`wrong` in place of `right` in a kernel source, and a pattern for what must be said of it, run with `codec` on an
    `EmulatedDevice` with these options."""

    name: str
    file: str
    right: str
    wrong: str
    codec: Codec
    objection: str
    device: dict[str, Any] = field(default_factory=dict)


#: What the comparison with the reference says.
DIFFERS = "differs from the reference"

#: Blocks that run at once; only then does one ever wait for another.
SEVERAL = {"resident": 3}
#: How a share of a digit waits for the digit above; how a share of the wire says what it has, and finds out what those
#: before it have; and what makes the first one late.
WAITS_AND_COUNTS = """\
        while (kth.digits < digit) learn();
        const i64 share = turn % shares, begin = items * share / shares, end = items * (share + 1) / shares;
"""
SAYS_AND_WAITS = """\
    if (threadIdx.x == 0) atomicExch(counts + share, mine | KNOWN);
    u64 sum = 0, total;
    for (u32 earlier = threadIdx.x; earlier < share; earlier += blockDim.x) {
        u64 there;
        do {
            there = ((const volatile u64*)counts)[earlier];
        } while (!(there & KNOWN));
"""
LATE = "    for (int i = 0; share == 0 && i < 99; ++i) __threadfence();\n"

BUGS = (
    Bug(
        "a tail is read past its end",
        "include/common.cuh",
        "begin + j < end ? to_float(p[begin + j]) : 0.0f;",
        "to_float(p[begin + j]);",
        OneBit(),
        "out-of-bounds",
    ),
    Bug(
        "16 bytes at any address",
        "include/common.cuh",
        "return ((u64)p & 15) == 0;",
        "return true;",
        OneBit(),
        "misaligned|alignment",
    ),
    Bug(
        "one lane left out of a fold",
        "include/common.cuh",
        "v = v + __shfl_xor_sync(EVERYONE, v, 2);",
        "if (threadIdx.x % WARP) v = v + __shfl_xor_sync(EVERYONE, v, 2);",
        OneBit(),
        "deadlock|mask|reads lane",
    ),
    Bug(
        "the last block is lost",
        "include/common.cuh",
        "(numel + block - 1) / block",
        "numel / block",
        OneBit(),
        DIFFERS,
    ),
    Bug(
        "truncation for rounding",
        "include/philox.cuh",
        "r[j] = 0.5f;",
        "r[j] = 0.0f;",
        QSGD(rounding="nearest"),
        DIFFERS,
    ),
    Bug(
        "ranks in another order",
        "qsgd.cu",
        "const u8* record = records + rank * pitch;",
        "const u8* record = records + (ranks - 1 - rank) * pitch;",
        QSGD(bits=3),
        DIFFERS,
    ),
    Bug(
        "a trit of another row",
        "ternary.cu",
        "row = TRITS - 1; row >= 0; --row",
        "row = 0; row < TRITS; ++row",
        TernGrad(),
        DIFFERS,
    ),
    Bug(
        "a rank's entries beside those of the rank before",
        "chunked_topk.cu",
        "for (int r = 0; r < batch; ++r) {\n                    __syncthreads();",
        "__syncthreads();\n                for (int r = 0; r < batch; ++r) {",
        ChunkedTopK(),
        f"race|{DIFFERS}",
    ),
    Bug(
        "a record's number of entries that is trusted",
        "include/record.cuh",
        "left != 0 && i < room;",
        "left != 0;",
        ChunkedTopK(),
        f"race|out-of-bounds|{DIFFERS}",
    ),
    Bug(
        "a bit that is set without an atomic",
        "chunked_topk.cu",
        "atomicOr(shared.record + form.upper() + place / 32, 1u << place % 32);",
        "shared.record[form.upper() + place / 32] |= 1u << place % 32;",
        ChunkedTopK(),
        f"race|{DIFFERS}",
    ),
    Bug(
        "shared memory nobody wrote",
        "topk.cu",
        "for (int bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;",
        "",
        TopK(),
        f"uninitialised|{DIFFERS}",
    ),
    Bug(
        "a barrier too few between ranks",
        "topk_decode.cu",
        "__syncthreads();\n                while (adding == warp",
        "while (adding == warp",
        TopK(0.5),
        "race",
    ),
    Bug(
        "a counter without its atomic",
        "topk.cu",
        "first = total > 0 ? atomicAdd(&state->found, total) : 0;",
        "first = state->found, state->found += total;",
        TopK(),
        "race",
    ),
    Bug(
        "a barrier that some never reach",
        "topk.cu",
        "        const int any_wild = __syncthreads_or(wild != 0);",
        ("        if (wild) __syncthreads();\n        const int any_wild = wild;"),
        TopK(),
        "divergent|deadlock|livelock|race",
    ),
    Bug(
        "candidates beyond the room",
        "topk.cu",
        "if (slot < (u32)capacity) {",
        "if (true) {",
        TopK(0.001),
        "out-of-bounds",
    ),
    Bug(
        "candidates that do not return for the second look",
        "topk.cu",
        "if (is_finite(value[i])) residual[index[i]] = value[i];",
        "if (false) residual[index[i]] = value[i];",
        TopK(),
        f"undefined|{DIFFERS}",
    ),
    Bug(
        "a candidate that is lost unless it is sent",
        "topk.cu",
        "source.residual[where] = source.dense ? 0.0f : v;",
        "source.residual[where] = 0.0f;",
        TopK(),
        DIFFERS,
    ),
    Bug(
        "a highest digit counted twice in the second look",
        "topk.cu",
        "kth.digits == 0 ? max(state->threshold, 1u) : ~0u;",
        "~0u;",
        TopK(),
        DIFFERS,
    ),
    Bug(
        "a histogram of the step before",
        "topk.cu",
        "state->highest[bin] = 0;",
        "state->highest[bin] += 0;",
        TopK(),
        DIFFERS,
    ),
    Bug(
        "no second look after a wrong prediction",
        "topk.cu",
        "return state->found > (u32)capacity || (state->found < (u32)k && state->threshold > 1);",
        "return state->found > (u32)capacity;",
        TopK(),
        DIFFERS,
    ),
    Bug(
        "a digit before the one above it is counted",
        "topk.cu",
        WAITS_AND_COUNTS,
        WAITS_AND_COUNTS.replace("learn()", "kth.learn(state, warps)") + LATE,
        TopK(),
        f"{DIFFERS}|undefined|out-of-bounds",
        SEVERAL,
    ),
    Bug(
        "a share that does not wait for the ones before",
        "include/shares.cuh",
        SAYS_AND_WAITS,
        LATE + SAYS_AND_WAITS.replace("while (!(there & KNOWN));", "while (false);"),
        TopK(),
        f"{DIFFERS}|race|out-of-bounds",
        SEVERAL,
    ),
    Bug(
        "shares taken without an atomic",
        "include/shares.cuh",
        "taken = atomicAdd(turns, 1u);",
        "taken = *turns, *turns += 1;",
        TopK(),
        "race",
        SEVERAL,
    ),
    Bug(
        "indices that are trusted",
        "topk_decode.cu",
        "sound = before < at && at < numel;",
        "sound = true;",
        TopK(indices="plain"),
        f"race|{DIFFERS}",
    ),
    Bug(
        "tiles beyond a wire's bits that nobody notes",
        "entries.cu",
        "group = noted + 1 + threadIdx.x;",
        "group = groups + 1;",
        TopK(),
        f"uninitialised|out-of-bounds|{DIFFERS}",
    ),
    Bug(
        "more groups than there are",
        "entries.cu",
        "group << shift == zeros && group <= groups)",
        "group << shift == zeros)",
        TopK(0.0003),
        f"race|out-of-bounds|{DIFFERS}",
    ),
    Bug(
        "a number of entries that is trusted",
        "entries.cu",
        "i < total && entry + i < k;",
        "i < total;",
        TopK(),
        "race|out-of-bounds",
    ),
    Bug(
        "a finite number becomes infinite",
        "include/entries.cuh",
        "(rounded.bits & 0x7FFF) == 0x7F80) --rounded.bits;",
        "false) --rounded.bits;",
        TopK(0.5, values=torch.bfloat16),
        DIFFERS,
    ),
)


#: Gradients with ties, tails, values that are not finite, and thresholds predicted too high and too low.
KINDS = ("normal", "ties", "not finite", "tiny", "huge", "largest", "constant")
#: The same where several blocks run at once, and one has far more to do than the others: the first, or the last.
UNEVEN = ("zeros", "leading", "trailing", "leading", "normal", "ties")


def objection(codec: Codec, csrc: Path, **options: Any) -> str:
    """What is said of the kernels in a directory; nothing if all is well."""
    try:
        with emulated_gpu(EmulatedDevice(csrc=csrc, **options)):
            kinds = UNEVEN if options == SEVERAL else KINDS
            same = all(equal(codec, 5003, kinds, offset=offset) for offset in (0, 1))
            return "" if same else DIFFERS
    except EmulationError as error:
        return str(error)
    finally:
        if csrc != CSRC:
            forget(csrc)


@pytest.mark.parametrize(
    "bug", {f"{bug.codec}, {bug.device}": bug for bug in BUGS}.values(), ids=lambda bug: str(bug.codec)
)
def test_the_kernels_as_they_are_meet_no_objection(bug: Bug) -> None:
    assert objection(bug.codec, CSRC, **bug.device) == ""


def test_a_share_that_is_late_is_waited_for(tmp_path: Path) -> None:
    csrc = shutil.copytree(CSRC, tmp_path / "csrc")
    late = (
        ("topk.cu", WAITS_AND_COUNTS, WAITS_AND_COUNTS + LATE),
        ("include/shares.cuh", SAYS_AND_WAITS, LATE + SAYS_AND_WAITS),
    )
    for file, right, slow in late:
        source = (csrc / file).read_text()
        assert source.count(right) == 1
        (csrc / file).write_text(source.replace(right, slow))
    assert objection(TopK(), csrc, **SEVERAL) == ""


@pytest.mark.parametrize(
    # g++ compiles the kernels for each: a quarter of them in `make test`.
    "bug",
    [pytest.param(bug, marks=() if n % 4 == 0 else pytest.mark.slow) for n, bug in enumerate(BUGS)],
    ids=[bug.name for bug in BUGS],
)
def test_a_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    csrc = shutil.copytree(CSRC, tmp_path / "csrc")
    source = (csrc / bug.file).read_text()
    assert source.count(bug.right) == 1
    (csrc / bug.file).write_text(source.replace(bug.right, bug.wrong))
    assert re.search(bug.objection, objection(bug.codec, csrc, **bug.device))
