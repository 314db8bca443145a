"""The CUDA kernels on this GPU: bytes, laws over NCCL, speed, tests and compute-sanitizer, in one report.

Each task is a process of its own, so that one that crashes, hangs or poisons its CUDA context costs its rows and
nothing else; OUTPUT.json is written after each. The exit status is 1 where a row has failed.

    make gpu-report GPU_ARGS="--sections first --seconds 280 --output REPORT"    # in two calls of five minutes
    make gpu-report GPU_ARGS="--sections second --seconds 290 --join REPORT.json --output REPORT"
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ...compress.backends import kernel_cache
from ...compress.backends.cuda.runtime import compiler
from ..common import report
from . import page, rows, sections
from .processes import Processes
from .sections import LIMITS, PARTS, ROOT, SECTIONS, Task, outcome

#: Networks that resolve no hostname have a loopback interface.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--numel", type=int, default=100_000_000, help="elements of the gradient (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="wires that decode_mean reads (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=40, help="timings of each operation (default: %(default)s)")
    what = f"default: all; first: {' '.join(PARTS['first'])}; second: {' '.join(PARTS['second'])}"
    parser.add_argument("--sections", nargs="+", choices=(*SECTIONS, *PARTS), default=list(SECTIONS), help=what)
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose names contain this")
    parser.add_argument("--seconds", type=float, default=570, help="end after these (default: %(default)s)")
    jobs = max(1, min(6, (os.cpu_count() or 1) // 2))
    parser.add_argument(
        "--jobs", type=int, default=jobs, help="rows at once where none is timed (default: %(default)s)"
    )
    parser.add_argument("--join", nargs="+", default=[], metavar="JSON", help="reports of earlier calls to go on from")
    parser.add_argument("--output", help="write OUTPUT.json and OUTPUT.md (default: benchmarks/results/<gpu>)")
    parser.add_argument("--revision", help="what to call these sources (default: the commit, where git knows it)")
    parser.add_argument(
        "--cubins", metavar="FOLDER", help="kernels that --precompile has compiled, used where they fit"
    )
    parser.add_argument(
        "--precompile", type=int, metavar="ARCHITECTURE",
        help="compile for it, 90 for example, into --cubins, and end: needs NVRTC and no GPU",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda", help="which GPU (default: %(default)s)")
    parser.add_argument("--model", default="gpt2", help=argparse.SUPPRESS)  # whose steps are timed
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)  # what the processes are called with
    parser.add_argument("--into", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """`gradwire-bench gpu`."""
    if options.row:
        report.write_json(options.into, rows.row(options))
        return 0
    if options.precompile is not None:
        return precompile(options)
    if not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here: run this on a machine with an NVIDIA GPU")
    if options.cubins:
        print(f"{use_cubins(Path(options.cubins))} kernel files of {options.cubins} are in the cache.", flush=True)
    options.sections = sections.expanded(options.sections)
    made = Report(options)
    made.probe()
    made.join(options.join)
    with made.processes:
        made.make()
    made.write()
    print(page.markdown(made.document))
    print(f"Wrote {made.output}.json and {made.output}.md.")
    return 0 if passed(made.document["rows"]) else 1


def precompile(options: argparse.Namespace) -> int:
    """Machine code of every file of csrc/. Its name has a digest of the sources and NVRTC's version: it is used for
    these alone."""
    if not options.cubins:
        raise ValueError(f"--precompile {options.precompile} writes into a folder: name it by --cubins FOLDER")
    folder = Path(options.cubins)
    for source in sorted((ROOT / "csrc").glob("*.cu")):
        found = compiler.cached_cubin(source.name, options.precompile)
        kernel_cache.write(folder / found.name, found.read_bytes())
        print(f"{folder / found.name}", flush=True)
    print(f"For NVRTC {compiler.version()} and sm_{options.precompile}.")
    return 0


def use_cubins(folder: Path) -> int:
    """Copy what was precompiled into the cache; how many files.

    Raises:
        ValueError: there are none.
    """
    found, places = list(folder.glob("*.cubin")), kernel_cache.folders()
    if not found:
        raise ValueError(f"--cubins {folder} has no *.cubin: make them by --precompile ARCHITECTURE --cubins {folder}")
    for cubin in found if places else ():
        kernel_cache.write(places[-1] / cubin.name, cubin.read_bytes())
    return len(found) if places else 0


def passed(rows_: list[dict[str, Any]]) -> bool:
    """True if nothing that ran has failed, and something did run."""
    return all(row["status"] in ("ok", "skipped") for row in rows_) and any(row["status"] == "ok" for row in rows_)


class Report:
    """The rows so far; written after each task."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.end = time.monotonic() + options.seconds
        self.until = self.end  # of the sections that run now
        self.processes = Processes()
        names = ("numel", "ranks", "repeats", "model", "sections")
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
        [row] = self.made(Task("probe", "environment", "probe"))
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
                    raise ValueError(f"{file}: its {name}: {theirs}, and here {ours}: join reports of the same")
            self.document["rows"] += [row for row in earlier["rows"] if row["section"] not in self.options.sections]

    def make(self) -> None:
        """All sections, each within its share of the time: none that takes long costs the others theirs."""
        if {"hooks", "ranks"} & set(self.options.sections) and "numba" not in self.facts["broken"]:
            threading.Thread(target=self.warm, daemon=True).start()
        waves = sections.waves(self.options.sections)
        for place, wave in enumerate(waves):
            now = time.monotonic()
            self.until = now + max(0.0, self.end - now) * sections.share(waves[place:])
            tasks = sections.tasks_of(wave, self.facts["broken"], self.options.only)
            with ThreadPoolExecutor(1 if wave[0] in sections.ALONE else self.options.jobs) as pool:
                try:
                    for _ in pool.map(self.finish, tasks):
                        pass
                except BaseException:
                    self.processes.close()  # or the pool would wait for them
                    raise

    def warm(self) -> None:
        """Compile the CPU's kernels, with which ranks are compared, before every rank waits for them."""
        command = (sys.executable, "-m", "gradwire.benchmarks.cli", "warm", "--devices", "cpu", "--dtypes", "float32")
        self.processes.run(command, ROOT, {**ENVIRONMENT, **os.environ}, LIMITS["compile"])

    def finish(self, task: Task) -> None:
        made = self.made(task)
        with self.writing:
            self.document["rows"] += made
            for row in made:
                said = f"{row['section']} {row['name']}: {row['status']} ({row['seconds']:.0f} s) {row['reason']}"
                print(said, flush=True)
            self.write()

    def write(self) -> None:
        Path(self.output).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{self.output}.json").write_text(page.by_rows(self.document))
        Path(f"{self.output}.md").write_text(page.markdown(self.document))

    def made(self, task: Task) -> list[dict[str, Any]]:
        """A task's rows, whatever becomes of it."""
        row: dict[str, Any] = {"gpu": self.facts.get("gpu", ""), "section": task.section, "name": task.name}
        row |= {"status": "skipped", "reason": task.why_not, "seconds": 0.0, "result": None}
        left = self.until - time.monotonic()
        if not task.why_not and left <= 0:
            row["reason"] = f"its share of the {self.options.seconds:.0f} seconds of --seconds was used up"
        if row["reason"]:
            return [row]
        limit = min(LIMITS[task.section], max(left, 1.0))
        with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
            into = Path(folder, "row.json")
            command = task.command or (*task.program, *self.python(task, into))
            command = (*command, "--rows", str(into)) if task.by_test else command
            if task.stepped:  # each rate is written as it ends
                times = ("--timeout", f"{limit:.0f}", "--stop-after", f"{limit / 2:.0f}")
                command = (*command, "--model", self.options.model, *times, "--json", str(into))
            ended = self.processes.run(command, ROOT, {**ENVIRONMENT, **os.environ, **task.environment}, limit)
            if task.by_test:
                tests = [row | found for found in sections.rows_of_tests(into)]
                whole = row | {"seconds": round(ended.seconds, 2)} | outcome(task, ended, None)
                if ended.status is None and tests:  # one that hangs ends by itself, and is a row
                    whole |= {"status": "skipped", "reason": f"its time was used up after {len(tests)} tests"}
                told = any(test["status"] == "failed" for test in tests) and ended.status == 1
                return tests if tests and (told or whole["status"] == "ok") else [*tests, whole]
            result = json.loads(into.read_text()) if into.exists() else None
        row |= {"seconds": round(ended.seconds, 2), "result": result} | outcome(task, ended, result)
        if ended.status is None and limit < LIMITS[task.section]:
            row |= {"status": "skipped", "reason": f"its section's time was used up after {limit:.0f} s"}
        return [row]

    def python(self, task: Task, into: Path) -> tuple[str, ...]:
        given = [("--" + name, str(getattr(self.options, name))) for name in ("numel", "ranks", "repeats")]
        given += [("--device", self.options.device)]
        words = [word for pair in given for word in pair]
        name = task.name.split(" ", 1)[1] if task.section == "sanitizer" else task.name
        ours = (sys.executable, "-m", "gradwire.benchmarks.cli", "gpu")
        return (*ours, "--row", task.work, name, "--into", str(into), *words)
