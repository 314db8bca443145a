"""The sections of the report: what their rows are, what makes them, and how long that may take."""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.arms import FLOOR
from . import paths, speed
from .processes import Ended

ROOT = Path(__file__).resolve().parents[2]
#: The seconds that each may well take on 16 cores. Where the whole has fewer, or more, so have they, in proportion.
SECONDS = {
    "compile": 40, "bytes": 40, "hooks": 85, "ranks": 110, "kernels": 80, "step": 60, "slow-link": 110, "tests": 120,
    "sanitizer": 120, "four-ranks": 70,
}  # fmt: skip
SECTIONS = tuple(SECONDS)
#: Two calls, of which each fits five minutes: the most important first.
PARTS = {
    "first": ("bytes", "hooks", "ranks", "kernels"),
    "second": ("step", "slow-link", "tests", "sanitizer", "four-ranks"),
}
#: They have the GPU, and the host, to themselves; others run at the same time as their neighbours.
ALONE = ("ranks", "kernels", "step", "slow-link", "four-ranks")
#: Most seconds that a row may take.
LIMITS = {
    "probe": 120, "compile": 120, "bytes": 180, "hooks": 300, "ranks": 300, "kernels": 120, "step": 200, "tests": 400,
    "sanitizer": 240, "four-ranks": 200, "slow-link": 400,
}  # fmt: skip
#: Files with a section of their own.
HOOKS, LAWS, STEPS = "test_cuda_hooks", "test_gpu_ranks", "test_gpu_steps"
#: What four ranks run of the laws, as far as there is time.
OF_FOUR = "meet or nothing_is_lost_and or fsdp or horovod or late_gradients"
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
#: Memory that torch keeps hides accesses out of bounds.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
#: `gradwire-bench step`'s, of the rows with steps: compressing alone, and links that a token bucket limits.
STEPPED = {
    "step": ("one rank", "--worlds 1 --rates none --rounds 5 --steps 3 --arms fp32 qsgd onebit ternary topk chunked"),
    "slow-link": (
        "two ranks",
        "--worlds 2 --rates none 10gbit 1gbit --rounds 3 --steps 2 --warmup 3 --arms fp32 fp16 bf16-hook powersgd "
        "qsgd onebit ternary topk chunked",
    ),
}


@dataclass(frozen=True)
class Task:
    """A row that a process makes, or with `by_test` a row for each of its tests.

    Attributes:
        work: what of `rows` makes it, unless there is a `command`.
        program: what goes before Python.
        why_not: what is missing here.
    """

    section: str
    name: str
    work: str = ""
    program: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""
    by_test: bool = False

    @property
    def stepped(self) -> bool:
        """True if `gradwire-bench step` makes it."""
        return self.section in STEPPED


def expanded(names: Sequence[str]) -> list[str]:
    """Sections, with those of a part in its place, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(PARTS.get(name, (name,)) for name in names)))


def waves(sections: Iterable[str]) -> list[list[str]]:
    """Those that run at the same time."""
    found: list[list[str]] = []
    for section in sections:
        if section in ALONE or not found or found[-1][0] in ALONE:
            found.append([section])
        else:
            found[-1].append(section)
    return found


def share(waves_: Sequence[Sequence[str]]) -> float:
    """The share of the remaining time that the first of these gets."""
    needs = [max(SECONDS[section] for section in wave) for wave in waves_]
    return needs[0] / sum(needs)


def tasks_of(wave: Sequence[str], broken: Mapping[str, str], only: str = "") -> list[Task]:
    """The tasks of sections that run at the same time: in turns, so that what is cut off is not all of one."""
    each = ([task for task in tasks(section, broken) if re.search(only, task.name)] for section in wave)
    return [task for turn in itertools.zip_longest(*each) for task in turn if task is not None]


def tasks(section: str, broken: Mapping[str, str]) -> Iterator[Task]:
    """A section's, where so much is broken: by what it is, why."""
    launching = broken.get("launching", "")
    why_not = launching and f"kernels cannot be launched here: {launching}"
    match section:
        case "compile":
            for source in sorted((ROOT / "csrc").glob("*.cu")):
                yield Task(section, source.name, section)
        case "bytes":
            yield from (Task(section, name, section, why_not=why_not) for name in (*paths.FAMILIES, paths.LONG))
        case "kernels":
            for codec in speed.CODECS:
                yield Task(section, speed.label(codec), section, why_not=why_not)
        case "step" | "slow-link":
            name, line = STEPPED[section]
            ours = (sys.executable, "-m", "gradwire.benchmarks.cli", "step", "--device", "cuda", "--limit", "bucket")
            yield Task(section, name, command=(*ours, *line.split()), why_not=why_not)
        case "tests":
            for file in test_files():
                yield pytest_task(section, file, broken, why_not)
        case "hooks":
            yield pytest_task(section, HOOKS, broken, why_not, by_test=True)
        case "ranks":
            for file in (STEPS, LAWS):
                yield pytest_task(section, file, broken, why_not, by_test=True)
        case "four-ranks":
            four = {"GRADWIRE_GPU_RANKS": "4"}
            yield pytest_task(section, LAWS, broken, why_not, "-k", OF_FOUR, by_test=True, environment=four)
        case "sanitizer":
            tool = compute_sanitizer()
            why_not = why_not or ("" if tool else f"compute-sanitizer is not on PATH, nor at {' or '.join(SANITIZERS)}")
            families = [family for family in (*paths.FAMILIES, paths.ENTRIES) if family not in paths.IN_TORCH]
            for check, family in itertools.product(TOOLS, families):
                program = (tool, *sanitizing(check))
                yield Task(section, f"{check} {family}", "paths", program, (), UNCACHED, why_not)


