"""Advice: the simulation's laws, the network of flags, what is said of them, and a small run of the real thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gradwire.benchmarks import cli
from gradwire.benchmarks.advisor import advice, check, measurement, prediction
from gradwire.benchmarks.advisor.network import PAYLOAD
from gradwire.benchmarks.advisor.prediction import Here
from gradwire.benchmarks.advisor.step_simulation import Job, Processors, Profile, Task, predict, run, share, simulate
from gradwire.benchmarks.common.arms import PREDICTED
from gradwire.compress import OneBit
from gradwire.hooks.exchanges import BucketSpec, Gather, TwoPass
from gradwire.hooks.exchanges.dense import all_reduce_estimate
from gradwire.hooks.network import cost
from gradwire.hooks.network.cost import CodecSpeed, Work
from hypothesis import given
from hypothesis import strategies as st

TINY = """
import torch
from torch import nn

def build():
    x = torch.randn(4, 64)
    return nn.Linear(64, 64), lambda model: model(x).square().mean()

class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.used(x)

def spare():
    return Spare(), lambda model: model(torch.ones(1, 4)).sum()

def alone():
    return nn.Linear(2, 2)

def frozen():
    return nn.Linear(2, 2).requires_grad_(False), lambda model: model(torch.ones(2)).sum()

def vector():
    return nn.Linear(2, 2), lambda model: model(torch.ones(2))

def detached():
    return nn.Linear(2, 2), lambda model: model(torch.ones(2)).sum().detach()

def nan():
    return nn.Linear(2, 2), lambda model: model(torch.ones(2)).sum() * float("nan")

def broken():
    raise RuntimeError("no data")

def mismatch():
    return nn.Linear(2, 2), lambda model: model(torch.ones(3)).sum()

def sparse():
    return nn.Embedding(4, 4, sparse=True), lambda model: model(torch.tensor([1])).sum()

