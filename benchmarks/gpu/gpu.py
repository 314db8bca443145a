"""What the CUDA kernels do on this GPU: bytes, speed, a DDP step over NCCL, tests and compute-sanitizer, in one report.

Each row of the report is a process of its own, so that one that crashes, hangs or poisons its CUDA context costs that
row and nothing else; OUTPUT.json is written after each. The exit status is 1 where a row has failed.

    make gpu-report GPU_ARGS="--sections compile bytes kernels step"    # in two calls of ten minutes
    make gpu-report GPU_ARGS="--sections tests sanitizer --join benchmarks/results/nvidia-h200.json"
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..common import report
from . import page, paths, rows, speed
from .processes import Ended, Processes

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("compile", "bytes", "kernels", "step", "tests", "sanitizer")
#: They have the GPU, and the host, to themselves.
TIMED = ("kernels", "step")
#: Most seconds that a row may take.
LIMITS = {"probe": 120, "compile": 120, "bytes": 180, "kernels": 120, "step": 120, "tests": 400, "sanitizer": 240}
TOOLS = ("memcheck", "racecheck", "synccheck")
#: Where compute-sanitizer may lie: toolkits, Debian's package, conda's, NVIDIA's own folders.
SANITIZERS = (
    "$CUDA_HOME/bin/compute-sanitizer",
    "$CUDA_PATH/bin/compute-sanitizer",
    "$CONDA_PREFIX/bin/compute-sanitizer",
    "/usr/local/cuda*/bin/compute-sanitizer",
    "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    "/usr/local/nvidia/bin/compute-sanitizer",
    "/opt/cuda*/bin/compute-sanitizer",
    "/opt/nvidia/**/compute-sanitizer",
    "/usr/lib/nvidia-cuda-toolkit/compute-sanitizer/compute-sanitizer",
)
#: compute-sanitizer's status where it has found something.
FOUND = 9
#: Networks that resolve no hostname have a loopback interface; memory that torch keeps hides accesses out of bounds.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--numel", type=int, default=100_000_000, help="elements of the gradient (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="wires that decode_mean reads (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=40, help="timings of each operation (default: %(default)s)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose names contain this")
    parser.add_argument("--seconds", type=float, default=570, help="start no row after these (default: %(default)s)")
    jobs = max(1, min(6, (os.cpu_count() or 1) // 2))
    parser.add_argument(
        "--jobs", type=int, default=jobs, help="rows at once where none is timed (default: %(default)s)"
    )
    parser.add_argument("--join", nargs="+", default=[], metavar="JSON", help="reports of earlier calls to go on from")
    parser.add_argument("--output", help="write OUTPUT.json and OUTPUT.md (default: benchmarks/results/<gpu>)")
    parser.add_argument("--revision", help="what to call these sources (default: the commit, where git knows it)")
    parser.add_argument("--device", default="cuda", help="which GPU (default: %(default)s)")
    parser.add_argument("--width", type=int, default=4096, help=argparse.SUPPRESS)  # of the model whose steps are timed
    parser.add_argument("--steps", type=int, default=30, help=argparse.SUPPRESS)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)  # what the processes are called with
    parser.add_argument("--into", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench gpu`."""
    if options.row:
        report.write_json(options.into, rows.row(options))
        return 0
    if not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here: run this on a machine with an NVIDIA GPU")
    made = Report(options)
    made.probe()
    made.join(options.join)
    with made.processes:
        for section in options.sections:
            made.section(section)
    made.write()
    print(page.markdown(made.document))
    print(f"Wrote {made.output}.json and {made.output}.md.")
    return 0 if passed(made.document["rows"]) else 1


def passed(rows_: list[dict[str, Any]]) -> bool:
    """Whether nothing that ran has failed, and something did run."""
    return all(row["status"] in ("ok", "skipped") for row in rows_) and any(row["status"] == "ok" for row in rows_)


@dataclass(frozen=True)
class Task:
    """A row that a process makes: `program` goes before Python (compute-sanitizer), `why_not` says what is missing."""

    section: str
    name: str
    work: str = ""
    program: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""


