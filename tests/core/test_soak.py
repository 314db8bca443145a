"""Faults and long runs: ranks that are killed or stopped at drawn points, thousands of steps, processes that end.

`make soak` runs all of it; each part has a small share in `make test`. What is drawn follows GRADWIRE_SOAK_SEED.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from faults import (
    CONFIGURATIONS,
    CONSTRUCTOR,
    ENDS,
    FIRST_STEP,
    PROBE,
    RAISE,
    TIMEOUT,
    Ended,
    Fault,
    checkpoint,
    ended,
    long_run,
    run_ranks,
    saved_digest,
    stuck,
    trained,
)
from gradwire.hooks.auto.trial import ROUND_STEPS, ROUNDS, SETTLING

SEED = int(os.environ.get("GRADWIRE_SOAK_SEED", "0"))

#: Steps of a run; where "auto" tries both ways, more than the trial takes.
TRIAL = SETTLING + ROUND_STEPS * ROUNDS
STEPS = {name: TRIAL + 5 if name == "auto" else 8 for name in CONFIGURATIONS}
NAMED = [name for name in CONFIGURATIONS if name != "auto"]

KILLS, STOPS, LONG, ENDED = 50, 20, 3000, 500


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


class Undisturbed:
    """Runs in which nothing happens, each trained once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends: dict[tuple[str, int], list[str]] = {}

    def folder(self, name: str) -> Path:
        """With the checkpoints of every step."""
        self.end(name)
        return self._folder / name

    def end(self, name: str, first: int = 0) -> list[str]:
        """The digests of all ranks at the end, of a run that went on from its own checkpoint before step `first`."""
        if name != "auto":  # whose trial begins again
            first = 0
        if (name, first) not in self._ends:
            into = self._folder / (f"{name}-from-{first}" if first else name)
            into.mkdir()
            run = train(name, into, self._folder / name if first else None, first)
            assert run.statuses == [0, 0, 0], run.printed
            self._ends[name, first] = run.results
        return self._ends[name, first]


def train(name: str, into: Path, resume: Path | None = None, first: int = 0, fault: Fault | None = None) -> Ended:
    whence = None if resume is None else str(resume)
    return run_ranks(3, trained, name, str(into), whence, first, STEPS[name], None if fault is None else asdict(fault))


def survived(undisturbed: Undisturbed, name: str, fault: Fault, folder: Path) -> Counter[str]:
    """One rank is killed; the others tell, and go on from the last checkpoint that all have, as if nothing had been."""
    seen: Counter[str] = Counter()
    for part in ("killed", "resumed"):
        (folder / part).mkdir(parents=True)
    run = train(name, folder / "killed", fault=fault)
    told = f"{name}, {fault}: {run.statuses}, {run.printed}"
    assert [status for rank, status in enumerate(run.statuses) if rank != fault.rank] == [1, 1], told
    assert run.statuses[fault.rank] == -9, told
    (killed,) = re.findall(r"^kill at ([\d.]+)$", run.printed[fault.rank], re.MULTILINE)
    for rank in {0, 1, 2} - {fault.rank}:
        (line,) = re.findall(r'^\{"failed".*$', run.printed[rank], re.MULTILINE)
        failure = json.loads(line)
        assert failure["at"] - float(killed) < TIMEOUT + 5, told
        seen["survivors"] += 1
        seen["survivors that name the rank"] += f"rank {fault.rank}" in failure["failed"]
        seen["survivors that heard within a second"] += failure["at"] - float(killed) < 1
    last = max(
        step
        for step in range(STEPS[name])
        if step == 0 or all(checkpoint(folder / "killed", step, r).exists() for r in range(3))
    )
    if last:
        assert saved_digest(folder / "killed", last) == saved_digest(undisturbed.folder(name), last), told
    whence = folder / "killed" if last else None
    resumed = train(name, folder / "resumed", whence, last)
    assert resumed.statuses == [0, 0, 0], resumed.printed
    assert resumed.results == undisturbed.end(name, last), told
    seen["resumed from a checkpoint"] += last > 0
    return seen


def drawn(points: random.Random, kind: str, place: str) -> tuple[str, Fault]:
    """A configuration and a fault in it."""
    name = points.choice(NAMED) if place == "steps" else "auto"
    phase = {
        "constructor": CONSTRUCTOR,
        "probe": PROBE,
        "trial": FIRST_STEP + points.randrange(TRIAL),
        "steps": FIRST_STEP + points.randrange(STEPS[name] - 2),
    }[place]
    count = points.randrange(200 if place == "probe" else 10 if place == "steps" else 6)
    delay = points.choice([0.0, points.uniform(0.0, 0.005)])
    return name, Fault(points.randrange(3), kind, phase, count, delay)


PLACES = ("constructor", "probe", "trial", "steps", "steps")


