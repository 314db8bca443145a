"""Output of every benchmark: where it ran, a table for people, one JSON file for programs."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

#: Raised when a field of the JSON files changes its meaning.
SCHEMA = 1
#: Characters of the longest line in them that holds more than a list of numbers.
LINE = 500


def environment() -> dict[str, Any]:
    """The environment of the figures: machine, versions, threads, date (UTC), load (1 minute)."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "numba", "gradwire")},
        "revision": revision(),
    }


def gpu() -> dict[str, Any]:
    """The GPUs of the figures, and what drives them."""
    try:
        nccl: str | None = ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # a torch without
        nccl = None
    facts = {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(), "nccl": nccl}
    return facts | {"driver": driver(), "cuda": torch.version.cuda}


def driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    return None


#: In the name of a GPU that is not there.
EMULATED = "emulated"
#: Fields of `environment()` that are kept with a run.
STAMP = ("date", "cpu", "cores", "threads", "python", "torch", "numpy", "numba", "gradwire", "revision")


def stamp() -> dict[str, Any]:
    """Of a run that is kept for later tables, which may be written on another machine."""
    facts = environment()
    return {name: facts[name] for name in STAMP}


def describe(facts: Mapping[str, Any]) -> str:
    """`environment()` in one line, for a table's caption."""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "numba", "numpy", "gradwire"))
    gpu = (
        f"{facts['gpus']} x {facts['gpu']}, driver {facts['driver']}, NCCL {facts['nccl']}, " if "gpu" in facts else ""
    )
    return f"{gpu}{facts['cpu']}, {facts['threads']} of {facts['cores']} cores, {versions}, {facts['date']}"


#: The kernel's fields on a processor besides its name, and our word for each.
CPU_KIND = {"cpu family": "family", "model": "model"}


def cpu_model() -> str:
    """The processor's name, as the kernel gives it, and its family and model, which tell apart what virtual machines
    call alike."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        first, *_ = info.read_text().split("\n\n")
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
        if "model name" in facts:
            kind = ", ".join(f"{word} {facts[name]}" for name, word in CPU_KIND.items() if name in facts)
            return f"{facts['model name']} ({kind})" if kind else facts["model name"]
    return platform.processor() or platform.machine()


def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def revision() -> str | None:
    """The git commit of this checkout, with a + when its files have changed since; None outside of one."""
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def sources() -> str:
    """A digest of the package's files and the tests, by which copies without git are told apart."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(path for kind in ("py", "cu", "cuh") for path in root.rglob(f"*.{kind}")):
        where = path.relative_to(root)
        if not any(part.startswith(".") or part in ("build", "site") for part in where.parts):
            digest.update(f"{where}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile (of one value: itself)."""
    if len(values) < 2:
        return float(values[0]), float(values[0])
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def interval(values: Sequence[float], confidence: float = 0.95) -> dict[str, float]:
    """Mean, and the limits of its confidence interval by Student's t; of one value, that value three times. Needs
    SciPy."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": mean, "high": mean}
    from scipy.stats import t

    reach = float(t.ppf((1 + confidence) / 2, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - reach, "high": mean + reach}


def median_interval(
    values: Sequence[float], confidence: float = 0.95, independent: int | None = None
) -> dict[str, float]:
    """Median, and the limits of its confidence interval by order statistics, which holds whatever the values'
    distribution; of fewer than six, all of them lie inside. Needs SciPy.

    Args:
        independent: how many of the values are, where each of as many draws has given several: limits are those of so
            many values, at the same shares of all, which is on the safe side. None: all are.
    """
    from scipy.stats import binom

    ordered, count = sorted(values), independent or len(values)
    reach = max(0, int(binom.ppf((1 - confidence) / 2, count, 0.5)) - 1) * len(values) // count
    return {"median": median(ordered), "low": ordered[reach], "high": ordered[len(values) - 1 - reach]}


def document(benchmark: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document of one run, before it has run: schema, benchmark, its arguments, the environment."""
    return {"schema": SCHEMA, "benchmark": benchmark, "arguments": dict(arguments), "environment": environment()}


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json_text(content) + "\n")


def json_text(value: Any, indent: int = 0) -> str:
    """JSON with a row a line: on one line whatever fits, and lists of numbers of any length; else an item a line."""
    text = json.dumps(value, allow_nan=False)
    flat = not isinstance(value, dict | list) or not any(isinstance(item, dict | list) for item in items_of(value))
    if flat or indent + len(text) <= LINE:
        return text
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(value)
    lines = [
        f"{' ' * (indent + 1)}{name}{json_text(item, indent + 1)}"
        for name, item in zip(names, items_of(value), strict=True)
    ]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{f',{chr(10)}'.join(lines)}\n{' ' * indent}{closing}"


