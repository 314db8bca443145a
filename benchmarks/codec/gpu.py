"""What the CUDA kernels do on this GPU: tests, sanitizer, speed, and a DDP step over NCCL, in one report.

Every timing is of CUDA events, in turns with the roofline, `torch.add(grad, residual, out=residual)`, on the same
stream. Bytes are what an operation cannot avoid to move; the share is of what a copy on the device reaches. Beside each
codec runs what a user would otherwise write: plain torch operations, and for 1-bit what DeepSpeed's optimizers do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress import QSGD, Cast, ChunkedTopK, Codec, OneBit, Outliers, Ternary, TernGrad, TopK, new_draw
from ...compress.backends import entries_for
from ...compress.backends.cuda.sparse import Union, gather_at, scatter_to
from ...compress.entries import VALUE_DTYPES, index_layout, value_bytes
from ..common import report
from ..common.arms import ARMS, DENSE, Arm, label
from .baselines import torch_chain

ROOT = Path(__file__).resolve().parents[2]
CODECS: tuple[Codec, ...] = (
    OneBit(),
    QSGD(bits=4),
    TernGrad(),
    Ternary(),
    TopK(0.01),
    TopK(0.001),
    ChunkedTopK(),
    Outliers(OneBit()),
    Cast(torch.float16),
)
#: A bucket of DDP's default size, in float32 elements: what the host's time is measured on.
BUCKET = 25 * 1024 * 1024 // 4
SECTIONS = ("tests", "sanitizer", "kernels", "step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--numel", type=int, default=100_000_000, help="elements of the gradient (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="wires that decode_mean reads (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=40, help="timings of each operation (default: %(default)s)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--output", help="write OUTPUT.json and OUTPUT.md (default: benchmarks/results/<gpu>)")
    parser.add_argument("--once", action="store_true", help="run every kernel once and stop: for compute-sanitizer")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # "cpu" rehearses without a GPU


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench gpu`."""
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here: run this on a machine with an NVIDIA GPU")
    if options.once:
        once(device)
        once_sparse(device)
        return 0
    result = report.document(
        "gpu", {name: getattr(options, name) for name in ("numel", "ranks", "repeats", "sections")}
    )
    result["environment"] |= gpu_environment(device)
    work: dict[str, Callable[[], Any]] = {
        "tests": tests,
        "sanitizer": sanitizer,
        "kernels": lambda: kernels(device, options.numel, options.ranks, options.repeats),
        "step": lambda: step(device, width=4096 if device.type == "cuda" else 64),
    }
    for name in options.sections:
        print(f"{name} …", flush=True)
        start = time.monotonic()
        result[name] = work[name]()
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    gpu = re.sub(r"[^a-z0-9]+", "-", result["environment"]["gpu"].lower()).strip("-")
    output = options.output or str(ROOT / "benchmarks" / "results" / gpu)
    text = markdown(result)
    print(text)
    report.write_json(f"{output}.json", result)
    Path(f"{output}.md").write_text(text)
    print(f"Wrote {output}.json and {output}.md.")
    return 0 if passed(result) else 1


def passed(result: Mapping[str, Any]) -> bool:
    """Whether nothing that ran has failed."""
    runs = [result["tests"]] if "tests" in result else []
    runs += [tool for tool in result.get("sanitizer", {}).values() if tool["status"] is not None]
    return all(run["status"] == 0 for run in runs)


