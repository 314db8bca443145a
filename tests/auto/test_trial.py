"""The trial of "auto": it takes both ways, and stays with the faster, on every rank, with nothing lost meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from gradwire import Codec, CompressState, OneBit, TopK, compress_hook
from gradwire.hooks.auto import drift, timer, trial
from gradwire.hooks.auto.controller import Controller
from gradwire.hooks.auto.drift import WINDOW, Drift
from gradwire.hooks.auto.planner import HALF_PRECISION, Choice, Planner
from gradwire.hooks.auto.trial import (
    COMPRESSED,
    DROP_RATIO,
    FALLBACK,
    HALF,
    MOST_ROUNDS,
    PLANNED,
    ROUND_STEPS,
    ROUNDS,
    SETTLING,
    UNCOUNTED,
    Trial,
    typical,
)
from gradwire.hooks.core.dense_path import DensePath
from gradwire.hooks.core.session import Session
from gradwire.hooks.exchanges import Dense, Gather
from gradwire.hooks.network import cost, probe
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks, on_ranks
from training import Ledger, batch, pretend, train, two_large_layers

MOST = SETTLING + 2 * MOST_ROUNDS * ROUND_STEPS  # steps where two ways are tried
LATE = 0.02


class Clock:
    """The time of a step, which no load on the machine can change: reading it takes a while, and `late` the rest."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += LATE
        return self.now

    def late(self, times: float) -> None:
        self.now += times * LATE

    @contextmanager
    def times_steps(self) -> Iterator[None]:
        with patch.object(timer, "time", self):
            yield


def against(other: str, least: float) -> tuple[str, dict[str, float]]:
    """What is planned compresses unless compression is what is held against it."""
    return FALLBACK if other == COMPRESSED else COMPRESSED, {other: least}


def end_step(
    trial: Trial,
    seconds: float,
    challengers: Callable[[], tuple[str, dict[str, float]]] = lambda: against(FALLBACK, 0.0),
) -> None:
    """End a step of a lone rank, which took so long."""
    trial.record(trial.steps, seconds)
    trial.end_step(challengers, lambda numbers: numbers)


def take(trial: Trial, spans: dict[str, float], least: float, other: str = FALLBACK) -> list[str]:
    """Steps that take `spans` each, until there is a verdict; the ways they went."""
    ways = []
    while trial.verdict is None:
        ways.append(trial.candidate)
        end_step(trial, spans[trial.candidate], lambda: against(other, least))
        assert len(ways) <= MOST
    return ways


def test_both_ways_get_turns_and_the_faster_wins() -> None:
    trial = Trial()
    ways = take(trial, {PLANNED: 1.0, FALLBACK: 0.9}, least=0.5)
    assert ways == [PLANNED] * SETTLING + ([PLANNED] * ROUND_STEPS + [FALLBACK] * ROUND_STEPS) * ROUNDS
    assert trial.verdict == trial.candidate == FALLBACK
    end_step(trial, 9.9)
    assert trial.verdict == FALLBACK
    assert "planned 1e+03 ms, fallback 900 ms" in str(trial)


@pytest.mark.parametrize(("planned", "verdict", "turns"), [(0.75, PLANNED, MOST_ROUNDS), (0.85, FALLBACK, ROUNDS)])
def test_who_compresses_more_has_to_win_twice(planned: float, verdict: str, turns: int) -> None:
    trial = Trial()
    assert len(take(trial, {PLANNED: planned, FALLBACK: 1.0}, least=0.5)) == SETTLING + 2 * turns * ROUND_STEPS
    assert trial.verdict == verdict


def test_luck_in_the_first_turns_is_not_enough() -> None:
    """Spans of two values, of which the first turns of compression have the shorter."""
    trial, step = Trial(), 0
    while trial.verdict is None:
        lucky = step < SETTLING + 2 * ROUNDS * ROUND_STEPS
        span = 1.0 if trial.candidate == FALLBACK else 0.7 if lucky else 1.1
        end_step(trial, span, lambda: against(FALLBACK, 0.5))
        step += 1
    assert trial.verdict == FALLBACK


