"""`gradwire-bench elastic`: its accounting, its kills, its model, and a run in miniature."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire.benchmarks import cli, publish
from gradwire.benchmarks.elastic import accounting, churn, elastic, with_torchft
from gradwire.benchmarks.elastic.accounting import Life
from gradwire.benchmarks.elastic.kills import schedule
from gradwire.benchmarks.elastic.task import Task
from hypothesis import given, settings
from hypothesis import strategies as st

STEP, USUAL, CALL = 0.1, 0.07, 0.001


@dataclass
class Told:
    """Logs of replicas, and what they say, known from how they were made."""

    lives: list[Life] = field(default_factory=list)
    replicas: int = 0
    zero: float = 0.0
    end: float = 0.0
    steps: int = 0
    rounds: int = 0
    death: float = 0.0
    inside: bool = False
    join: float | None = None
    both: bool = False
    differing: int = 0
    restarted: list[float] = field(default_factory=list)


@st.composite
def told(draw: st.DrawFn) -> Told:
    """A replica dies in one round, and another takes its place in the one before which it was taken in, or never."""
    found = Told(replicas=draw(st.integers(2, 5)), rounds=draw(st.integers(9, 14)), inside=draw(st.booleans()))
    every, victim = draw(st.integers(2, 40)), draw(st.integers(0, found.replicas - 1))
    dies = draw(st.integers(2, found.rounds - 3))
    # The round in whose end the newcomer is taken in: that of the death, which then deals with both, or a later one.
    taken = draw(st.one_of(st.none(), st.integers(dies, found.rounds - 2)))
    found.death, more = draw(st.floats(0.01, 3)), draw(st.floats(0.01, 3))
    apart = draw(st.sets(st.integers(1, found.rounds)))
    found.lives = [Life(place, -5.0) for place in range(found.replicas)]
    present, now = list(range(found.replicas)), draw(st.floats(0, 1e4))
    for life in found.lives:
        life.events += [{"event": "joining", "at": now - 1}, {"event": "ready", "at": now}]
    newcomer: Life | None = None
    for number in range(1, found.rounds + 1):
        begun, due = now, now + every * STEP
        seconds = USUAL + (found.death if number == dies else 0.0)
        if number == taken:
            seconds += more
            found.both = number == dies
            found.join = more
        if number == dies:
            present.remove(victim)
            dead = found.lives[victim]
            dead.events.append({"event": "call", "at": begun + CALL, "seconds": CALL, "due": False})
            if found.inside:
                dead.events.append({"event": "due", "at": due})
            dead.killed = due + USUAL / 2 if found.inside else (begun + due) / 2
            if taken is not None:
                newcomer = Life(victim, dead.killed)
        now = due + seconds
        if newcomer is not None and number == taken:
            asked = now - USUAL / 4 if number == dies else (begun + due) / 2
            newcomer.events += [{"event": "joining", "at": asked}, {"event": "ready", "at": now}]
        bits = Counter[str]()
        for place in present:
            digest = f"{number} apart" if number in apart and place == present[0] else str(number)
            bits[digest] += 1
            found.lives[place].events += [
                {"event": "call", "at": begun + CALL, "seconds": CALL, "due": False},
                {"event": "due", "at": due},
                {"event": "call", "at": now, "seconds": seconds, "due": True},
                {"event": "round", "at": now, "round": number, "steps": every, "digest": digest, "views": number},
            ]
        found.differing += len(bits) > 1
        if number == 1:
            found.zero = now
        else:
            found.steps += every * len(present)
        if newcomer is not None and number == taken:
            found.lives.append(newcomer)
            present.append(len(found.lives) - 1)
            found.restarted = [now - newcomer.started, now + every * STEP + USUAL - newcomer.started]
    found.end = now
    return found


@given(told())
def test_figures_are_of_what_happened(logs: Told) -> None:
    found = accounting.summary(logs.lives, logs.zero, logs.end, logs.replicas, STEP)
    assert found["goodput"] == pytest.approx(logs.steps * STEP / (logs.replicas * (logs.end - logs.zero)))
    assert (found["rounds"], found["replica_steps"]) == (logs.rounds - 1, logs.steps)
    assert found["rounds_differing"] == logs.differing
    assert found["round_s"]["median"] == pytest.approx(USUAL)
    assert [kill["inside"] for kill in found["kills"]] == [logs.inside]
    extras = {
        name: found[name]["max"] for name in ("death_between_s", "death_inside_s", "join_s", "both_s") if found[name]
    }
    if logs.both:
        assert extras == {"both_s": pytest.approx(logs.death + (logs.join or 0))}
    else:
        expected = {f"death_{'inside' if logs.inside else 'between'}_s": logs.death}
        assert extras == pytest.approx(expected | ({} if logs.join is None else {"join_s": logs.join}))
    restarts = [found[name] for name in ("restart_step_s", "restart_round_s")]
    assert [spread["median"] for spread in restarts if spread] == pytest.approx(logs.restarted)


@given(told())
def test_losses_stand_at_the_steps_before_them(logs: Told) -> None:
    losses = {number: 1 / number for number in range(1, logs.rounds + 1, 2)}
    curve = accounting.learned(logs.lives, losses)
    assert {point.round: point.loss for point in curve} == losses
    assert curve[0].steps == sum(life.reports[0]["steps"] for life in logs.lives[: logs.replicas])
    assert curve[-1].steps <= logs.steps + curve[0].steps
    for point in curve:
        assert accounting.loss_at(curve, "steps", point.steps) == pytest.approx(point.loss)
        assert accounting.loss_at(curve, "round", point.round) == pytest.approx(point.loss)
    before, after = curve[:2]
    between = accounting.loss_at(curve, "steps", (before.steps + after.steps) / 2)
    assert between == pytest.approx((before.loss + after.loss) / 2)
    assert accounting.loss_at(curve, "steps", curve[-1].steps + 1) is None
    assert accounting.loss_at(curve, "round", 0) is None


def test_a_restored_state_is_reported_once() -> None:
    """torchft's rounds that fail leave a state of the same name."""
    report = {"event": "round", "at": 1.0, "round": 1, "steps": 5, "digest": "a"}
    life = Life(0, 0.0, [report, {**report, "at": 2.0, "steps": 0}, {**report, "at": 3.0, "round": 2, "digest": "b"}])
    assert [(one["round"], one["at"]) for one in life.reports] == [(1, 1.0), (2, 3.0)]
    assert accounting.summary([life], 1.0, 4.0, 1, 0.1)["replica_steps"] == 5