value = 3
"""

seconds = st.floats(0.0, 1.0)
#: How many jobs are under way at once.
TOGETHER = (1, 2, cost.UNLIMITED)
positive = st.floats(1e-3, 1.0)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    n = draw(st.integers(1, 5))
    parts = draw(st.lists(positive, min_size=n, max_size=n))
    ready = tuple(sum(parts[: i + 1]) for i in range(n))
    copies = tuple(draw(st.lists(seconds, min_size=n, max_size=n)))
    return Profile((1,) * n, draw(seconds), ready, copies, draw(seconds))


def jobs_for(profile: Profile) -> st.SearchStrategy[list[Job]]:
    n = len(profile.numels)
    return st.lists(st.builds(Job, *[seconds] * 6, st.integers(1, 3)), min_size=n, max_size=n)


# -- the simulation ----------------------------------------------------------------------------------------------------


@given(profiles(), st.sampled_from(TOGETHER), st.sampled_from([Processors(), Processors(4.0, 2), Processors(0.5, 1)]))
def test_what_costs_nothing_takes_the_floor(profile: Profile, at_once: int, processors: Processors) -> None:
    prediction = predict(profile, [Job()] * len(profile.numels), processors, at_once)
    slower = max(1.0, processors.threads / processors.cores)  # fewer cores than threads
    assert prediction.step == pytest.approx(profile.floor * slower)
    if slower == 1:
        assert prediction.tax == pytest.approx(0, abs=1e-9)
        assert prediction.bottleneck == "backward"
        assert prediction.hidden == 1


@given(st.data(), profiles(), st.sampled_from(TOGETHER), st.floats(1.0, 8.0))
def test_no_step_beats_what_bounds_it(data: st.DataObject, profile: Profile, at_once: int, cores: float) -> None:
    jobs = data.draw(jobs_for(profile))
    step = simulate(profile, jobs, Processors(cores, 1), at_once)
    serial = profile.floor + sum(job.seconds for job in jobs)
    assert step <= serial + 1e-6, "at worst, one thing after the other"
    assert step >= profile.floor - 1e-6
    assert step >= sum(job.moving for job in jobs) - 1e-6, "the link carries one bucket after the other"
    work = profile.floor + sum(job.inline + job.encode + job.processor + job.decode for job in jobs)
    assert step >= work / cores - 1e-6, "nor do cores do more than they can"
    prediction = predict(profile, jobs, Processors(cores, 1), at_once)
    assert prediction.step == step
    assert 0 <= prediction.hidden <= 1


@given(st.data(), profiles(), st.sampled_from(TOGETHER), st.floats(0.0, 1.0))
def test_where_cores_suffice_more_bandwidth_never_slows(
    data: st.DataObject, profile: Profile, at_once: int, factor: float
) -> None:
    # What is decoded earlier may keep the thread from encoding, and a later stage the link from an earlier one.
    jobs = [replace(job, decode=0.0, stages=1) for job in data.draw(jobs_for(profile))]
    faster = [replace(job, transfer=job.transfer * factor) for job in jobs]
    many = Processors(64.0, 1)
    assert simulate(profile, faster, many, at_once) <= simulate(profile, jobs, many, at_once) + 1e-6


@given(st.data(), st.sampled_from(TOGETHER))
def test_one_bucket_cannot_overlap(data: st.DataObject, at_once: int) -> None:
    profile = Profile((1,), data.draw(seconds), (data.draw(positive),), (data.draw(seconds),), data.draw(seconds))
    (job,) = data.draw(jobs_for(profile))
    prediction = predict(profile, [job], Processors(), at_once)
    assert prediction.step == pytest.approx(profile.floor + job.seconds)
    assert prediction.hidden == pytest.approx(0, abs=1e-6) or job.seconds < 1e-9


def test_two_buckets_overlap_as_far_as_cores_reach() -> None:
    profile = Profile((1, 1), 0.0, (1.0, 3.0), (0.0, 0.0), 0.0)
    moving = [Job(transfer=2.0), Job(transfer=0.5)]
    assert simulate(profile, moving, Processors(), 1) == pytest.approx(3.5)
    encoding = [Job(encode=1.0), Job()]
    assert simulate(profile, encoding, Processors(2.0, 1), 1) == pytest.approx(3.0)
    assert simulate(profile, encoding, Processors(), 1) == pytest.approx(4.0), "one core does both"
    decoding = [Job(transfer=2.0, decode=2.0), Job(transfer=1.0, decode=1.0)]
    many = Processors(8.0, 1)
    assert simulate(profile, decoding, many, cost.UNLIMITED) == pytest.approx(6.0), (
        "one thread decodes, while the link goes on"
    )
    latent = [Job(latency=5.0), Job()]
    assert predict(profile, latent, many, cost.UNLIMITED).bottleneck == "latency"
    assert predict(profile, moving, many, cost.UNLIMITED).bottleneck == "transfer"


def test_what_is_under_way_at_once_waits_for_the_distance_together() -> None:
    profile = Profile((1,) * 8, 0.0, tuple(0.1 * n for n in range(1, 9)), (0.0,) * 8, 0.0)
    jobs, many = [Job(latency=5.0, transfer=0.1)] * 8, Processors(8.0, 1)
    assert simulate(profile, jobs, many, cost.UNLIMITED) == pytest.approx(0.8 + 5.1)
    assert simulate(profile, jobs, many, 1) == pytest.approx(0.1 + 8 * 5.1)
    assert simulate(profile, jobs, many, 2) == pytest.approx(0.2 + 4 * 5.1)
    stages = [Job(latency=10.0, transfer=0.2, stages=2)] * 8
    assert simulate(profile, stages, many, cost.UNLIMITED) == pytest.approx(0.8 + 10.2)


def test_a_message_waits_for_a_busy_core() -> None:
    profile = Profile((1, 1), 0.0, (1.0, 3.0), (0.0, 0.0), 0.0)
    jobs, many = [Job(latency=0.5, transfer=1.0)] * 2, Processors(8.0, 1, waking=0.25)
    assert simulate(profile, jobs, many, 1) == pytest.approx(4.5), "one is free"
    assert simulate(profile, jobs, Processors(1.0, 1, waking=0.25), 1) == pytest.approx(4.5), "none computes then"
    long = [Job(latency=3.0, transfer=0.5), Job(transfer=0.1)]
    assert simulate(profile, long, Processors(1.0, 1, waking=0.25), cost.UNLIMITED) == pytest.approx(4.75)
    assert simulate(profile, [Job()] * 2, Processors(1.0, 1, waking=0.25), 1) == pytest.approx(3.0), "no message"


def test_cores_are_shared_fairly() -> None:
    assert share([1.0, 1.0], 1.0) == [0.5, 0.5]
    assert share([1.0, 0.25], 1.0) == [0.75, 1.0]
    assert share([1.0, 0.0], 2.0) == [1.0, 1.0]
    assert run([Task(1.0, 1.0, ()), Task(2.0, 1.0, ()), Task(1.0, 1.0, (0,))], 1.0) == pytest.approx([2.0, 4.0, 4.0])


# -- from flags to advice ----------------------------------------------------------------------------------------------


def here(**changes: Any) -> Here:
    """A machine on which a 25 M model takes 100 ms, and codecs 1 ns an element."""
    messages = {
        "lines": {name: {"alpha": 1e-4, "beta": 1e-9} for name in ("all_gather", "all_to_all", "all_reduce")},
        "latency": {"gather": 1e-4, "union": 2e-4, "split": 5e-4},
        "processor": dict.fromkeys(("exchange", "float32", "float16"), 1e-9),
        "waking": 0.0,
        "gloo": True,
    }
    profile = Profile((5_000_000, 20_000_000), 0.03, (0.02, 0.06), (0.0, 0.0), 0.01)
    speeds = dict.fromkeys(measurement.CODECS, CodecSpeed(1e-9, 2e-10, 2e-10))
    work = Work(2e-9, 2e-9, 2e-9, 2e-9, 5e-11, 5e-10)
    made = Here(25_000_000, "cpu", 4, profile, speeds, (5e-10, 5e-10), work, messages, Processors())
    return replace(made, **changes)


def steps(machine: Here, rate: float, world: int = 2, local: int = 1, latency: float = 0.0) -> dict[str, Any]:
    network = machine.network(world, local, rate, latency, None)
    return {row["arm"]: row for row in prediction.predictions(machine, network)}


def test_advice_follows_the_network() -> None:
    free = {**here().messages, "processor": dict.fromkeys(("exchange", "float32", "float16"), 0.0)}
    fast = advice.recommend(list(steps(here(messages=free), 1e14).values()))
    assert fast.startswith("Do not compress with gradwire")
    slow = advice.recommend(list(steps(here(), 1e8).values()))
    assert slow.startswith("Compress: with gradwire, TopK(density=0.001)")
    assert "CompressState(model, TopK(density=0.001))" in slow
    assert "gradwire.recommend for codecs" in slow
    rows: list[dict[str, Any]] = [
        {"what": "plain", "codec": None, "step_s": 2.0, "received_bytes": 4},
        {"what": "half", "codec": None, "step_s": 1.0, "received_bytes": 2},
        {"what": "bits", "codec": "OneBit()", "step_s": 0.99, "received_bytes": 1},
    ]
    text = advice.recommend(rows)
    assert text.startswith("Do not compress")
    assert "half is 2.00 times as fast as plain DDP" in text
    rows[2]["step_s"] = 0.88
    rows.append({"what": "few", "codec": "TopK()", "step_s": 0.8, "received_bytes": 0.1})
    assert advice.recommend(rows).startswith("Compress: with bits"), "what is nearly as fast and leaves out less"
    rows[3]["step_s"] = 0.7
    assert advice.recommend(rows).startswith("Compress: with few")


@pytest.mark.parametrize(("world", "local"), [(2, 1), (16, 1), (16, 8), (8, 8)])
def test_more_bandwidth_predicts_no_slower_step(world: int, local: int) -> None:
    before: dict[str, Any] = {}
    for exponent in range(16, 25):
        rows = steps(here(), 10 ** (exponent / 2), world, local, 50e-6)
        for name, row in rows.items():
            # On one core, work that is done earlier can be in the way of other work: by no more than there is.
            assert row["step_s"] <= before.get(name, {}).get("step_s", 1e9) * 1.02
        before = rows


def test_dense_all_reduce_takes_what_its_bytes_need() -> None:
    row = steps(here(), 1e9)["fp32"]
    assert row["received_bytes"] == 100e6
    # The first bucket is ready 50 ms after the step's start, and from then on the link is busy.
    assert row["step_s"] == pytest.approx(0.05 + 100e6 * 8 / 1e9 / PAYLOAD + 0.01, rel=0.01)
    assert row["bottleneck"] == "transfer"
    assert steps(here(element_bytes=2), 1e9)["fp32"]["received_bytes"] == 50e6


def test_ranks_of_a_node_share_its_card() -> None:
    alone, crowded = (steps(here(), 1e9, 16, local) for local in (1, 8))
    assert crowded["fp32"]["step_s"] == pytest.approx(alone["fp32"]["step_s"], rel=0.05), "one ring, whatever the node"
    assert steps(here(), 1e8, 16, 8)["onebit"]["exchange"].startswith("hierarchical")
    network = here().network(16, 8, 1e9, 0.0, None)
    assert network.nodes is not None
    assert network.nodes.between.all_reduce.beta == pytest.approx(8 * network.flat.all_reduce.beta)
    assert here().network(8, 8, 1e9, 0.0, None).nodes is None
    inside = here().network(8, 8, 1e3, 1.0, 8e9)
    assert inside.flat.all_reduce.beta == pytest.approx(1e-9), "one node needs no card"
    assert inside.flat.all_to_all.alpha == pytest.approx(1e-4)


def test_a_distance_costs_each_stage_once() -> None:
    near, far = (steps(here(), 1e9, latency=latency) for latency in (0.0, 0.025))
    for name in ("onebit", "topk", "qsgd", "terngrad"):
        assert near[name]["exchange"] == far[name]["exchange"] == "gather"
        assert far[name]["step_s"] - near[name]["step_s"] == pytest.approx(0.025, abs=4e-3), "some hides"
    many = here(profile=Profile((625_000,) * 40, 0.03, tuple(0.0015 * n for n in range(1, 41)), (0.0,) * 40, 0.01))
    near, far = (steps(many, 1e9, latency=latency) for latency in (0.0, 0.025))
    assert far["onebit"]["step_s"] - near["onebit"]["step_s"] == pytest.approx(0.025, abs=4e-3)
    # 2.5 MB of 40 buckets each, two at a time: four rounds of a way each, and no more, as they are short of 4 MB.
    assert far["fp32"]["step_s"] > 20 * 4 * 0.025
    assert far["fp32"]["bottleneck"] == "latency"


def test_gloos_all_reduce_goes_round_piece_by_piece() -> None:
    reduce = here().network(2, 1, 1e9, 0.025, None).flat.all_reduce
    assert reduce.alpha == pytest.approx(4 * 0.025 + 1e-4)
    bytes_second = 1e9 * PAYLOAD / 8
    assert reduce.transfer(1e6) == pytest.approx(1e6 / bytes_second)
    assert reduce.transfer(100 << 20) == pytest.approx((100 << 20) / bytes_second + 96 * 0.025, rel=0.01)
    assert here().network(4, 1, 1e9, 0.025, None).flat.all_reduce.alpha == pytest.approx(12 * 0.025 + 3e-4)


def test_many_buckets_share_the_wait_and_few_do_not() -> None:
    """Of sixteen ranks gather waits once and moves much, and two_pass twice and little."""
    network = here().network(16, 1, 1e9, 0.025, None).flat
    what = BucketSpec(OneBit(), CodecSpeed(0.0, 0.0), 250_000, 16)
    candidates = [Gather.estimate(network, what), TwoPass.estimate(network, what)]
    assert [estimate.stages for estimate in candidates] == [1, 2]
    assert cost.decide(candidates).name == "gather"
    decision = cost.decide(candidates, buckets=40)
    assert decision.name == "two_pass"
    assert str(decision).startswith("of 40 buckets that wait together: two_pass")
    dense = all_reduce_estimate(network, 250_000, 16)
    assert dense.among(40) == dense.among(2) == pytest.approx(dense.seconds - dense.latency / 2)


def test_a_gpu_has_no_network_stack() -> None:
    found = {
        "parameters": 10,
        "device": "cuda:0",
        "element_bytes": 4,
        "profile": {"numels": [10], "forward": 1.0, "ready": [1.0], "copy_back": [0.0], "optimizer": 0.0},
        "codecs": {name: {"encode": 0.0, "decode": 0.0} for name in measurement.CODECS},
        "casts": [0.0, 0.0],
        "work": dict.fromkeys(("pack", "unpack", "merge", "scatter", "sweep", "dense"), 0.0),
    }
    messages = {**here().messages, "waking": 1e-3}
    assert prediction.read({**found, "device": "cpu"}, messages, 8.0, 8).processors == Processors(8.0, 8, 1e-3)
    machine = prediction.read(found, messages, 8.0, 8)
    assert machine.processors == Processors()
    network = machine.network(2, 1, 1e9, 1e-3, None)
    assert network.flat.all_to_all.alpha == 1e-3
    assert network.flat.all_to_all.beta == pytest.approx(8e-9 / PAYLOAD)
    assert set(network.processor.values()) == {0.0}


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    curves = {rate: list(steps(here(), rate).values()) for rate in (1e8, 1e10)}
    advice.plot(str(tmp_path / "deep" / "advice.png"), curves, 1e9, "title")
    assert (tmp_path / "deep" / "advice.png").read_bytes().startswith(b"\x89PNG")


def test_a_check_compares() -> None:
    measured = [
        {"arm": "none", "what": "floor", "step_s": 2.0, "step_quartiles_s": (1.0, 3.0), "times_s": [[2.0]]}
        | dict.fromkeys(("sent_bytes", "encode_s", "exchange_s", "decode_s"))
    ]
    (row,) = check.compare(measured, [{"none": {"step_s": 3.5}}, {"none": {"step_s": 2.5}}])
    assert row["ratio"] == 1.5
    assert (row["predicted_s"], row["measured_s"]) == (3.0, 2.0)
    assert [prediction["step_s"] for prediction in row["predictions"]] == [3.5, 2.5]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--world 1", "--world 1: expected at least 2"),
        ("--world 6 --local 4", "divides --world 6"),
        ("--bandwidth fast", "rate 'fast'"),
        ("--bandwidth none", "--bandwidth none"),
        ("--latency 5", "--latency 5: expected a number and a unit"),
        ("--cores 0", "--cores 0: expected more than 0"),
        ("--check --rates none", "--rates none"),
        ("--probe", "--probe needs a running group"),
    ],
)
def test_bad_flags_say_so(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["advise", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of models, in the folder we are in."""
    (tmp_path / "tiny_models.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "tiny_models"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nothing", "expected module:function"),
        ("no_such_module:build", "there is no module 'no_such_module'"),
        ("gradwire.nowhere:build", "there is no module 'gradwire.nowhere'"),
        ("{}:missing", "has no 'missing'"),
        ("{}:value", "not a function"),
        ("{}:broken", r"broken\(\) failed: RuntimeError: no data .*tiny_models.py, line"),
        ("{}:alone", r"returned Linear: expected a tuple \(model, loss\)"),
        ("{}:frozen", "no parameter that requires a gradient"),
        ("{}:vector", r"a tensor of shape \(2,\)"),
        ("{}:detached", "a tensor without a gradient"),
        ("{}:nan", "is nan: it must be finite"),
        ("{}:mismatch", "loss.model. failed: RuntimeError"),
        ("{}:spare", "does not use parameter 'spare.weight'"),
        ("{}:sparse", "'weight' is sparse"),
    ],
)
def test_a_model_that_cannot_be_measured(tiny: str, name: str, complaint: str) -> None:
    with pytest.raises(measurement.ModelError, match=complaint):
        measurement.load(name.format(tiny))