@pytest.mark.soak
def test_a_killed_rank_at_many_points(
    undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points, seen = random.Random(SEED), Counter[str]()
    for number in range(KILLS):
        place = PLACES[number % len(PLACES)]
        name, fault = drawn(points, "kill", place)
        seen += survived(undisturbed, name, fault, tmp_path / str(number))
        seen[f"killed in the {place}"] += 1
    say(capsys, f"{KILLS} ranks killed (seed {SEED})", seen)


@pytest.mark.slow
def test_a_killed_rank(undisturbed: Undisturbed, tmp_path: Path) -> None:
    seen = survived(undisturbed, "gather", Fault(1, "kill", FIRST_STEP + 3, 2, 0.0), tmp_path)
    assert seen["resumed from a checkpoint"]
    assert seen["survivors that name the rank"]


def unchanged(undisturbed: Undisturbed, name: str, fault: Fault, into: Path) -> None:
    """One rank is stopped for two seconds, which nobody sees in what was trained."""
    into.mkdir(exist_ok=True)
    run = train(name, into, fault=fault)
    assert run.statuses == [0, 0, 0], run.printed
    assert run.printed[fault.rank].count("stop at") == 1
    assert run.results == undisturbed.end(name)


@pytest.mark.soak
def test_a_stopped_rank_at_many_points(
    undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points, seen = random.Random(SEED + 1), Counter[str]()
    for number in range(STOPS):
        place = PLACES[number % len(PLACES)]
        name, fault = drawn(points, "stop", place)
        unchanged(undisturbed, name, fault, tmp_path / str(number))
        seen[f"stopped in the {place}"] += 1
    say(capsys, f"{STOPS} ranks stopped for 2 s (seed {SEED + 1})", seen)


def check_long_run(run: Ended) -> list[list[dict[str, int]]]:
    assert run.statuses == [0, 0, 0], run.printed
    assert all(result["buckets"] == 20 for result in run.results)
    assert all(result["lost"] < 1e-5 for result in run.results)
    assert len({result["replica"] for result in run.results}) == 1
    return [result["readings"] for result in run.results]


@pytest.mark.soak
def test_thousands_of_steps_under_random_delays(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_ranks(3, long_run, LONG, 20, 30, SEED, within=3 * 3600.0)
    seen: Counter[str] = Counter()
    for rank, readings in enumerate(check_long_run(run)):
        settled = readings[3:]
        for name in ("threads", "descriptors"):
            assert len({reading[name] for reading in settled}) == 1, readings
        grown = settled[-1]["memory"] - settled[0]["memory"]
        assert grown < 2048, readings
        seen[f"KiB that rank {rank} grew in the last {settled[-1]['step'] - settled[0]['step']} steps"] = grown
        seen[f"threads of rank {rank}"] = settled[-1]["threads"]
        seen[f"descriptors of rank {rank}"] = settled[-1]["descriptors"]
    say(capsys, f"{LONG} steps of 20 buckets on 3 ranks, {run.results[0]['lost']:.1e} lost (seed {SEED})", seen)


@pytest.mark.slow
def test_some_steps_under_random_delays() -> None:
    for readings in check_long_run(run_ranks(3, long_run, 20, 20, 2, SEED)):
        assert readings[0]["descriptors"] == readings[1]["descriptors"]
        assert readings[0]["threads"] == readings[1]["threads"]


def end_in_order(way: str, exchange: str) -> None:
    """No process ends by a signal: with status 1 where the script raises, else 0."""
    run = run_ranks(2, ended, way, exchange)
    assert run.statuses == [int(way in RAISE)] * 2, f"{way}, {exchange}: {run.statuses}, {run.printed}"


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep `cores` cores busy with something else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.soak
def test_many_processes_end_in_order_under_load(capsys: pytest.CaptureFixture[str]) -> None:
    seen: Counter[str] = Counter()
    exchanges = random.Random(SEED + 2)
    with busy(2):
        for number in range(ENDED // 2):
            way = ENDS[number % len(ENDS)]
            end_in_order(way, exchanges.choice(["gather", "union", "split", "dense", "auto"]))
            seen[way] += 2
    say(capsys, f"{ENDED} processes ended in order, with 2 busy loops beside them (seed {SEED + 2})", seen)


@pytest.mark.parametrize("way", ["leave", "backward"])
def test_processes_end_in_order(way: str) -> None:
    end_in_order(way, "gather")


@pytest.mark.parametrize("exchange", ["gather", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_lane_that_waits_in_vain_ends_in_order(exchange: str) -> None:
    run = run_ranks(2, stuck, exchange)
    assert run.statuses == [1, 0], run.printed
    assert "Raised: in backward" in run.printed[0]


def say(capsys: pytest.CaptureFixture[str], title: str, seen: Counter[str]) -> None:
    with capsys.disabled():
        print(f"\n{title}")
        for name, count in sorted(seen.items()):
            print(f"  {count:6} {name}")