def gpu_environment(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"gpu": "none", "driver": None, "cuda": torch.version.cuda}
    facts["cupy"] = next((v for v in map(report.version, ("cupy-cuda13x", "cupy-cuda12x", "cupy")) if v), None)
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            facts["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return facts


# Tests and sanitizer.


def tests() -> dict[str, Any]:
    """`pytest -m cuda`."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests"]
    return finished(command, seconds=240)


def sanitizer() -> dict[str, dict[str, Any]]:
    """compute-sanitizer's memcheck and racecheck over one pass of every kernel."""
    places = [os.environ.get(name, "") + "/bin" for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda/bin"]
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if tool is None:
        return {"compute-sanitizer": {"status": None, "summary": "not installed", "output": ""}}
    once_only = [sys.executable, "-m", "gradwire.benchmarks.cli", "gpu", "--once"]
    return {
        check: finished([tool, "--tool", check, "--error-exitcode", "9", *once_only], seconds=150)
        for check in ("memcheck", "racecheck")
    }


def finished(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """How a command ended: its status, its last line, and the end of what it printed."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"status": 124, "summary": f"not finished after {seconds:.0f} s", "output": ""}
    lines = (done.stdout + done.stderr).strip().splitlines()
    return {"status": done.returncode, "summary": lines[-1] if lines else "", "output": "\n".join(lines[-40:])}


def once(device: torch.device, numel: int = 300_001) -> None:
    """Every kernel, aligned and not, in every format."""
    for codec in CODECS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for shift in (0, 1):
                x = torch.randn(numel + shift, device=device).to(dtype)[shift:]
                residual = torch.zeros(numel + shift, device=device)[shift:]
                wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
                workspace, draw = codec.workspace(numel, device), new_draw(1, device=device)
                for _ in range(2):  # top-k with a prediction, and without
                    codec.encode_feedback(x, residual, wire, draw, workspace)
                codec.encode(x, wire, draw, workspace)
                codec.decode_add(wire, residual, 1.0, workspace)
                codec.decode_mean([part.repeat(3, 1) for part in wire.split(codec.part_bytes(numel))], x, workspace)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once_sparse(device: torch.device, numel: int = 300_001) -> None:
    """The kernels of sparse exchanges."""
    union = Union(numel, numel, device)
    union([torch.arange(first, numel, 7, dtype=torch.int32, device=device) for first in (0, 3)])
    values, out = torch.empty(numel, device=device), torch.zeros(numel, device=device)
    gather_at(torch.randn(numel, device=device), union.indices, union.size, values)
    scatter_to(out, union.indices, union.size, values)
    entries = entries_for(device)
    packed = torch.zeros(index_layout(numel, numel).nbytes, dtype=torch.uint8, device=device)
    entries.pack_indices(union.indices, union.size, 0, numel, packed)
    entries.unpack_indices(packed[None], 0, numel, union.size, union.indices[None])
    for dtype in VALUE_DTYPES:
        wire = torch.zeros(value_bytes(numel, dtype), dtype=torch.uint8, device=device)
        entries.pack_values(values, dtype, wire, union.indices, union.size, out)
        entries.unpack_values(wire[None], dtype, values[None])
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Kernels.


def timed(device: torch.device, operation: Callable[[], object]) -> Callable[[], float]:
    """Starts an operation now; the result gives its seconds once it has ended. Events on a GPU, wall time elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        operation()
        spent = time.perf_counter() - start
        return lambda: spent
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    operation()
    end.record()

    def seconds() -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return seconds


@torch.no_grad()
def kernels(device: torch.device, numel: int, ranks: int, repeats: int) -> list[dict[str, Any]]:
    """Every codec's operations beside the roofline, on float32."""
    generator = torch.Generator(device).manual_seed(0)
    gradients = [torch.randn(numel, generator=generator, device=device) for _ in range(2)]
    return [measure(codec, gradients, ranks, repeats) for codec in CODECS]


def measure(codec: Codec, gradients: Sequence[Tensor], ranks: int, repeats: int) -> dict[str, Any]:
    device, numel = gradients[0].device, gradients[0].numel()
    feedback = codec.with_feedback()
    workspace, plain, draw = (
        feedback.workspace(numel, device),
        codec.workspace(numel, device),
        new_draw(0, device=device),
    )
    residual, out = torch.zeros(numel, device=device), torch.empty(numel, device=device)
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=device)
    codec.encode(gradients[0], wire, draw, plain)
    rows = [part.repeat(ranks, 1) for part in wire.split(codec.part_bytes(numel))]
    accumulated = torch.zeros(numel, device=device)
    operations: dict[str, Callable[[Tensor], object]] = {
        "add": lambda grad: torch.add(grad, accumulated, out=accumulated),
        "copy": out.copy_,
        "encode_feedback": lambda grad: feedback.encode_feedback(grad, residual, wire, draw, workspace),
        "encode": lambda grad: codec.encode(grad, wire, draw, plain),
        "decode_mean": lambda grad: codec.decode_mean(rows, out, plain),
    }
    chains = {"torch": torch_chain(codec, residual.clone()), "deepspeed": deepspeed_chain(codec, residual)}
    operations |= {name: chain for name, chain in chains.items() if chain is not None}
    # The least that each must read and write.
    wire_bytes = len(wire) / numel
    moved = {"add": 12.0, "copy": 8.0, "encode_feedback": 12 + wire_bytes, "encode": 4 + wire_bytes}
    moved["decode_mean"] = 4 + ranks * wire_bytes
    times: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(repeats + 20):  # top-k's residual settles meanwhile
        grad = gradients[turn % 2]
        pending = {name: timed(device, partial(operation, grad)) for name, operation in operations.items()}
        accumulated.zero_()
        if turn >= 20:
            for name, seconds in pending.items():
                times[name].append(seconds())
    medians = {name: report.median(values) for name, values in times.items()}
    copied = 8 / medians["copy"]
    return {
        "codec": repr(codec),
        "label": label(codec),
        "wire_bytes_per_element": wire_bytes,
        "median_s": medians,
        "quartiles_s": {name: report.quartiles(values) for name, values in times.items()},
        "ratio_to_add": {name: median / medians["add"] for name, median in medians.items()},
        "bytes_per_element": moved,
        "share_of_copy": {name: moved[name] / medians[name] / copied for name in moved},
        "copy_bytes_per_s": copied * numel,
        "host_s": host_time(feedback, device),
    }


def host_time(codec: Codec, device: torch.device, calls: int = 200) -> float:
    """Seconds that one encode of a 25 MB bucket keeps the host."""
    grad, residual = torch.randn(BUCKET, device=device), torch.zeros(BUCKET, device=device)
    wire = torch.empty(codec.wire_bytes(BUCKET), dtype=torch.uint8, device=device)
    workspace, draw = codec.workspace(BUCKET, device), new_draw(0, device=device)
    if device.type != "cuda":
        calls = 3
    spent = []
    for _ in range(calls):
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an empty queue: a full one would keep the host too
        start = time.perf_counter()
        codec.encode_feedback(grad, residual, wire, draw, workspace)
        spent.append(time.perf_counter() - start)
    return report.median(spent)


def deepspeed_chain(codec: Codec, like: Tensor) -> Callable[[Tensor], object] | None:
    """1-bit compression in the order of operations of DeepSpeed's 1-bit optimizers: one scale for the whole tensor, and
    signs packed by CuPy."""
    if not isinstance(codec, OneBit) or like.device.type != "cuda":
        return None
    import cupy

    error = torch.zeros_like(like)

    def chain(grad: Tensor) -> tuple[Tensor, Any]:
        compensated = grad + error
        scale = torch.linalg.vector_norm(compensated) / compensated.numel() ** 0.5
        error.set_(compensated - scale * compensated.sign().add_(1).bool().float().add_(-0.5).mul_(2.0))
        return scale, cupy.packbits(cupy.from_dlpack(compensated.sign_().add_(1).bool().to(torch.uint8)))

    return chain


# A DDP step.


def step(device: torch.device, width: int, layers: int = 8, steps: int = 30) -> dict[str, Any]:
    """A step on one rank over NCCL: what compressing costs beside backward, without a network."""
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            store = dist.HashStore()
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
            stack.callback(dist.destroy_process_group)
        arms = {"ddp": ARMS[DENSE]} | {label(codec): Arm(label(codec), codec=codec) for codec in CODECS}
        return {name: step_seconds(arm, device, width, layers, steps) for name, arm in arms.items()}


def step_seconds(arm: Arm, device: torch.device, width: int, layers: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
    installed = arm.install(model, exchange="gather")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(256, width, device=device)

    def one() -> None:
        installed.model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    pending = [timed(device, one) for _ in range(steps)]
    seconds = [spent() for spent in pending][steps // 3 :]
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    installed.close()
    return {"median_s": report.median(seconds), "quartiles_s": report.quartiles(seconds), "finite": finite}


# For people.


def markdown(result: Mapping[str, Any]) -> str:
    facts, arguments = result["environment"], result["arguments"]
    lines = [f"# gradwire on {facts['gpu']}", ""]
    lines += [f"Driver {facts['driver']}, CUDA {facts['cuda']}, torch {facts['torch']}, CuPy {facts['cupy']}, "]
    lines[-1] += f"gradwire {facts['gradwire']} ({facts['revision']}), {facts['date']}. Made by `make gpu-report`."
    if "tests" in result:
        lines += ["", f"- `pytest -m cuda`: {result['tests']['summary']}"]
    for name, tool in result.get("sanitizer", {}).items():
        lines += [f"- {name}: {tool['summary']}"]
    if "kernels" in result:
        first = result["kernels"][0]
        lines += ["", f"## Kernels, {arguments['numel']:,} float32", ""]
        lines += [
            f"A copy moves {first['copy_bytes_per_s'] / 1e12:.2f} TB/s. Times are medians of {arguments['repeats']} as "
        ]
        lines[-1] += "multiples of `torch.add(out=)`, quartiles in brackets, and shares of the copy's bandwidth."
        lines += ["", "| codec | encode with feedback | encode | decode the mean of "]
        lines[-1] += f"{arguments['ranks']} | torch operations | as DeepSpeed | host, µs |"
        lines += ["|" + " --- |" * 7]
        lines += [kernel_row(row) for row in result["kernels"]]
    if "step" in result:
        lines += ["", "## One DDP step, one rank over NCCL: no network, compression alone", ""]
        lines += ["| | ms | finite |", "| --- | --- | --- |"]
        lines += [f"| {n} | {1e3 * row['median_s']:.2f} | {row['finite']} |" for n, row in result["step"].items()]
    return "\n".join(lines) + "\n"


def kernel_row(row: Mapping[str, Any]) -> str:
    def cell(name: str) -> str:
        if name not in row["ratio_to_add"]:
            return ""
        low, high = (value / row["median_s"]["add"] for value in row["quartiles_s"][name])
        share = f", {row['share_of_copy'][name]:.0%}" if name in row["share_of_copy"] else ""
        return f"{row['ratio_to_add'][name]:.2f} [{low:.2f}, {high:.2f}]{share}"

    cells = [cell(name) for name in ("encode_feedback", "encode", "decode_mean", "torch", "deepspeed")]
    return f"| `{row['label']}` | " + " | ".join(cells) + f" | {1e6 * row['host_s']:.0f} |"
