"""A model of the CUDA kernels' time on GPUs, for GPUs that are not there.

NVRTC compiles csrc/ for each GPU, nvdisasm lists the machine code, and the instructions on the hot path of each kernel
are counted, an element. Two limits follow, and the larger one is the time:

  compute  a quarter of a multiprocessor issues one warp instruction a cycle, and each of its units is busy with one for
           the cycles below: 16 lanes take two, 32 take one. Nothing waits for anything else.
  memory   bytes an element that must move, at 90 or 92 % of the bandwidth on the data sheet; caches hold nothing.

Times are as multiples of torch.add(a, b, out=) on float32, which moves 12 bytes an element. TopK is the sum of its
launches, and of a time assumed for each of them. The model leaves out latency, bank conflicts, other launches, what is
on the path of tails and unaligned tensors, and how well ptxas overlaps units: it says what a kernel cannot be faster
than, and which limit to work on; docs/gpu.md says how far an H100 was from it. Needs nvdisasm (pip install
nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...compress.backends.cuda.runtime import compiler
from ..common import report
from .sass import Blocks, Loop, blocks_of, hot_path, kernel_lines, loops_of

THREADS = 256
RANKS = 8


@dataclass(frozen=True)
class Gpu:
    """One GPU, from its data sheet.

    Attributes:
        clock: Hz under load. bandwidth: bytes/s, and the share of it that a copy reaches.
        alu, imad, fp32: cycles that a quarter's unit is busy with one warp instruction.
        threads, shared: of a multiprocessor.
    """

    name: str
    architecture: int
    multiprocessors: int
    clock: float
    bandwidth: float
    share: float = 0.92
    alu: int = 2
    imad: int = 2
    fp32: int = 1
    threads: int = 2048
    shared: int = 228 * 1024

    def picoseconds(self, cycles: float) -> float:
        """Of all lanes together, an element."""
        return cycles / (self.multiprocessors * 4 * 32 * self.clock) * 1e12

    def transfer(self, size: float) -> float:
        """Picoseconds for so many bytes."""
        return size / (self.bandwidth * self.share) * 1e12


GPUS = (
    Gpu("A100", 80, 108, 1.41e9, 1.555e12, fp32=2, shared=164 * 1024),
    Gpu("H100", 90, 132, 1.98e9, 3.35e12, share=0.88),  # as one was measured: docs/gpu.md
    Gpu("B200", 100, 148, 1.85e9, 8.0e12, share=0.9),
    Gpu("RTX 4090", 89, 128, 2.52e9, 1.008e12, threads=1536, shared=100 * 1024),
    Gpu("RTX 5090", 120, 170, 2.41e9, 1.792e12, alu=1, imad=1, threads=1536, shared=100 * 1024),
)
#: Cycles that a quarter of a multiprocessor waits for 16 or 32 lanes of what it shares with the others.
XU, SHUFFLE = 8, 4
ADD_BYTES = 12


@dataclass(frozen=True)
class Kernel:
    """Counts of one kernel.

    Attributes:
        elements: that a thread takes in one turn of the outer loop.
        bytes: that must move, an element; for decoding, of `RANKS` wires.
        at_once: elements of which a thread adds up the ranks at once; 0 for encoding.
        wanted: points for the instructions of the hot path.
        loop: patterns for opcodes: what is counted is the longest of the innermost loops that have one of each, and not
            the outermost loop.
    """

    file: str
    name: str
    elements: int
    bytes: float
    at_once: int = 0
    wanted: tuple[tuple[str, float], ...] = ()
    loop: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return self.name.removesuffix("_f32").replace("_", " ") + (f", mean of {RANKS}" if self.at_once else "")


#: 16 bytes at a time is the aligned path; Philox, where there are draws, multiplies; not the slow division.
WIDE = ((r"LDG\.E(?:\.\w+)*\.128", 100.0), (r"STG\.E(?:\.\w+)*\.128", 100.0), (r"IMAD\.HI|IMAD\.WIDE", 0.5))
#: Of as many ranks as are read at once: who has fewer leaves earlier.
WRITES = ((r"STG\.E(?:\.\w+)*\.128", 100.0), (r"LDG\.E(?:\.\w+)*\.128", -100.0), (r"FADD", 1.0))
#: Of TopK of 1 %: candidates an element.
CANDIDATES = 0.013
COLLECT = Kernel("topk.cu", "topk_collect_f32", 8, 12 + 8 / 2048 + CANDIDATES * 8, wanted=WIDE)
KERNELS = (
    Kernel("onebit.cu", "onebit_encode_f32", 32, 12 + 136 / 1024, wanted=(*WIDE, (r"FADD", 1.0))),
    Kernel("qsgd.cu", "qsgd_encode_f32", 16, 12 + 260 / 512, wanted=WIDE),
    Kernel("ternary.cu", "terngrad_encode_f32", 40, 12 + 260 / 1280, wanted=WIDE),
    COLLECT,
    Kernel("onebit.cu", "onebit_decode_f32", 32, 4 + RANKS * 136 / 1024, at_once=32, wanted=WRITES),
    Kernel("qsgd.cu", "qsgd_decode_f32", 16, 4 + RANKS * 260 / 512, at_once=16, wanted=WRITES),
    Kernel("ternary.cu", "ternary_decode_f32", 40, 4 + RANKS * 260 / 1280, at_once=40, wanted=WRITES),
)


@dataclass(frozen=True)
class Stage:
    """A part of an encode: a kernel, or one of its loops.

    Attributes:
        kernel: its `elements` and `bytes` are of the items that it takes.
        items: of those, for each element of the gradient.
        launches, waits: that come before it; a wait is for all blocks of the same launch.
    """

    kernel: Kernel
    items: float
    launches: int = 0
    waits: int = 0


#: TopK of 1 %, indices packed, values as float32, with feedback, once the threshold is known. Of 1.3 candidates one is
#: selected: its value and index are written, and 32 bytes of the residual, the least that memory moves. To pack indices
#: a word searches for its entries, and each entry is looked at about four times.
TOPK = (
    Stage(COLLECT, 1, launches=1),
    Stage(Kernel("topk.cu", "topk_digits_f32", 4, 4, loop=("ATOMS",), wanted=(("ATOMS", 10.0),)), 3 * CANDIDATES, 1, 3),
    Stage(Kernel("topk.cu", "topk_write_f32", 4, 4, loop=("LDS", "LDG"), wanted=(("LDS", 10.0),)), CANDIDATES, 1, 1),
    Stage(Kernel("topk.cu", "topk_write_f32", 1, 39, loop=("LDS", "VOTE"), wanted=(("STG|LDS", 10.0),)), CANDIDATES),
    Stage(Kernel("entries.cu", "entries_pack_indices", 1, 1.3, loop=("LDG",)), 0.038, 1),
)
#: Seconds from the end of one launch to the next one's first loads, as in a graph, assumed; and for a wait, as long as
#: an H100 took, of which 3e-6 had been assumed.
LAUNCH, WAIT = 3e-6, 8e-6
#: Elements: of a benchmark, and of a bucket of 25 MB.
NUMELS = 100_000_000, 6_553_600


def nvdisasm() -> str:
    """The program.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [path for folder in folders for path in Path(folder).glob("*/bin/nvdisasm") if os.access(path, os.X_OK)]
    program = str(max(found)) if found else shutil.which("nvdisasm")
    if program is None:
        raise ValueError("the model reads machine code with nvdisasm: pip install nvidia-cuda-nvdisasm")
    return program