def test_the_command_says_what_is_wrong_with_a_model(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--model", f"{tiny}:alone"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"gradwire-bench: --model {tiny}:alone: alone() returned Linear")


def test_advice_in_miniature(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"advise --model {tiny}:build --world 4 --local 2 --cores 1 --json advice.json --plot advice.png"
    assert cli.main(line.split()) == 0
    document = json.loads((tmp_path / "advice.json").read_text())
    assert document["benchmark"] == "advise"
    assert document["measured"]["parameters"] == 64 * 64 + 64
    assert document["measured"]["profile"]["numels"] == [64 * 64 + 64]
    assert [row["arm"] for row in document["arms"]] == [arm.name for arm in PREDICTED]
    assert all(row["step_s"] >= row["floor_s"] > 0 for row in document["arms"])
    assert "4 ranks on 2 nodes" in capsys.readouterr().out
    assert (tmp_path / "advice.png").exists()


@pytest.mark.slow
def test_a_running_group_is_probed(tiny: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = f"-m gradwire.benchmarks.cli advise --model {tiny}:build --probe --json probed.json"
    done = subprocess.run([*launch, *line.split()], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the network as probed") == 1
    document = json.loads((tmp_path / "probed.json").read_text())
    assert (document["network"]["world_size"], document["network"]["local_size"]) == (2, 2)
    assert document["network"]["flat"]["all_gather"]["points"], "a probe has measured several sizes"


def test_a_step_is_cut_into_its_parts() -> None:
    row = measurement.durations([1.0, 3.0, 6.0, 7.0, 9.0])
    assert row == [1.0, 2.0, 5.0, 1.0, 2.0]
    assert measurement.total(row) == 9.0


def test_memory_is_kept_for_the_check_alone() -> None:
    before = dict(os.environ)
    with check.keeping_memory():
        assert os.environ["MALLOC_TRIM_THRESHOLD_"] == str(1 << 40)
    assert dict(os.environ) == before
