"""Every arm's own learning rate, the same search for all; and a file of the runs that have been made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: A search goes no further than this from where it begins.
FURTHEST = 16


def runs_in(path: Path) -> Iterator[dict[str, Any]]:
    """The runs that a file has, if it is there."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def still_needed(
    known: Sequence[Mapping[str, Any]], arms: Sequence[str], rates: Sequence[float] | None, begin: float, seeds: int
) -> Iterator[dict[str, Any]]:
    """What has to be run next, arm by arm: rates with the first seed, then the other seeds at the best one.

    Args:
        known: runs that are there: `arm`, `learning_rate`, `seed` and the `loss` at the end.
        rates: the grid; None: a search that begins at `begin`.
    """
    for arm in arms:
        mine = {(run["learning_rate"], run["seed"]): run["loss"] for run in known if run["arm"] == arm}
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
    return float(min((r for r in runs if r["arm"] == arm and r["seed"] == 0), key=lambda r: r["loss"])["learning_rate"])