def listing(cubin: bytes) -> str:
    """The listing of machine code by nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"nvdisasm cannot read what NVRTC wrote, which may be newer: {done.stderr.strip()}")
    return done.stdout


def count(listed: str, kernel: Kernel) -> dict[str, float]:
    """Instructions an element on the hot path, by class (`sass.CLASSES`).

    Args:
        listed: what nvdisasm says of the kernel's file.
    """
    blocks = blocks_of(kernel_lines(listed, kernel.name))
    every = [loop for outer in loops_of(blocks) for loop in (outer, *outer.all())]
    main = _innermost(blocks, every, kernel) if kernel.loop else max(every, key=lambda loop: len(loop.body))
    trips = {loop.header: 0.0 for loop in main.all()}
    if kernel.at_once:
        trips |= _rank_loop(blocks, main, kernel)
    path = hot_path(blocks, main, dict(kernel.wanted), trips)
    return {kind: n / kernel.elements for kind, n in path.counts.items()}


def _innermost(blocks: Blocks, every: Sequence[Loop], kernel: Kernel) -> Loop:
    """The loop that `kernel.loop` means."""

    def length(loop: Loop) -> int:
        return sum(len(blocks[label].body) for label in loop.body)

    def opcodes(loop: Loop) -> set[str]:
        return {one.opcode for label in loop.body for one in blocks[label].body}

    def fits(loop: Loop) -> bool:
        return all(any(re.match(pattern, opcode) for opcode in opcodes(loop)) for pattern in kernel.loop)

    return max((loop for loop in every if not loop.inner and fits(loop)), key=length)


def _rank_loop(blocks: Blocks, main: Loop, kernel: Kernel) -> dict[str, float]:
    """How often the loop over ranks is run, as it is unrolled, and the one around it, if there is one."""

    def additions(loop: Loop) -> int:
        return sum(one.stem.startswith("FADD") for label in loop.body for one in blocks[label].body)

    hot = max((loop for loop in main.all() if not loop.inner), key=additions)
    ranks = additions(hot) / kernel.at_once
    around = [loop for loop in main.all() if hot in loop.inner]
    rows = {loop.header: kernel.elements / kernel.at_once for loop in around}
    return rows | {hot.header: RANKS / ranks if around else RANKS / ranks * kernel.elements / kernel.at_once}


def estimate(gpu: Gpu, kernel: Kernel, counts: Mapping[str, float]) -> dict[str, Any]:
    """The binding limit, and the time of an element."""
    of = {kind: counts.get(kind, 0.0) for kind in ("FP32", "IMAD", "ALU", "XU", "shuffle")}
    fma = of["FP32"] + of["IMAD"] if gpu.fp32 == 1 else gpu.fp32 * (of["FP32"] + of["IMAD"])
    units = {
        "issue": sum(counts.values()),
        "integer": gpu.alu * of["ALU"],
        "multiply-add": max(fma, gpu.imad * of["IMAD"]),
        "conversion": XU * of["XU"],
        "shuffle": SHUFFLE * of["shuffle"],
    }
    unit, cycles = max(units.items(), key=lambda pair: pair[1])
    compute, memory, add = gpu.picoseconds(cycles), gpu.transfer(kernel.bytes), gpu.transfer(ADD_BYTES)
    return {
        "instructions": sum(counts.values()),
        "counts": dict(counts),
        "units": units,
        "binds": unit if compute > memory else "memory",
        "compute": compute / add,
        "memory": memory / add,
        "times_add": max(compute, memory) / add,
    }


def encode(gpu: Gpu, numel: int, stages: Sequence[Stage] = TOPK) -> dict[str, Any]:
    """Time of all launches of an encode."""
    streamed, fixed, instructions, launches, waits = 0.0, 0.0, 0.0, 0, 0
    for stage in stages:
        counts = count(compiled(stage.kernel.file, gpu.architecture)[0], stage.kernel)
        streamed += stage.items * estimate(gpu, stage.kernel, counts)["times_add"]
        instructions += stage.items * sum(counts.values())
        launches, waits = launches + stage.launches, waits + stage.waits
    fixed = (launches * LAUNCH + waits * WAIT) * 1e12 / (numel * gpu.transfer(ADD_BYTES))
    shape = {"gpu": gpu.name, "numel": numel, "launches": launches, "waits": waits, "instructions": instructions}
    return shape | {"streamed": streamed, "fixed": fixed, "times_add": streamed + fixed}


def resources(log: str) -> dict[str, tuple[int, int]]:
    """Registers a thread and bytes of shared memory a block, by kernel, from ptxas' log."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        found[part.partition("'")[0]] = (int(registers[1]) if registers else 0, int(shared[1]) if shared else 0)
    return found


