"""Steps by priority: what the simulation must obey whatever the trace, two that are known, and a trace of a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gradwire.benchmarks import cli
from gradwire.benchmarks.advisor import priority
from gradwire.benchmarks.advisor.priority import BUCKET, LAYERS, NOW, PRIORITY, WAYS_TO_STEP, Trace, Way
from gradwire.benchmarks.advisor.step_simulation import Task
from gradwire.benchmarks.advisor.step_simulation import run as simulate
from gradwire.benchmarks.common.models import ResidualNetwork
from hypothesis import given
from hypothesis import strategies as st

BITS = Way("float32", 32.0, 0.0, 0.0)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    count = draw(st.integers(1, 8))
    seconds = st.lists(st.floats(0.0, 5.0), min_size=count, max_size=count).map(tuple)
    numels = st.lists(st.integers(1, 9_000_000), min_size=count, max_size=count).map(tuple)
    ready = tuple(draw(st.permutations(range(count))))
    return Trace(draw(numels), draw(seconds), ready, draw(seconds), draw(st.floats(0.0, 1.0)))


@given(traces(), st.floats(7.0, 11.0), st.integers(2, 9))
def test_no_step_is_shorter_than_its_work_and_none_longer_than_now(trace: Trace, power: float, ranks: int) -> None:
    now, *others = (priority.step_seconds(trace, BITS, 10**power, ranks, how) for how in WAYS_TO_STEP)
    compute = sum(trace.forward) + sum(trace.backward) + trace.optimizer
    link = 2 * (ranks - 1) / ranks * 32 * sum(trace.numels) / 10**power
    assert min(others) >= max(compute, link) * (1 - 1e-9)
    assert now >= max(others) * (1 - 1e-9)
    assert now <= (compute + link) * (1 + 1e-9)


@given(traces(), st.floats(8.0, 10.0), st.sampled_from([10.0, 100.0]))
def test_faster_computers_on_faster_links_are_the_same(trace: Trace, power: float, speed: float) -> None:
    faster = replace(
        trace,
        forward=tuple(s / speed for s in trace.forward),
        backward=tuple(s / speed for s in trace.backward),
        optimizer=trace.optimizer / speed,
    )
    for how in WAYS_TO_STEP:
        slow = priority.step_seconds(trace, BITS, 10**power, 4, how)
        fast = priority.step_seconds(faster, BITS, 10**power * speed, 4, how)
        assert fast * speed == pytest.approx(slow, rel=1e-6, abs=1e-9)


@given(traces())
def test_buckets_hold_everything_and_no_more_than_they_may(trace: Trace) -> None:
    found = priority.buckets(trace)
    assert [layer for bucket in found for layer in bucket] == list(trace.ready)
    for bucket in found:
        assert len(bucket) == 1 or 4 * sum(trace.numels[layer] for layer in bucket) <= BUCKET


def test_two_layers_that_are_known() -> None:
    """Forward takes 1 s a layer, backward 2, and each layer's gradient 10 on the link.

    Now: forward 2, the second layer's backward 2, then 20 on the link. By priority the second layer's gradient has the
    link for 2 s, gives way for the 10 s of the first one's, and goes on: forward of the first layer waits for nobody.
    """
    trace = Trace((1_000_000, 1_000_000), (1.0, 1.0), (1, 0), (2.0, 2.0), 0.0)
    rate = 32e6 / 10 * 2 * (2 - 1) / 2
    assert priority.step_seconds(trace, BITS, rate, 2, NOW) == pytest.approx(24.0)
    assert priority.step_seconds(trace, BITS, rate, 2, PRIORITY) == pytest.approx(23.0)
    # In turns the second layer's gradient, which began before, is in first.
    assert priority.step_seconds(trace, BITS, rate, 2, LAYERS) == pytest.approx(24.0)
    fast = rate * 1e6
    for how in WAYS_TO_STEP:
        assert priority.step_seconds(trace, BITS, fast, 2, how) == pytest.approx(6.0, abs=1e-4)


def test_the_lowest_priority_goes_first() -> None:
    tasks = [Task(1.0, 0.0, (), uses="link", priority=p) for p in (2, 0, 1)] + [Task(1.0, 0.0, (), uses="link")]
    assert simulate(tasks, 1.0) == [4.0, 1.0, 3.0, 2.0]


def test_windows_are_where_a_tenth_is_saved() -> None:
    arm = {"rates": [1.0, 2.0, 3.0, 4.0], NOW: [1.0] * 4, PRIORITY: [0.95, 0.89, 0.8, 0.99]}
    assert priority.window(arm) == (2.0, 3.0)
    assert priority.most(arm, PRIORITY) == "20 %"
    assert priority.window(arm | {PRIORITY: [0.95] * 4}) is None
    assert [priority.spoken(rate) for rate in (1.26e6, 6.31e7, 9.96e8, 2.5e10)] == [
        "1.3 Mbit/s",
        "63 Mbit/s",
        "1 Gbit/s",
        "25 Gbit/s",
    ]


def test_resnet_50_has_its_parameters() -> None:
    with torch.device("meta"):
        model = ResidualNetwork()
        assert model(torch.randn(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


def tiny() -> priority.Built:
    x, y = torch.randn(2, 3, 32, 32), torch.randint(10, (2,))
    return ResidualNetwork((1, 1), width=8, classes=10), lambda model: F.cross_entropy(model(x), y)


def test_priority_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(priority, "MODELS", {"tiny": tiny})
    monkeypatch.setattr(priority, "CODEC_NUMEL", 1 << 16)
    monkeypatch.setattr(priority, "SWEEP", [1e5, 1e9])
    file = tmp_path / "priority.json"
    assert cli.main(["priority", "--steps", "2", "--world", "2", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert [way["name"] for way in document["ways"]][:2] == ["float32", "float16"]
    assert document["ways"][0]["bits"] == 32
    (model,) = document["models"]
    trace = model["trace"]
    network, _ = tiny()
    assert sum(trace["numels"]) == sum(p.numel() for p in network.parameters())
    assert sorted(trace["ready"]) == list(range(len(trace["numels"])))
    assert trace["ready"][0] == len(trace["numels"]) - 1, "the head's gradient is complete first"
    assert all(seconds >= 0 for name in ("forward", "backward") for seconds in trace[name])
    assert sum(trace["forward"]) > 0
    assert len(model["arms"]) == len(document["ways"]) == 6
    assert "Links on which priority would pay" in capsys.readouterr().out