def test_a_step_that_waits_for_something_else_does_not_decide() -> None:
    assert typical([1.0, 1.0, 500.0]) == pytest.approx(4 / 3)
    assert typical([1.0, 2.0, 2.0, 1.0]) == 1.5


def test_what_the_network_cannot_carry_is_not_tried() -> None:
    trial = Trial()
    assert take(trial, {PLANNED: 1.0}, least=2.0) == [PLANNED] * (SETTLING + ROUND_STEPS)
    assert trial.verdict == PLANNED


def test_what_is_far_slower_gets_no_second_turn() -> None:
    trial = Trial()
    ways = take(trial, {PLANNED: 1.0, COMPRESSED: 1.1 * DROP_RATIO}, 0.0, COMPRESSED)
    assert ways[SETTLING:] == [PLANNED] * ROUND_STEPS + [COMPRESSED] * ROUND_STEPS
    assert trial.verdict == PLANNED


@given(st.lists(st.floats(0.01, 100.0), min_size=MOST, max_size=MOST), st.floats(0.0, 200.0))
def test_steps_at_the_begin_of_a_turn_do_not_count(spans: list[float], least: float) -> None:
    """Whatever they take, the verdict stays."""

    def verdict(first: float) -> str | None:
        trial = Trial()
        for step, span in enumerate(spans):
            counts = step >= SETTLING and UNCOUNTED <= (step - SETTLING) % ROUND_STEPS < ROUND_STEPS - 1
            end_step(trial, span if counts else first, lambda: against(FALLBACK, least))
        return trial.verdict

    assert verdict(1e-9) == verdict(1e9) is not None


THREE = [(COMPRESSED, [HALF, FALLBACK]), (HALF, [COMPRESSED, FALLBACK]), (FALLBACK, [COMPRESSED, HALF])]


@pytest.mark.parametrize(("level", "others"), THREE)
@pytest.mark.parametrize(
    ("compressed", "half", "fallback", "verdict", "turns"),
    [
        (0.7, 0.85, 1.0, COMPRESSED, MOST_ROUNDS),
        (0.85, 0.85, 1.0, HALF, MOST_ROUNDS),
        (0.85, 0.97, 1.0, FALLBACK, ROUNDS),
        (0.8, 0.6, 0.95, HALF, None),
        (1.0, 1.0, 0.5, FALLBACK, None),
    ],
)
def test_the_best_of_three_ways_wins(
    level: str, others: list[str], compressed: float, half: float, fallback: float, verdict: str, turns: int | None
) -> None:
    spans = {COMPRESSED: compressed, HALF: half, FALLBACK: fallback}
    trial, ways = Trial(), []
    while trial.verdict is None:
        candidate = level if trial.candidate == PLANNED else trial.candidate
        ways.append(candidate)
        end_step(trial, spans[candidate], lambda: (level, dict.fromkeys(others, 0.0)))
    assert (level if trial.verdict == PLANNED else trial.verdict) == verdict
    if turns is not None:
        assert len(ways) == SETTLING + 3 * turns * ROUND_STEPS
    else:  # one of them gets no second turn
        assert min(ways.count(candidate) for candidate in spans) in (ROUND_STEPS, ROUND_STEPS + SETTLING)