class Report:
    """The rows so far; written after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.processes = Processes()
        names = ("numel", "ranks", "repeats", "width", "steps", "sections")
        self.document = report.document("gpu", {name: getattr(options, name) for name in names})
        self.document["rows"] = []
        self.output = options.output or ""
        self.writing = threading.Lock()

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.document["environment"]
        return facts

    def probe(self) -> None:
        """Find the GPU, and what is broken here.

        Raises:
            ValueError: Python cannot even ask.
        """
        row = self.made(Task("probe", "environment", "probe"))
        if row["status"] != "ok":
            raise ValueError(f"torch cannot use the GPU that it finds: {row['reason']}")
        self.document["environment"] = row["result"]
        self.facts["revision"] = self.options.revision or self.facts["revision"]
        gpu = re.sub(r"[^a-z0-9]+", "-", self.facts["gpu"].lower()).strip("-")
        self.output = self.output or str(ROOT / "benchmarks" / "results" / gpu)
        for what, error in self.facts["broken"].items():
            print(f"{what} does not work here: {error}", flush=True)

    def join(self, files: list[str]) -> None:
        """Go on from the rows of earlier calls, but for the sections that this one makes."""
        for file in files:
            earlier = json.loads(Path(file).read_text())
            for name in ("gpu", "sources"):
                theirs, ours = earlier["environment"].get(name), self.facts[name]
                if theirs != ours:
                    raise ValueError(f"{file} is of another {name}, {theirs}, not {ours}: join reports of the same")
            self.document["rows"] += [row for row in earlier["rows"] if row["section"] not in self.options.sections]

    def section(self, name: str) -> None:
        tasks = [task for task in self.tasks(name) if re.search(self.options.only, task.name)]
        with ThreadPoolExecutor(1 if name in TIMED else self.options.jobs) as pool:
            try:
                for _ in pool.map(self.finish, tasks):
                    pass
            except BaseException:
                self.processes.close()  # or the pool would wait for them
                raise

    def finish(self, task: Task) -> None:
        row = self.made(task)
        with self.writing:
            self.document["rows"].append(row)
            print(
                f"{row['section']} {row['name']}: {row['status']} ({row['seconds']:.0f} s) {row['reason']}", flush=True
            )
            self.write()

    def write(self) -> None:
        Path(self.output).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{self.output}.json").write_text(page.by_rows(self.document))
        Path(f"{self.output}.md").write_text(page.markdown(self.document))

    def tasks(self, section: str) -> Iterator[Task]:
        launching = self.facts["broken"].get("launching", "")
        why_not = launching and f"kernels cannot be launched here: {launching}"
        families = [*paths.FAMILIES, paths.ENTRIES]
        match section:
            case "compile":
                for source in sorted((ROOT / "csrc").glob("*.cu")):
                    yield Task(section, source.name, section)
            case "bytes":
                yield from (Task(section, name, section, why_not=why_not) for name in paths.FAMILIES)
            case "kernels":
                for codec in speed.CODECS:
                    yield Task(section, speed.label(codec), section, why_not=why_not)
            case "step":
                for name in speed.arms():
                    yield Task(section, name, section, why_not="" if name == "ddp" else why_not)
            case "tests":
                yield from self.test_files(why_not)
            case "sanitizer":
                tool = compute_sanitizer()
                looked = f"compute-sanitizer is not on PATH, nor at {' or '.join(SANITIZERS)}"
                why_not = why_not or ("" if tool else looked)
                for check in TOOLS:
                    for family in families:
                        if family in paths.IN_TORCH:
                            continue
                        program = (tool, *sanitizing(check))
                        yield Task(section, f"{check} {family}", "paths", program, (), UNCACHED, why_not)

    def test_files(self, why_not: str) -> Iterator[Task]:
        """The files with tests that are marked `cuda` where there is a GPU."""
        broken = self.facts["broken"]
        for module in ("pytest", "hypothesis"):
            if module in broken:
                why_not = why_not or f"the tests need {module}: {broken[module]}"
        pytest = (sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider")
        for file in sorted((ROOT / "tests").glob("test_*.py")):
            text = file.read_text("utf-8")
            if re.search(r"\bmark\.cuda\b", text):  # ranks, half of them on the CPU
                missing = broken.get("numba", "")
                because = why_not or (missing and f"these tests compare with kernels for CPUs, of numba: {missing}")
            elif re.search(r"\b(ALL|OTHER)_BACKENDS\b", text):
                because = why_not
            else:
                continue
            command = (*pytest, str(file.relative_to(ROOT)))
            yield Task("tests", file.stem.removeprefix("test_"), command=command, why_not=because)

    def made(self, task: Task) -> dict[str, Any]:
        """A task's row, whatever becomes of it."""
        row: dict[str, Any] = {"gpu": self.facts.get("gpu", ""), "section": task.section, "name": task.name}
        row |= {"status": "skipped", "reason": task.why_not, "seconds": 0.0, "result": None}
        left = self.end - time.monotonic()
        if not task.why_not and left <= 0:
            row["reason"] = f"the {self.options.seconds:.0f} seconds of --seconds were used up"
        if row["reason"]:
            return row
        limit = min(LIMITS[task.section], max(left, 1.0))
        with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
            into = Path(folder, "row.json")
            command = task.command or (*task.program, *self.python(task, into))
            ended = self.processes.run(command, ROOT, {**ENVIRONMENT, **os.environ, **task.environment}, limit)
            result = json.loads(into.read_text()) if into.exists() else None
        row |= {"seconds": round(ended.seconds, 2), "result": result}
        return row | outcome(task, ended, result)

    def python(self, task: Task, into: Path) -> tuple[str, ...]:
        given = [("--" + name, str(getattr(self.options, name))) for name in ("numel", "ranks", "repeats")]
        given += [("--" + name, str(getattr(self.options, name))) for name in ("device", "width", "steps")]
        words = [word for pair in given for word in pair]
        name = task.name.split(" ", 1)[1] if task.section == "sanitizer" else task.name
        ours = (sys.executable, "-m", "gradwire.benchmarks.cli", "gpu")
        return (*ours, "--row", task.work, name, "--into", str(into), *words)