def warps(gpu: Gpu, registers: int, shared: int) -> int:
    """Warps that a multiprocessor holds at once."""
    of_warp = -(-registers * 32 // 256) * 256
    blocks = min(gpu.threads // THREADS, 65536 // (of_warp * THREADS // 32), gpu.shared // (shared + 1024))
    return blocks * THREADS // 32


@functools.cache
def compiled(file: str, architecture: int) -> tuple[str, str]:
    """(listing, log)"""
    made = compiler.compile_file(file, architecture, ("--ptxas-options=--verbose",))
    return listing(made.cubin), made.log


def models(gpus: Sequence[Gpu]) -> Iterator[dict[str, Any]]:
    for gpu in gpus:
        for kernel in KERNELS:
            listed, log = compiled(kernel.file, gpu.architecture)
            registers, shared = resources(log)[kernel.name]
            held = {"registers": registers, "shared": shared, "warps": warps(gpu, registers, shared)}
            found = estimate(gpu, kernel, count(listed, kernel))
            yield {"gpu": gpu.name, "architecture": gpu.architecture, "kernel": kernel.label} | held | found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [gpu.name for gpu in GPUS]
    parser.add_argument("--gpus", nargs="+", choices=names, default=names, metavar="GPU", help=", ".join(names))
    parser.add_argument("--json", metavar="FILE", help="write everything to a JSON file")


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench gpu-model`."""
    result = report.document("gpu-model", {"gpus": options.gpus})
    result["nvrtc"] = compiler.version()
    result["assumed"] = [vars(gpu) for gpu in GPUS if gpu.name in options.gpus]
    result["results"] = list(models([gpu for gpu in GPUS if gpu.name in options.gpus]))
    result["encodes"] = [encode(gpu, numel) for gpu in GPUS if gpu.name in options.gpus for numel in NUMELS]
    options.plot = None
    report.deliver(result, tables(result), options)
    return 0


def tables(result: Mapping[str, Any]) -> Iterator[report.Table]:
    """One for each GPU, and one for TopK, which is several launches."""
    columns = ["kernel", "instructions", "registers", "warps", "compute", "memory", "times add", "binds"]
    for gpu in result["assumed"]:
        rows = [
            [
                one["kernel"],
                f"{one['instructions']:.0f}",
                str(one["registers"]),
                str(one["warps"]),
                *(f"{one[name]:.2f}" for name in ("compute", "memory", "times_add")),
                one["binds"],
            ]
            for one in result["results"]
            if one["gpu"] == gpu["name"]
        ]
        assumed = (
            f"sm_{gpu['architecture']}, {gpu['multiprocessors']} multiprocessors at {gpu['clock'] / 1e9:g} GHz, "
            f"{gpu['bandwidth'] / 1e12:g} TB/s of which {gpu['share']:.0%}; cycles a warp instruction: integer "
            f"{gpu['alu']}, multiply-add {gpu['fp32']} (integer {gpu['imad']}), conversion {XU}, shuffle {SHUFFLE}"
        )
        caption = f"A model, not measured: {assumed}\nNVRTC {result['nvrtc']}; instructions an element, float32"
        yield report.Table(f"{gpu['name']}, as a model: times torch.add of float32", columns, rows, caption)
    rows = [
        [
            one["gpu"],
            f"{one['numel']:,}",
            f"{one['instructions']:.0f}",
            str(one["launches"]),
            *(f"{one[name]:.2f}" for name in ("streamed", "fixed", "times_add")),
        ]
        for one in result["encodes"]
    ]
    columns = ["GPU", "elements", "instructions", "launches", "all elements", "launches and waits", "times add"]
    caption = (
        f"A model, not measured: with feedback, indices packed; {LAUNCH * 1e6:g} µs for each launch and {WAIT * 1e6:g} "
        "for each time that blocks wait for all others are assumed"
    )
    yield report.Table("TopK of 1 %, all launches of an encode, as a model: times torch.add", columns, rows, caption)