def tried(rank: int, beta: float, slow: str, three: bool) -> Any:
    """Train on a network that is said to move a byte in `beta` seconds, and where rank 1 is late in what is slow."""

    reduces, end, clock = {kind: kind.reduce for kind in (Gather, Dense)}, DensePath.end, Clock()

    def late(exchange: Any, *arguments: Any) -> Any:
        yield from reduces[type(exchange)](exchange, *arguments)
        what = "dense" if isinstance(exchange, Dense) else "half" if exchange.codec == HALF_PRECISION else "compressed"
        clock.late(3 * rank * (what in slow))

    def end_late(straight: DensePath) -> None:
        clock.late(3 * rank * ("dense" in slow and "pipeline" not in slow))
        end(straight)

    model, ddp = two_large_layers()
    ledger = Ledger(model)
    speed = cost.CodecSpeed(1e-9, 1e-9)
    with patch.object(probe, "calibration", pretend(beta)), patch.object(probe, "codec_speed", lambda *_: speed):
        state = CompressState(ddp, OneBit(), fallback="auto" if three else torch.float32)
        ddp.register_comm_hook(state, compress_hook)
        assert state.tuning
        steps, digests = 0, []
        slowed = patch.object(Gather, "reduce", late), patch.object(Dense, "reduce", late)
        with slowed[0], slowed[1], patch.object(DensePath, "end", end_late), clock.times_steps():
            while state.tuning:
                digests += train(rank, ddp, range(steps, steps + 1), ledger)
                steps += 1
        digests += train(rank, ddp, range(steps, steps + 3), ledger)
    error, decisions = ledger.error(state), state.statistics().decisions
    state.close()
    return digests, steps, decisions, error


@pytest.mark.parametrize(
    ("beta", "slow", "expected", "steps", "three"),
    [
        (1e-9, "compressed", "dense of OneBit", None, False),
        (1e-9, "dense", "gather of OneBit", None, False),
        (1e-13, "dense", "gather of OneBit", None, False),
        (1e-13, "compressed", "dense of OneBit", None, False),
        (1e-5, "compressed", "gather of OneBit", SETTLING + ROUND_STEPS, False),
        (1e-9, "dense on the pipeline", "dense of OneBit", None, False),
        (1e-9, "compressed, dense", "gather of Cast(dtype=torch.bfloat16)", None, True),
        (1e-13, "compressed, dense", "gather of Cast(dtype=torch.bfloat16)", None, True),
        (1e-9, "compressed, half", "dense of OneBit", None, True),
        (1e-9, "half, dense", "gather of OneBit", None, True),
    ],
)
def test_all_ranks_stay_with_what_was_faster(
    ranks: Ranks, beta: float, slow: str, expected: str, steps: int | None, three: bool
) -> None:
    results = ranks(2).run(tried, beta, slow, three)
    assert results[0][:3] == results[1][:3]
    _, taken, decisions, error = results[0]
    assert taken == steps or (
        steps is None
        and taken in range(SETTLING + 2 * ROUND_STEPS, MOST + three * MOST_ROUNDS * ROUND_STEPS + 1, ROUND_STEPS)
    )
    for text in decisions.values():
        assert text.startswith(expected)
        assert "; from the first bucket to the last, planned" in text
    assert error < 1e-5