def outcome(task: Task, ended: Ended, result: Any) -> dict[str, Any]:
    """Status and reason, and where it has failed the end of what it printed."""
    lines = ended.output.strip().splitlines()
    last = lines[-1].strip() if lines else "it printed nothing"
    if ended.status is None:
        status, reason = "failed", f"not finished after {ended.seconds:.0f} s"
    elif task.section == "tests":
        # 5: none was collected, or none selected.
        status = {0: "ok", 5: "skipped"}.get(ended.status, "failed")
        reason = last.strip("= ")
    elif task.section == "sanitizer":
        summary = [line.strip("= ") for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
        status = "ok" if ended.status == 0 and result else "failed"
        reason = summary[-1] if summary else last if status == "failed" else ""
    else:
        status = "ok" if ended.status == 0 and result else "failed"
        reason = "" if status == "ok" else f"{last} (exit status {ended.status})"
    row: dict[str, Any] = {"status": status, "reason": reason}
    if status == "failed":
        row["output"] = lines[-60:]
    return row


def compute_sanitizer() -> str:
    """Where it is, the newest of several; "" where it is not found."""
    found = shutil.which("compute-sanitizer")
    for place in () if found else SANITIZERS:
        for path in sorted(glob.glob(os.path.expandvars(place), recursive=True), reverse=True):
            found = found or shutil.which(path)
    return found or ""


def sanitizing(check: str) -> tuple[str, ...]:
    """Its options: what it finds decides the status, and calls that fail on purpose, as torch's do, are no finding."""
    quiet = ("--report-api-errors", "no") if check == "memcheck" else ()
    return ("--tool", check, *quiet, "--error-exitcode", str(FOUND))