def test_files() -> Iterator[str]:
    """Those with tests that are marked `cuda` where there is a GPU, and no section of their own."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        marked = re.search(r"\bmark\.cuda\b|\b(ALL|OTHER)_BACKENDS\b", file.read_text("utf-8"))
        if marked and file.stem not in (HOOKS, LAWS, STEPS):
            yield file.stem


def pytest_task(section: str, file: str, broken: Mapping[str, str], why_not: str, *options: str, **given: Any) -> Task:
    """pytest over a file, if what it needs is whole."""
    for module in ("pytest", "hypothesis"):
        if module in broken:
            why_not = why_not or f"the tests need {module}: {broken[module]}"
    if "numba" in broken and file in (HOOKS, LAWS):  # half of the ranks are on the CPU
        why_not = why_not or f"these tests compare with kernels for CPUs, of numba: {broken['numba']}"
    path = str(next((ROOT / "tests").rglob(f"{file}.py")).relative_to(ROOT))
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", path)
    name = file.removeprefix("test_")
    return Task(section, name, command=(*pytest, *options), why_not=why_not, **given)


# -- what became of them -----------------------------------------------------------------------------------------------


def outcome(task: Task, ended: Ended, result: Any) -> dict[str, Any]:
    """Status and reason, and where it has failed the end of what it printed."""
    lines = ended.output.strip().splitlines()
    last = lines[-1].strip() if lines else "it printed nothing"
    if ended.status is None:
        status, reason = "failed", f"not finished after {ended.seconds:.0f} s"
    elif task.section == "tests" or task.by_test:
        # 5: none was collected, or none selected.
        status = {0: "ok", 5: "skipped"}.get(ended.status, "failed")
        reason = last.strip("= ")
    elif task.section == "sanitizer":
        summary = [line.strip("= ") for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
        status = "ok" if ended.status == 0 and result else "failed"
        reason = summary[-1] if summary else last if status == "failed" else ""
    elif task.stepped and result:
        arms = [arm for network in result["networks"] for arm in network["arms"]]
        status = "failed" if any("failed" in arm or not arm["equal"] for arm in arms if arm["arm"] != FLOOR) else "ok"
        reason = "; ".join(line for line in lines if re.match(r"\w+, \d+ ranks: ", line))  # arms and rates left out
    else:
        status = "ok" if ended.status == 0 and result else "failed"
        reason = "" if status == "ok" else f"{last} (exit status {ended.status})"
    row: dict[str, Any] = {"status": status, "reason": reason}
    if status == "failed":
        row["output"] = lines[-60:]
    return row


def rows_of_tests(file: Path) -> Iterator[dict[str, Any]]:
    """The rows that pytest's option `--rows` has written, test by test, as far as it came."""
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # it was ended while it wrote
            return


# -- compute-sanitizer -------------------------------------------------------------------------------------------------


def compute_sanitizer() -> str:
    """Its path, the newest of several; "" if there is none."""
    found = shutil.which("compute-sanitizer")
    for place in () if found else SANITIZERS:
        for path in sorted(glob.glob(os.path.expandvars(place), recursive=True), reverse=True):
            found = found or shutil.which(path)
    return found or ""


def sanitizing(check: str) -> tuple[str, ...]:
    """Its options: what it finds decides the status, and calls that fail on purpose, as torch's do, are no finding."""
    quiet = ("--report-api-errors", "no") if check == "memcheck" else ()
    return ("--tool", check, *quiet, "--error-exitcode", str(FOUND))
