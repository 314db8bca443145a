"""Every arm's own learning rate, the same search for all; and a file of the runs that have been made."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common import report

#: A search goes no further than this from where it begins.
FURTHEST = 16


class Runs(list[dict[str, Any]]):
    """Runs that have been made, in this process or before it. Each says where ("made").

    Args:
        file: where all are kept; None: nowhere. Its folder is made.
        common: what all have in common, the data among it; others in the file are left alone.
        arms, seeds: which count.
        rates: learning rates that count; None: all.
    """

    def __init__(
        self,
        file: str | None,
        common: Mapping[str, Any],
        arms: Sequence[str],
        seeds: int,
        rates: Sequence[float] | None,
    ) -> None:
        self._file, self._common = None if file is None else Path(file), common
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        for run in map(json.loads, self._file.read_text().splitlines() if self._file.exists() else ()):
            counts = run["seed"] < seeds and (not rates or run["learning_rate"] in rates)
            if common.items() <= run.items() and run["arm"] in arms and counts:
                self.append(run)

    def add(self, run: Mapping[str, Any]) -> None:
        """One more, with what all have in common: kept at once."""
        run = {**self._common, **run, "made": report.stamp()}
        self.append(run)
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps(run, allow_nan=False) + "\n")


def origin(result: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """The origin of a table's runs, for its caption: a line for each machine and its versions.

    Args:
        result: the document that they are in. Those from before runs said so name the machine that wrote the table.
    """
    made = [run["made"] for run in runs if "made" in run]
    if not made and not result.get("runs_say_where"):
        return report.describe(result["environment"])
    latest = {tuple(one[name] for name in report.STAMP[1:-1]): one for one in sorted(made, key=lambda one: one["date"])}
    counts = Counter(tuple(one[name] for name in report.STAMP[1:-1]) for one in made)
    lines = [
        (f"{counts[machine]} of {len(runs)} runs: " if len(runs) > counts[machine] else "") + report.describe(one)
        for machine, one in latest.items()
    ]
    if len(made) < len(runs):
        lines.append(f"{len(runs) - len(made)} of {len(runs)} runs do not say where they were made")
    return "\n".join(lines)


def finite(value: float) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if math.isfinite(value) else None


def loss_of(run: Mapping[str, Any]) -> float:
    """Infinite where it was not finite: it has diverged."""
    return math.inf if run["loss"] is None else float(run["loss"])


def still_needed(
    known: Sequence[Mapping[str, Any]], arms: Sequence[str], rates: Sequence[float] | None, begin: float, seeds: int
) -> Iterator[dict[str, Any]]:
    """The runs that are still needed, arm by arm: rates with the first seed, then the other seeds at the best one.

    Args:
        known: runs that are there: `arm`, `learning_rate`, `seed` and the `loss` at the end, None if not finite.
        rates: the grid; None: a search that begins at `begin`.
    """
    for arm in arms:
        mine = {(run["learning_rate"], run["seed"]): loss_of(run) for run in known if run["arm"] == arm}
        tried = {rate: loss for (rate, seed), loss in mine.items() if seed == 0}
        grid = rates or grid_around(tried, begin)
        wanted = [(rate, 0) for rate in grid if rate not in tried]
        if not wanted:
            best = min(grid, key=lambda rate: tried[rate])
            wanted = [(best, seed) for seed in range(1, seeds) if (best, seed) not in mine]
        yield from ({"arm": arm, "learning_rate": rate, "seed": seed} for rate, seed in wanted)


def grid_around(tried: Mapping[float, float], begin: float) -> list[float]:
    """The rates of a search so far, and the next one, if the best lies at an end: losses by rate so far."""
    grid = sorted({begin / 2, begin, 2 * begin} | tried.keys())
    if grid[0] in tried and grid[-1] in tried:
        best = min(tried, key=tried.__getitem__)
        if best == grid[0] > begin / FURTHEST:
            grid.insert(0, best / 2)
        elif best == grid[-1] < begin * FURTHEST:
            grid.append(best * 2)
    return grid


def best_rate(runs: Sequence[Mapping[str, Any]], arm: str) -> float:
    """The rate that is best with the first seed."""
    return float(min((r for r in runs if r["arm"] == arm and r["seed"] == 0), key=loss_of)["learning_rate"])
