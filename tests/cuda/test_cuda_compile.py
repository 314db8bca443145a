"""Every kernel compiles with NVRTC for every architecture, without a warning, and comes out as it was meant to.

No GPU and no driver are needed. `pytest -s` prints registers, shared memory and stack by kernel and architecture.
"""

from __future__ import annotations

import re
import struct
from collections import Counter

import pytest
from gradwire.compress.backends.cuda.runtime.compiler import CSRC
from nvrtc import ARCHITECTURES, FILES, Resources, build

#: Bytes of shared memory that a block has without asking for more.
SHARED = 48 * 1024
#: The kernels that go over whole gradients, where every byte of traffic counts.
STREAMING = re.compile(
    r"\w+_(encode|decode|collect|mean|change|enter)_(f32|f16|bf16)|low_precision_(to|from)_bf16|tracking_follow"
    r"|power_sgd_(add|leave)"
)
#: Files without such a kernel: what they work on is a hundredth of a gradient.
SMALL_FILES = {"entries.cu", "partition.cu"}

#: Instructions of a kernel, at most: a tenth more than its longest build has today.
BUDGETS = {
    "onebit.cu": {"onebit_encode_f32": 3300, "onebit_decode_f32": 4000},
    "qsgd.cu": {"qsgd_encode_f32": 4100, "qsgd_decode_f32": 5500},
    "ternary.cu": {"terngrad_encode_f32": 4900, "ternary_decode_f32": 5900},
    "eden.cu": {
        "eden_encode_f32": 8700,
        "eden_decode_f32": 3900,
        "eden_bits_encode_f32": 13300,
        "eden_bits_decode_f32": 5700,
    },
    "topk.cu": {"topk_collect_f32": 1200, "topk_digits_f32": 1830, "topk_write_f32": 2250},
    "chunked_topk.cu": {"chunked_topk_encode_f32": 9200, "chunked_topk_decode_f32": 3000},
    "entries.cu": {"entries_pack_indices": 330, "entries_unpack_indices": 1250},
    "topk_decode.cu": {"topk_mean_f32": 860},
}

every_file = pytest.mark.parametrize("file", FILES)
#: `make test-all` takes the others too, as CI does every night.
QUICK = (90,)
every_architecture = pytest.mark.parametrize(
    "architecture", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ARCHITECTURES]
)


def resources(log: str) -> dict[str, Resources]:
    """By kernel, from ptxas' verbose log."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        stack, stores, loads = map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", part)[:3])
        registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        assert registers is not None, part
        name = part.partition("'")[0]
        found[name] = Resources(int(registers[1]), int(shared[1]) if shared else 0, stack, stores + loads)
    return found


def entries(ptx: str) -> dict[str, str]:
    """The text of each kernel in a file's PTX, by name."""
    return {part.partition("(")[0].strip(): part for part in ptx.split(".entry ")[1:]}


@every_architecture
@every_file
def test_compiles_without_warnings_or_spills(file: str, architecture: int) -> None:
    compiled = build(file, architecture)
    complaints = [line for line in compiled.log.splitlines() if re.search(r"warning|error", line, re.IGNORECASE)]
    assert not complaints, "\n".join(complaints)
    found = resources(compiled.log)
    assert found.keys() == entries(compiled.ptx).keys()
    assert found, "no kernel in this file"
    print(f"\n{file}, sm_{architecture}")
    for name, used in found.items():
        print(f"  {name:24} {used.registers:4} registers {used.shared:6} B shared {used.stack:4} B stack")
        assert used.spilled == 0, f"{name}: {used.spilled} bytes of spills"
        assert used.stack == 0 or architecture < 90, f"{name}: {used.stack} bytes of stack"
        assert used.shared <= SHARED, f"{name}: {used.shared} bytes of shared memory"