def items_of(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


@dataclass(frozen=True)
class Table:
    """Figures for people. The first column is text; each line of the caption is a note."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def print(self) -> None:
        """As wide as the terminal, or COLUMNS; in a pipe 100 characters."""
        print(self.text(shutil.get_terminal_size((100, 24)).columns), end="\n\n")

    def text(self, width: int) -> str:
        """Lines of at most `width` characters, or of the longest word.

        Only words are wrapped, and of cells only long ones. Where the columns do not fit beside each other, more lines
        follow with the first column and the next ones.
        """
        columns = [
            [line for cell in column for line in cell.splitlines()] for column in zip(*self.rows, strict=True)
        ] or [[] for _ in self.columns]
        least = [_least(head, cells) for head, cells in zip(self.columns, columns, strict=True)]
        widest = [
            max(map(len, [*head.splitlines(), *cells]), default=0)
            for head, cells in zip(self.columns, columns, strict=True)
        ]
        room = width - sum(least[1:]) - GAP * (len(least) - 1)
        narrow = max(least[0], min(widest[0], max(room, 2 * width // 5)))
        tried = {names: _parts(names, least, width) for names in (widest[0], narrow)}
        names = min(tried, key=lambda names: (len(tried[names]), -names))
        blocks = [_wrapped(self.title, width)]
        for part in tried[names]:
            widths = {0: names} | {place: least[place] for place in part}
            for place in part:  # what is left widens those that would be wrapped
                left = width - sum(widths.values()) - GAP * len(part)
                widths[place] += max(0, min(left, widest[place] - least[place]))
            heads = _lines({place: self.columns[place] for place in widths}, widths)
            rows = [line for row in self.rows for line in _lines({place: row[place] for place in widths}, widths)]
            blocks.append([*heads, "-" * (sum(widths.values()) + GAP * len(part)), *rows])
        blocks.append([line for note in self.caption.splitlines() for line in _wrapped(note, width)])
        return "\n\n".join("\n".join(block) for block in blocks if block)


#: Characters between two columns; and of a cell that may be wrapped.
GAP, LONG = 2, 24


def _least(head: str, cells: Sequence[str]) -> int:
    """The fewest characters of a column: of words, and of cells that are no longer than `LONG`."""
    words = [word for text in (head, *(cell for cell in cells if len(cell) > LONG)) for word in text.split()]
    return max(map(len, [*words, *(cell for cell in cells if len(cell) <= LONG)]), default=0)


def _parts(names: int, least: Sequence[int], width: int) -> list[list[int]]:
    """The columns that fit beside each other, and beside the first one, of width `names`."""
    parts: list[list[int]] = [[]]
    for place in range(1, len(least)):
        if parts[-1] and names + sum(least[i] + GAP for i in (*parts[-1], place)) > width:
            parts.append([])
        parts[-1].append(place)
    return parts


def _wrapped(text: str, width: int) -> list[str]:
    """Its lines, broken at spaces alone."""
    whole = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return [line for lines in whole for line in lines]


def _lines(cells: Mapping[int, str], widths: Mapping[int, int]) -> list[str]:
    """One row: the first column to the left, and others to the right, above each other where they are wrapped."""
    columns = {place: _wrapped(cell, widths[place]) for place, cell in cells.items()}
    if len(columns[0]) > 1:  # what goes on is indented
        first, *rest = columns[0]
        columns[0] = [first, *(f"  {line}" for line in _wrapped(" ".join(rest), widths[0] - 2))]
    lines = itertools.zip_longest(*columns.values(), fillvalue="")
    gap, sides = " " * GAP, [">" if place else "<" for place in columns]
    return [
        gap.join(
            f"{text:{side}{widths[place]}}" for text, side, place in zip(line, sides, columns, strict=True)
        ).rstrip()
        for line in lines
    ]


def print_tables(tables: Iterable[Table]) -> None:
    for table in tables:
        table.print()


def deliver(
    result: Mapping[str, Any],
    tables: Iterable[Table],
    options: argparse.Namespace,
    plot: Callable[[Any, Any], None] | None = None,
) -> None:
    """Print the tables, and write what `--json` and `--plot` ask for; `plot` takes the result and the file."""
    print_tables(tables)
    if options.json:
        write_json(options.json, result)
    if plot is not None and options.plot:
        plot(result, options.plot)


def subplots(*grid: int, **options: Any) -> tuple[Any, Any]:
    """A figure for a file, and its axes: `pyplot.subplots`. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot.subplots(*grid, layout="constrained", **options)


def label_ends(axes: Any, lines: Sequence[tuple[Any, str]]) -> None:
    """Write each line's name to the right of its last point, in its colour, and move names that would overlap apart.
    Call it when everything else is drawn."""
    figure = axes.figure
    figure.draw_without_rendering()
    names = []
    for line, name in sorted(lines, key=lambda one: float(one[0].get_ydata()[-1])):
        end = line.get_xdata()[-1], line.get_ydata()[-1]
        style = {"textcoords": "offset points", "va": "center", "fontsize": 9, "annotation_clip": False}
        names.append(axes.annotate(name, end, (8, 0), color=line.get_color(), **style))
    top, points = -1e9, 72 / figure.dpi
    for name in names:
        box = name.get_window_extent()
        shift = max(0.0, top + 2 - box.y0)
        name.set_position((8, shift * points))
        top = box.y1 + shift


def save(figure: Any, path: str | Path, dpi: int) -> None:
    """Write a figure to its file, and close it."""
    from matplotlib import pyplot

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