@given(st.floats(1e-3, 1e3), st.floats(1.6, 100.0), st.booleans())
def test_a_lasting_change_of_steps_is_seen_and_a_short_one_is_not(span: float, factor: float, faster: bool) -> None:
    drift, other = Drift(), span / factor if faster else span * factor
    for _ in range(10 * WINDOW):
        drift.observe(span)
    for _ in range(WINDOW // 2 - 1):  # fewer than make a median
        drift.observe(other)
    for _ in range(10 * WINDOW):
        drift.observe(span)
    assert not drift.changed
    for _ in range(4 * WINDOW):
        drift.observe(other)
    assert drift.changed
    drift.restart()
    for _ in range(10 * WINDOW):
        drift.observe(other)
    assert not drift.changed, "the new spans are what is usual now"


def changed(rank: int, slow_on: int) -> Any:
    """Compression wins; then it becomes slow on one rank, where the network is a bad one."""
    reduce, clock = Gather.reduce, Clock()

    def late(exchange: Any, *arguments: Any) -> Any:
        yield from reduce(exchange, *arguments)
        clock.late(5 * (rank == slow_on))

    model, ddp = two_large_layers()
    ledger = Ledger(model)
    speed = cost.CodecSpeed(1e-9, 1e-9)
    with (
        patch.object(probe, "calibration", pretend(1e-9)),
        patch.object(probe, "codec_speed", lambda *_: speed),
        patch.object(drift, "WINDOW", 4),
        patch.object(trial, "DROP_RATIO", 1e9),
    ):
        state = CompressState(ddp, OneBit(), fallback=torch.float32)
        ddp.register_comm_hook(state, compress_hook)
        steps, digests = 0, []

        def go_on(condition: Callable[[], bool]) -> None:
            nonlocal steps
            end = steps + 150
            while condition() and steps < end:
                digests.extend(train(rank, ddp, range(steps, steps + 1), ledger))
                steps += 1

        def slow_dense(exchange: Any, *arguments: Any) -> Any:
            yield from dense(exchange, *arguments)
            clock.late(1)

        def slow_straight(straight: DensePath) -> None:
            clock.late(2)
            end(straight)

        dense, end = Dense.reduce, DensePath.end
        slowed = patch.object(Dense, "reduce", slow_dense), patch.object(DensePath, "end", slow_straight)
        with slowed[0], slowed[1], clock.times_steps():
            go_on(lambda: state.tuning)
            decided = steps
            go_on(lambda: steps < decided + 2)
            before = set(state.statistics().decisions.values())
            with patch.object(Gather, "reduce", late):
                go_on(lambda: not state.tuning)
                seen = steps
                go_on(lambda: state.tuning)
                go_on(lambda: steps < seen + 40)
    after, error = set(state.statistics().decisions.values()), ledger.error(state)
    state.close()
    return digests, before, after, error


@pytest.mark.parametrize("slow_on", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_network_that_has_changed_is_tried_again(ranks: Ranks, slow_on: int) -> None:
    """What one rank sees, all act upon."""
    results = ranks(2).run(changed, slow_on)
    assert results[0][:3] == results[1][:3]
    _, before, after, error = results[0]
    assert all(decision.startswith("gather of OneBit") for decision in before)
    assert all(decision.startswith("dense of OneBit") for decision in after)
    assert error < 1e-5


@pytest.mark.parametrize(
    "codec",
    [lambda step: TopK(0.1 * 0.999**step), lambda step: [TopK(0.1), OneBit()][step % 2]],
    ids=["a little in every step", "to and fro"],
)
def test_a_codec_may_change_faster_than_a_trial_lasts(codec: Callable[[int], Codec]) -> None:
    challengers = SimpleNamespace(
        device=torch.device("cpu"),
        needs_trial=lambda choice: True,
        challengers=lambda *_: (COMPRESSED, {FALLBACK: 0.0}),
    )
    controller, ways = Controller(cast(Planner, challengers), True, lambda numbers: numbers), []
    clock = Clock()
    for step in range(2 * MOST + 10):
        choice = controller.follow(Choice(codec(step), "auto", True))
        assert choice.codec == codec(step)
        ways.append(choice.candidate)
        with clock.times_steps():
            controller.begin_timing()
            clock.late(0.0 if choice.candidate == FALLBACK else 9.0)
            controller.ended(list, False)
    assert set(ways) == {PLANNED, FALLBACK}
    assert set(ways[-10:]) == {FALLBACK}
    assert not controller.tuning


@on_ranks(2)
def test_a_rank_that_has_joined_goes_along_with_the_trial(rank: int) -> None:
    """Rank 1 runs out of data in the trial, and is slow to end its steps: nobody there waits for that."""
    averaged = Session.averaged

    def slow(self: Session, seconds: list[float]) -> list[float]:
        found = averaged(self, seconds)
        time.sleep(10 * LATE * rank)
        return found

    model, ddp = two_large_layers()
    speed = cost.CodecSpeed(1e-9, 1e-9)
    with patch.object(probe, "calibration", pretend(1e-9)), patch.object(probe, "codec_speed", lambda *_: speed):
        state = CompressState(ddp, OneBit(), fallback=torch.float32)
        ddp.register_comm_hook(state, compress_hook)
        with patch.object(Session, "averaged", slow), ddp.join():
            for step in range(60 - 55 * rank):  # more than any trial of two ways takes
                ddp(batch(rank, step, model)).square().mean().backward()
    decided, steps = state.tuning, state.step
    state.close()
    assert (decided, steps) == (False, 60)