@given(st.integers(0, 99), st.floats(0, 1e3), st.floats(1, 1e3), st.integers(2, 9))
def test_one_dies_in_each_piece_of_time(seed: int, seconds: float, every: float, replicas: int) -> None:
    kills = schedule(seed, seconds, every, replicas)
    assert [int(kill.at // every) for kill in kills] == list(range(int(seconds // every)))
    assert all(0 <= kill.at < seconds and kill.replica in range(replicas) for kill in kills)
    assert kills == schedule(seed, seconds, every, replicas)
    assert kills == schedule(seed, 2 * seconds, every, replicas)[: len(kills)]


# -- the model ------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(2, 8), st.floats(0, 30), st.integers(0, 9))
def test_a_death_costs_its_own_steps_its_restart_and_the_wait(replicas: int, restart: float, seed: int) -> None:
    training, kill_every = 10.0, 400.0
    costs = churn.Costs(round=0.0, death=0.0, join=0.0, restart=restart)
    found = churn.goodput(costs, replicas, training, kill_every, seed=seed)
    lost = restart + training  # half a round of its own on average, and half of one until the next begins
    assert 1 - found == pytest.approx(lost / (replicas * kill_every), rel=0.1)


@given(st.sampled_from(["round", "death", "join", "restart"]), st.floats(0.5, 20), st.integers(0, 9))
def test_costs_cost(name: str, more: float, seed: int) -> None:
    costs = {"round": 0.1, "death": 0.2, "join": 0.2, "restart": 3.0}
    cheap = churn.goodput(churn.Costs(**costs), 4, 3.0, 12.0, seed=seed)
    dear = churn.goodput(churn.Costs(**costs | {name: costs[name] + more}), 4, 3.0, 12.0, seed=seed)
    assert 0 < dear < cheap < 1


# -- the task -------------------------------------------------------------------------------------------------------


def test_the_task_can_be_learned_and_states_are_whole() -> None:
    task, generator = Task(1), torch.Generator().manual_seed(5)
    assert 0.9e6 < task.state().numel() < 1.1e6
    first, at_first = task.state().clone(), task.held_out(task.state())
    optimizer = torch.optim.AdamW(task.student.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(generator).backward()
        optimizer.step()
    assert task.held_out(task.state()) < 0.9 * at_first
    assert task.held_out(first) == at_first
    assert torch.equal(Task(1).state(), first)
    assert not torch.equal(Task(2).state(), first)


# -- the command ----------------------------------------------------------------------------------------------------


def test_without_torchft_its_arms_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(with_torchft, "version", lambda: None)
    assert "torchft" not in publish.parsed(["elastic"]).arms
    assert cli.main(["elastic", "--rate", "none", "--arms", "torchft"]) == 2
    assert "torchft is not installed; pip install torchft" in capsys.readouterr().err
    monkeypatch.setattr(with_torchft, "version", lambda: "0.2.0")
    assert "torchft" in publish.parsed(["elastic"]).arms


def run(tmp_path: Path, line: str) -> dict[str, Any]:
    file = tmp_path / "elastic.json"
    whole = f"elastic --rate none --replicas 3 --seconds 20 --every 5 --step 0.1 --kill-every 20 {line} --json {file}"
    assert cli.main(whole.split()) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, "--arms gradwire gradwire-undisturbed without-meeting --seed 3")
    killed = found["runs"][0]
    assert [len(one["kills"]) for one in found["runs"]] == [1, 0, 0]
    for one in found["runs"]:
        assert one["rounds_differing"] == 0 < one["rounds_compared"]
        assert 0 < one["goodput"] <= 1
        assert one["failures"] == []
    assert killed["restart_round_s"]["count"] == 1
    assert killed["counts"]["healed_bytes"] > 0
    said = capsys.readouterr().out
    assert "had the same bits" in said
    assert "NOT SHAPED" in said
    for table in elastic.tables(found):
        assert publish.markdown(table).startswith("**")


@pytest.mark.slow
def test_kills_inside_an_exchange_in_miniature(tmp_path: Path) -> None:
    (one,) = run(tmp_path, "--arms gradwire --kill-in exchange")["runs"]
    assert [kill["inside"] for kill in one["kills"]] == [True]
    assert one["rounds_differing"] == 0 < one["rounds_compared"]


@pytest.mark.slow
@pytest.mark.skipif(with_torchft.version() is None, reason="torchft is not installed")
def test_torchft_in_miniature(tmp_path: Path) -> None:
    found = run(tmp_path, "--arms torchft torchft-undisturbed")
    assert found["environment"]["torchft"] == with_torchft.version()
    assert [len(one["kills"]) for one in found["runs"]] == [1, 0]
    assert all(0 < one["goodput"] <= 1 for one in found["runs"])
