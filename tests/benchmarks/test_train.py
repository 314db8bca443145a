"""The training benchmark: its tasks, how curves and step times are joined, and a small run of the real thing."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire.benchmarks.common import report
from gradwire.benchmarks.common.arms import TRAINED
from gradwire.benchmarks.learning import summary
from gradwire.benchmarks.learning.tasks import DIGITS, SMALL, Task
from ranks import Ranks


@pytest.mark.parametrize("task", [DIGITS, SMALL], ids=lambda task: task.name)
def test_ranks_share_one_global_batch(task: Task) -> None:
    (whole, answers), *_ = alone = list(islice(task.batches(3, 0, 1), 2))
    assert len(whole) == task.batch
    shares = [list(islice(task.batches(3, rank, 4), 2)) for rank in range(4)]
    for turn, (inputs, targets) in enumerate(alone):
        assert torch.equal(torch.cat([share[turn][0] for share in shares]), inputs)
        assert torch.equal(torch.cat([share[turn][1] for share in shares]), targets)
    other, _ = next(task.batches(4, 0, 1))
    assert not torch.equal(other, whole)
    assert answers.dtype == torch.int64
    with pytest.raises(ValueError, match=f"3 ranks cannot share {task.name}'s {task.batch} samples"):
        next(task.batches(3, 0, 3))


@pytest.mark.parametrize("task", [DIGITS, SMALL], ids=lambda task: task.name)
def test_validation_does_not_depend_on_the_number_of_ranks(task: Task) -> None:
    torch.manual_seed(0)
    model = task.model()
    alone = task.validation(model, 0, 1)
    shares = [task.validation(model, rank, 3) for rank in range(3)]
    for name, whole in alone.items():
        assert sum(share[name] for share in shares) == pytest.approx(whole, rel=1e-5)
    assert alone["count"] > 300


def test_an_interval_is_students() -> None:
    # Three values with deviation 1: t(0.975, 2) = 4.3027.
    found = report.interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0
    assert found["high"] - 2.0 == pytest.approx(4.30265 / 3**0.5, rel=1e-5)
    assert 2.0 - found["low"] == pytest.approx(found["high"] - 2.0)
    assert report.interval([5.0]) == {"mean": 5.0, "low": 5.0, "high": 5.0}


def curve(*losses: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * place, "loss": loss} for place, loss in enumerate(losses)]


def test_the_target_is_reached_between_two_readings() -> None:
    assert summary.steps_to(curve(8.0, 4.0, 2.0), 3.0) == 15
    assert summary.steps_to(curve(8.0, 4.0, 2.0), 4.0) == 10
    assert summary.steps_to(curve(8.0, 2.0, 5.0, 2.0), 3.0) == pytest.approx(10 * 5 / 6), "the first time counts"
    assert summary.steps_to(curve(8.0, None, 2.0), 3.0) == 20
    assert summary.steps_to(curve(8.0, 4.0, None), 3.0) is None


def synthetic() -> dict[str, Any]:
    """Two seeds and two rates. topk learns half as fast as float32, and its steps take 2 s at either rate."""
    names = ["none", "fp32", "fp16", "onebit", "topk", "topk8", "auto"]
    losses = {
        "fp32": curve(8.0, 4.0, 3.0, 2.0),
        "fp16": curve(8.0, 4.0, 3.0, 2.0),
        "onebit": curve(8.0, None, 9.0, None),
        "topk": curve(8.0, 6.0, 3.0, 2.0 + 1e-9),
        "topk8": curve(8.0, 4.0, 3.0, 1.0),
    }
    runs = [
        {"arm": name, "seed": seed, "bits_per_element": 32.0, "curve": readings}
        for seed in (1, 0)
        for name, readings in losses.items()
    ]
    steps = {
        "100mbit": {"none": 1.0, "fp32": 16.0, "fp16": 8.0, "onebit": 2.0, "topk": 2.0, "topk8": 2.0, "auto": 2.0},
        "10gbit": {"none": 1.0, "fp32": 1.0, "fp16": 1.0, "onebit": 2.0, "topk": 2.0, "topk8": 2.0, "auto": 1.0},
    }
    timings = {
        text: {
            "rate": {"100mbit": 10**8, "10gbit": 10**10}[text],
            "proof": None,
            "arms": {
                name: {"times_s": [t, t, t], "sends": "dense" if (name, text) == ("auto", "10gbit") else "compressed"}
                for name, t in times.items()
            },
        }
        for text, times in steps.items()
    }
    return {
        "arguments": {"arms": names, "seeds": 2},
        "environment": report.environment(),
        "task": DIGITS.describe() | {"margin": 0.25},
        "steps_per_epoch": 20.0,
        "worlds": [{"world": 2, "runs": runs, "timings": timings}],
    }


def test_curves_and_step_times_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = synthetic()
    summary.join(result)
    (world,) = result["worlds"]
    assert world["target_loss"] == [2.5, 2.5]
    learning = world["learning"]
    assert learning["fp32"]["steps_to_target"] == [25, 25]
    assert learning["onebit"]["steps_to_target"] == [None, None]
    assert learning["onebit"]["final_loss"] is None, "a loss that was not finite has no mean"
    assert learning["topk8"]["change"]["mean"] == -0.5
    slow, fast = world["joined"]["100mbit"], world["joined"]["10gbit"]
    assert slow["fp16"]["time_to_target_s"] == [200, 200]
    assert slow["topk"]["speedup"]["mean"] == pytest.approx(4)
    assert slow["onebit"]["speedup"] is None
    assert slow["auto"]["learns_as"] == "topk8"
    assert slow["auto"]["time_to_target_s"] == slow["topk8"]["time_to_target_s"] == [45, 45]
    assert fast["auto"]["learns_as"] == "fp32", "what is not compressed learns as float32 does"
    assert fast["auto"]["time_to_target_s"] == [25, 25]
    # From 4 times faster to 2 times slower over two decades: the lines cross two thirds of the way.
    assert world["crossover"]["topk"]["rate"] == pytest.approx(10 ** (8 + 4 / 3))
    assert world["crossover"]["onebit"]["words"] == "target not reached"
    report.print_tables(summary.tables(result))
    printed = capsys.readouterr().out
    assert "not finite" in printed
    assert "(dense)" in printed
    summary.plot(result, str(tmp_path / "train.png"))
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_crossovers_outside_of_what_was_measured() -> None:
    def words(*ratios: float) -> str:
        rates = {"100mbit": 10**8, "1gbit": 10**9, "none": None}
        rows = {
            text: {name: {"time_to_target_s": [time]} for name, time in {"fp32": 1.0, "fp16": 2.0, "topk": r}.items()}
            for text, r in zip(rates, ratios, strict=True)
        }
        world = {"joined": rows, "timings": {text: {"rate": rate} for text, rate in rates.items()}}
        return str(summary.crossover("topk", world)["words"])

    assert words(0.5, 0.5, 0.5) == "every rate tried"
    assert words(0.5, 0.5, 1.5) == "between 1 Gbit/s and unshaped"
    assert words(2.0, 1.0, 1.0) == "below 100 Mbit/s, if at all"
    assert words(0.5, 2.0, 2.0) == "0.32 Gbit/s"


def test_dense_steps_at_the_start_cost_what_float32_costs() -> None:
    result = synthetic()
    (world,) = result["worlds"]
    world["runs"] += [{**run, "arm": "powersgd"} for run in copy.deepcopy(world["runs"]) if run["arm"] == "fp32"]
    for timing in world["timings"].values():
        timing["arms"]["powersgd"] = {"times_s": [1.0], "sends": "compressed"}
    result["arguments"]["arms"].append("powersgd")
    summary.join(result)
    assert world["joined"]["100mbit"]["powersgd"]["time_to_target_s"] == [2 * 16 + 23, 2 * 16 + 23]


@pytest.mark.slow
def test_a_small_run_of_the_real_thing(tmp_path: Path) -> None:
    file, picture = tmp_path / "train.json", tmp_path / "train.png"
    line = "train --task digits --steps 6 --seeds 2 --readings 2 --rates none --timed 2 --warmup 3 --search"
    command = [sys.executable, "-m", "gradwire.benchmarks.cli", *line.split(), "--arms", "powersgd", "local", "auto"]
    runs = tmp_path / "runs.jsonl"
    command += ["--json", str(file), "--plot", str(picture), "--runs", str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "NOT SHAPED" in done.stdout
    document = json.loads(file.read_text())
    assert document["benchmark"] == "train"
    assert document["environment"]["threads"] == 1
    (world,) = document["worlds"]
    arms = ["fp32", "fp16", "topk8", "powersgd", "local"]  # topk8: what auto learns as
    assert sorted((run["seed"], run["arm"]) for run in world["runs"]) == [(s, a) for s in (0, 1) for a in sorted(arms)]
    for run in world["runs"]:
        assert [reading["step"] for reading in run["curve"]] == ([0, 6] if run["arm"] == "local" else [0, 3, 6])
        others = [other for other in world["others"] if other["arm"] == run["arm"]]
        assert len(others) >= 2, "a search"
        assert all(run["seed"] or run["loss"] <= other["loss"] for other in others)
        assert run["curve"][0]["loss"] == pytest.approx(2.3, abs=0.1), "before the first step all digits are as likely"
    first = {run["arm"]: run for run in world["runs"] if run["seed"] == 0}
    assert first["fp16"]["curve"][-1]["loss"] == pytest.approx(first["fp32"]["curve"][-1]["loss"], rel=1e-2)
    assert 32 / first["topk8"]["bits_per_element"] > 25
    assert set(world["joined"]["none"]) == {"none", "auto", *arms}
    timings = world["timings"]["none"]["arms"]
    assert all(len(timing["times_s"]) == 2 for timing in timings.values())
    assert [name for name, timing in timings.items() if "alone_s" in timing] == ["local"]
    assert len(timings["local"]["alone_s"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    made = runs.read_text()
    assert len(made.splitlines()) == len(world["runs"]) + len(world["others"])
    again = tmp_path / "again.json"
    command[command.index(str(file))] = str(again)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(again.read_text())["worlds"][0]["runs"] == world["runs"], "nothing is trained again"
    assert runs.read_text() == made


def test_what_a_round_takes_is_told_from_steps_without_one() -> None:
    timings = {"none": {"times_s": [3.0]}, "local": {"times_s": [2.5, 2.0, 4.0], "alone_s": [2.0, 1.0, 2.0]}}
    assert summary.communication("local", timings) == pytest.approx(0.2)


def test_fewer_bytes_are_those_that_arrive() -> None:
    """By `gather` on four ranks each receives three wires, where a float32 ring brings one and a half gradients."""
    run = {"bits_per_element": 16.0}
    assert summary.times_fewer([run], world=2) == "2.0"
    assert summary.times_fewer([run], world=4) == "", "not told by what is sent"
    assert summary.times_fewer([run | {"share_of_bytes": 1.0}], world=4) == "1.0"


def gathered(rank: int) -> dict[str, tuple[float, float]]:
    found = {}
    for name in ("fp16", "bf16", "local"):
        installed = TRAINED[name].install(torch.nn.Linear(64, 64, bias=False), exchange="gather")
        optimizer = installed.optimizer(torch.optim.SGD(installed.module.parameters(), lr=0.1))
        for _ in range(10):
            installed.model(torch.ones(64)).sum().backward()
            optimizer.step()
        found[name] = installed.bits_per_element(), installed.share_of_bytes()
        installed.close()
    return found


def test_what_arrives_is_counted(ranks: Ranks) -> None:
    found = ranks(4).run(gathered)[0]
    assert found["fp16"] == (16.0, 0.5)
    assert found["bf16"] == pytest.approx((16.0, 1.0)), "three of half a gradient"
    bits, share = found["local"]
    assert share == pytest.approx(bits / 32, rel=0.02), "to owners and back"