def instructions(cubin: bytes) -> dict[str, int]:
    """How many each kernel has: 16 bytes each in its section of the ELF file."""
    start, each, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    heads = [struct.unpack_from("<I20xQQ", cubin, start + n * each) for n in range(count)]
    text = cubin[heads[names][1] :]
    named = {text[name : text.index(b"\0", name)].decode(): size // 16 for name, _, size in heads}
    return {name.removeprefix(".text."): size for name, size in named.items() if name.startswith(".text.")}


@every_architecture
@pytest.mark.parametrize("file", BUDGETS)
def test_kernels_do_not_become_longer(file: str, architecture: int) -> None:
    found = instructions(build(file, architecture).cubin)
    for name, budget in BUDGETS[file].items():
        assert budget / 2.5 < found[name] <= budget, f"{name}: {found[name]} instructions on sm_{architecture}"


@every_file
def test_arithmetic_is_canonical(file: str) -> None:
    """No multiplication and addition in one rounding, no subnormal flushed, nothing approximate."""
    loose = re.compile(r"\b(?:fma\.[\w.]*f32|[\w.]+\.ftz\b[\w.]*|[\w.]+\.approx\b[\w.]*)")
    for name, text in entries(build(file, 90).ptx).items():
        assert sorted(set(loose.findall(text))) == [], name


def moved(text: str, direction: str) -> Counter[int]:
    """How many accesses to global memory a kernel has, by bytes."""
    found = re.findall(rf"\b{direction}\.global(?:\.\w+)*?(?:\.v(\d))?\.[fubs](\d+)\b", text)
    return Counter(int(count or 1) * int(bits) // 8 for count, bits in found)


@every_architecture
@every_file
def test_gradients_move_16_bytes_at_a_time(file: str, architecture: int) -> None:
    """But at the end of a gradient, element by element, for which there is code besides."""
    compiled = entries(build(file, architecture).ptx)
    every = {} if file in SMALL_FILES else compiled
    streaming = {name: text for name, text in every.items() if STREAMING.fullmatch(name)}
    assert streaming or file in SMALL_FILES, "no kernel that goes over a gradient"
    for name, text in streaming.items():
        for direction in ("st",) if "_mean_" in name else ("ld", "st"):  # a mean of lists of entries reads no gradient
            assert moved(text, direction)[16], f"{name}: no {direction}.global.v4"
        if "_decode_" in name or "_mean_" in name:
            stores = moved(text, "st")
            wide = 16 * stores.pop(16)
            narrow = sum(size * count for size, count in stores.items())
            assert narrow == wide, f"{name}: {stores} beside {wide} bytes"


@every_file
def test_no_host_header_is_needed(file: str) -> None:
    included = re.findall(r"^\s*#\s*include\s*(\S+)", (CSRC / file).read_text("utf-8"), re.MULTILINE)
    own = {f'"{path.name}"' for path in (CSRC / "include").glob("*.cuh")}
    assert set(included) <= own, "NVRTC would look for it in a CUDA toolkit, which users need not have"


#: What orders memory, in PTX.
ORDERING = re.compile(r"bar\.sync|membar\.gl|fence\.\S+|(?:atom|red)\.global|ld\.volatile\.global")


def ordering(ptx: str) -> dict[str, set[tuple[str, ...]]]:
    """By kernel, each fence with what comes right before and after it."""
    found = {}
    for name, text in entries(ptx).items():
        steps = [re.sub(r"^fence.*", "membar.gl", step) for step in ORDERING.findall(text)]
        steps = [step.replace("red.", "atom.") for step in steps]  # an atomic whose result nobody reads
        found[name] = {tuple(steps[i - 1 : i + 2]) for i, step in enumerate(steps) if step == "membar.gl"}
    return found


@pytest.mark.parametrize("architecture", [90, pytest.param(75, marks=pytest.mark.slow)])
def test_fences_release_behind_the_barrier_and_acquire_before_it(architecture: int) -> None:
    """The emulator's memory is sequentially consistent and misses a fence in the wrong place."""
    release, acquire = ("bar.sync", "membar.gl", "atom.global"), ("ld.volatile.global", "membar.gl", "bar.sync")
    texts = {path.name: path.read_text("utf-8") for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh")}
    assert [name for name, text in texts.items() if "__threadfence" in text] == ["shares.cuh"]
    for file in (name for name, text in texts.items() if '"shares.cuh"' in text):
        for name, fences in ordering(build(file, architecture).ptx).items():
            assert fences == ({release, acquire} if "digits" in name else set()), name
