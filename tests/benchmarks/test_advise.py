"""Advice: what is said of which measurements, models that cannot be measured, and a small run of the real thing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gradwire import recommend
from gradwire.benchmarks import cli
from gradwire.benchmarks.common import models
from gradwire.benchmarks.links import links
from gradwire.benchmarks.steps import advise
from hypothesis import given
from hypothesis import strategies as st

NO_LINKS = links.missing()

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

NAMES = ("none", "fp32", "fp16", "7x", "100x")
turns = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12)


def launches_of(*seconds: dict[str, list[float]]) -> list[list[dict[str, Any]]]:
    """Launches on two ranks, of which the second is the slower one."""
    found = []
    for launch in seconds:
        ranks = [
            {
                name: {"seconds": [share * s for s in took], "sends": "compressed", "bits": 1.0}
                for name, took in launch.items()
            }
            for share in (0.5, 1.0)
        ]
        found.append([{"arms": arms, "parameters": 1, "device": "cpu"} for arms in ranks])
    return found


def said(*seconds: dict[str, list[float]], **kept: bool) -> dict[str, Any]:
    rows = advise.summarize(launches_of(*seconds), advise.arms_of("adamw", [7, 100], []))
    return advise.verdict(rows, {"rate": True, "delay": True} | kept)


def steady(**steps: float) -> dict[str, list[float]]:
    return {name: [steps.get(name.replace("x", "_"), steps.get(name, 1.0))] * 9 for name in NAMES}


# -- what is said ------------------------------------------------------------------------------------------------------


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, turns)), min_size=1, max_size=3), st.booleans())
def test_compress_is_said_only_where_the_gain_exceeds_its_error(
    seconds: list[dict[str, list[float]]], rate: bool
) -> None:
    seconds = [{name: took[: min(map(len, launch.values()))] for name, took in launch.items()} for launch in seconds]
    rows = advise.summarize(launches_of(*seconds), advise.arms_of("adamw", [7, 100], []))
    answer = advise.verdict(rows, {"rate": rate, "delay": True})["answer"]
    codecs = [row for row in rows if row["codec"]]
    assert all(row["low"] <= row["gain"] <= row["high"] for row in rows)
    if answer == "compress":
        assert rate
        fastest = max(codecs, key=lambda row: row["gain"])
        assert fastest["gain"] - 1 > fastest["gain"] - fastest["low"]
        assert fastest["low"] > 1.05
    if answer == "do not compress":
        assert all(row["high"] < 1.05 for row in codecs)
    (best,) = [row for row in rows if row["arm"] == rows[0]["best"]]
    assert best["gain"] == best["low"] == best["high"] == 1


def test_advice_follows_the_steps() -> None:
    text = said(steady(fp16=0.5, **{"100_": 0.1}))["says"]
    assert text.startswith("Compress: with gradwire, ChunkedTopK(")
    assert "5.00 [5.00, 5.00] times as fast as with PyTorch's fp16 hook" in text
    assert text.endswith(f"\n    {recommend('adamw', ratio=100).call}")
    assert "register_comm_hook(CompressState(model, QSGD(" in said(steady(**{"7_": 0.1}))["says"]
    text = said(steady(fp16=0.5, **{"100_": 0.49}))["says"]
    assert text.startswith("Do not compress with gradwire: with gradwire, ChunkedTopK(")
    assert "fp16 hook is 2.00 times as fast as PyTorch DDP: model.register_comm_hook(None," in text
    assert "fp16_compress_hook" not in said(steady(fp16=1.1, **{"7_": 1.0}))["says"], "plain DDP is the faster one"


def test_launches_that_differ_leave_no_answer_or_no_number() -> None:
    twice = said(steady(**{"7_": 0.5}), steady(**{"7_": 1.1}))
    assert twice["answer"] == "cannot tell"
    assert "between 0.91 and 2.00 (cannot tell closer" in twice["says"]
    clear = said(steady(**{"7_": 0.5}), steady(**{"7_": 0.25}))
    assert clear["answer"] == "compress"
    assert "between 2.00 and 4.00 (cannot tell closer" in clear["says"]


def test_links_that_miss_their_rate_or_latency_prove_no_gain() -> None:
    fast, slow = steady(**{"7_": 0.5}), steady(**{"7_": 1.2, "100_": 1.2})
    assert said(fast, rate=False)["answer"] == "cannot tell"
    assert said(slow, rate=False)["answer"] == "do not compress", "a faster link favours that more"
    assert said(fast, delay=False)["answer"] == said(slow, delay=False)["answer"] == "cannot tell"


def test_codecs_are_named_or_recommended() -> None:
    arms = advise.arms_of("muon", [100], ["OneBit", "TopK(density=0.5, values=torch.int8)"])
    assert list(arms) == ["none", "fp32", "fp16", "100x", "OneBit", "TopK(density=0.5, values=torch.int8)"]
    assert arms["100x"].every > 1, "under Muon parameters are exchanged"


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--world 1", "--world 1: expected at least 2"),
        ("--world 999", "--world 999: cannot tell on"),
        ("--bandwidth fast", "rate 'fast'"),
        ("--bandwidth none", "--bandwidth none"),
        ("--latency 5", "--latency 5: expected a number and a unit"),
        ("--seconds 0", "--seconds 0.0: expected at least 1"),
        ("--ratio 1", "ratio=1.0: expected from 2"),
        ("--ratio", "nothing to compare"),
        ("--codec nonsense", "--codec nonsense: NameError"),
        ("--codec 3", "--codec 3: expected a codec"),
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


@pytest.mark.parametrize("flag", ["--local 8", "--probe", "--check", "--plot a.png", "--cores 2"])
def test_a_flag_that_is_gone_names_what_took_its_place(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["advise", *flag.split()])
    said = capsys.readouterr().err
    assert "is gone: advise predicts nothing any more" in said
    assert "torchrun" in said


@pytest.mark.parametrize(
    ("latency", "lacks"),
    [(["--latency", "5ms"], "shaped links need a moon"), ([], "there is no cc, gcc or clang: install one")],
)
def test_without_links_it_cannot_measure(
    latency: list[str], lacks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token bucket needs a compiler alone, and gives no latency."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(links, "missing", lambda distance=None: "shaped links need a moon")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert cli.main(["advise", "--model", "small", *latency]) == 2
    said = capsys.readouterr().err
    assert "advise cannot measure here: " in said
    assert f"{lacks}; start it by torchrun" in said


def test_torchruns_ranks_have_a_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["advise", "--bandwidth", "1gbit", "--world", "2"]) == 2
    assert "--bandwidth, --world: torchrun's ranks have a network already" in capsys.readouterr().err


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
    with pytest.raises(models.ModelError, match=complaint):
        models.load(name.format(tiny))


def test_the_command_says_what_is_wrong_with_a_model(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--model", f"{tiny}:alone"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith(f"gradwire-bench: --model {tiny}:alone: alone() returned Linear")


@pytest.mark.skipif(NO_LINKS is not None, reason=str(NO_LINKS))
@pytest.mark.slow
def test_advice_in_miniature(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    line = f"advise --model {tiny}:build --ratio 100 --seconds 1 --bandwidth 100mbit --json advice.json"
    assert cli.main(line.split()) == 0
    document = json.loads((tmp_path / "advice.json").read_text())
    assert [row["arm"] for row in document["arms"]] == ["none", "fp32", "fp16", "100x"]
    assert all(len(row["seconds"]) == 3 for row in document["arms"])
    assert document["answer"] in (advise.COMPRESS, advise.LEAVE, advise.UNKNOWN)
    assert document["says"] in capsys.readouterr().out


@pytest.mark.slow
def test_a_running_group_is_measured(tiny: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = f"-m gradwire.benchmarks.cli advise --model {tiny}:build --ratio 100 --seconds 1 --json group.json"
    clean = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([*launch, *line.split()], capture_output=True, text=True, timeout=120, check=False, env=clean)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks on 1 machine") == 1
    document = json.loads((tmp_path / "group.json").read_text())
    assert len(document["arms"]) == 4
    assert document["emulated"] is None
