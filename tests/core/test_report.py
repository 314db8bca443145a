"""A user hears once what is sent, on one rank, and again when that changes; and can read the counts at any time."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fronts import FRONTS, marked
from gradwire import Cast, Codec, CompressState, Identity, OneBit, TopK, compress_hook
from gradwire.compress.aggregation import Aggregation
from gradwire.hooks.auto.planner import HALF_PRECISION, Choice, Plan
from gradwire.hooks.auto.trial import Trial
from gradwire.hooks.core import report
from gradwire.hooks.core.statistics import WIDTH, Statistics
from gradwire.hooks.network import cost, probe
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch import nn
from training import batch, perceptron, pretend, train, two_large_layers, wrap

DOCS = Path(__file__).parents[2] / "docs"


@contextlib.contextmanager
def heard() -> Iterator[Callable[[], list[str]]]:
    """The lines so far that this process writes to stderr, as one whose user has not set up logging."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        yield lambda: [line for line in written.getvalue().splitlines() if line.startswith("gradwire: ")]


# -- the text --------------------------------------------------------------------------------------------------------

DENSE, GATHER, HALF = (
    Plan(TopK(0.01), "dense", False),
    Plan(TopK(0.01), "gather", True),
    Plan(HALF_PRECISION, "two_pass", True),
)
WORDS = {DENSE: "float32", GATHER: "TopK(density=0.01) by 'gather'", HALF: "bfloat16 by 'two_pass'"}


def estimate(name: str, seconds: float) -> cost.Estimate:
    return cost.Estimate(name, 1e6, 0.0, seconds, 0.0, 0.0)


@given(
    st.lists(st.sampled_from([DENSE, GATHER, HALF]), min_size=1, max_size=8),
    st.sampled_from(["auto", "gather"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1, 7]),
    st.integers(0, 1 << 24),
)
def test_a_line_names_all_that_is_sent(
    plans: list[Plan], exchange: str, tuning: bool, tried: bool, warmup: int, sent: int
) -> None:
    times = {"compressed": 3e-3, "float32": 1e-3} if tried and not tuning else {}
    controller: Any = SimpleNamespace(tuning=tuning, timed=times)
    why = cost.Decision("dense", (estimate("dense", 0.2), estimate("gather", 0.5), estimate("split in bfloat16", 0.3)))
    choice = Choice(TopK(0.01), exchange, True, warmup=warmup)
    said = list[tuple[int, str]]()
    statistics = Statistics()
    with patch.object(report, "say", lambda text, level: said.append((level, text))):
        for _ in range(2):
            report.report(statistics, choice, plans, (1 << 22, sent), why=[why] * len(plans), controller=controller)
    [(level, text)] = said
    auto, less = exchange == "auto", set(plans) != {GATHER}
    assert text.startswith(("'auto' " if auto else "") + ("begins with " if tuning else "sends "))
    assert "\n" not in text
    for plan in set(plans):
        counted = f"{WORDS[plan]} ({plans.count(plan)} of {len(plans)} buckets)"
        assert (WORDS[plan] if len(set(plans)) == 1 else counted) in text
    assert ("fallback=None" in text) == (auto and less and not tuning)
    assert level == (logging.WARNING if auto and less and not tuning else logging.INFO)
    assert (f"(warmup_steps={warmup})" in text) == bool(warmup)
    assert ("instead of TopK(density=0.01)" in text) == (auto and GATHER not in plans and not warmup)
    if auto and not times:
        whole = (n * len(plans) * 100 for n in (2, 3, 5))
        assert (
            "predicted for a step: float32 {:.3g} ms, bfloat16 {:.3g} ms, compressed {:.3g} ms".format(*whole) in text
        )
    assert ("timed for a step: float32 1 ms, compressed 3 ms" in text) == (auto and bool(times))
    if sent:
        ratio = (1 << 22) / sent
        fewer, more = f"{ratio:.3g} times fewer bytes than float32", f"{1 / ratio:.3g} times the bytes of float32"
        words = fewer if ratio > 1 else more
        assert (words in text) == (abs(ratio - 1) >= 0.005)


@given(st.lists(st.tuples(st.sampled_from([DENSE, GATHER, HALF]), st.integers(1, 300)), min_size=1, max_size=20))
def test_another_line_says_something_else(steps: list[tuple[Plan, int]]) -> None:
    """Whatever a schedule does: the last line is right about what is sent, and about the bytes up to a factor of 2."""
    said, statistics = list[tuple[Plan, int]](), Statistics()
    choice = Choice(TopK(0.01), "auto", True)
    for step in steps:
        with patch.object(report, "say", lambda *_, step=step: said.append(step)):
            report.report(statistics, choice, [step[0]], (1000, step[1]))
        plan, sent = said[-1]
        assert plan == step[0]
        assert 0.5 < sent / step[1] < 2
    assert len(said) <= 1 + sum(a != b for a, b in pairwise(steps))


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (TopK(density=0.01), "TopK(density=0.01)"),
        (TopK(density=0.02, values=torch.bfloat16), "TopK(density=0.02, values=torch.bfloat16)"),
        (Aggregation(OneBit(block=256)), "Aggregation(inner=OneBit(block=256))"),
        (Identity(), "Identity()"),
    ],
    ids=str,
)
def test_codecs_are_named_as_users_write_them(codec: Codec, text: str) -> None:
    assert report.brief(codec) == text
    assert eval(text, {**vars(__import__("gradwire")), "torch": torch, "Aggregation": Aggregation}) == codec


# -- where it goes ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unconfigured() -> Iterator[logging.Logger]:
    """The logger in a process whose user has not touched logging: pytest has handlers at the root."""
    log, root = logging.getLogger("gradwire"), logging.getLogger()
    before, root.handlers, last = root.handlers, [], logging.lastResort
    try:
        yield log
    finally:
        log.setLevel(logging.NOTSET)
        log.handlers, log.filters, log.disabled, root.handlers, logging.lastResort = [], [], False, before, last
        logging.disable(logging.NOTSET)


def test_a_user_who_has_set_up_nothing_sees_it() -> None:
    with unconfigured(), heard() as lines:
        report.say("sends it", logging.INFO)
        report.say("sends it not", logging.WARNING)
    assert lines() == ["gradwire: sends it", "gradwire: sends it not"]


@pytest.mark.parametrize(
    "silence",
    [
        lambda log: log.setLevel(logging.ERROR),
        lambda log: setattr(log, "disabled", True),
        lambda log: log.addHandler(logging.NullHandler()),
        lambda log: log.addFilter(lambda record: False),
        lambda log: logging.disable(),
        lambda log: logging.getLogger().addHandler(logging.NullHandler()),
        lambda log: setattr(logging, "lastResort", None),
    ],
    ids=["level", "disabled", "handler", "filter", "all disabled", "root's handler", "no last resort"],
)
def test_a_user_can_silence_it(silence: Callable[[logging.Logger], None]) -> None:
    with unconfigured() as log, heard() as lines:
        silence(log)
        report.say("sends it", logging.WARNING)
    assert not lines()


def test_a_user_s_logging_gets_it(caplog: pytest.LogCaptureFixture) -> None:
    with heard() as lines, caplog.at_level(logging.WARNING, "gradwire"):
        report.say("sends it", logging.INFO)
        report.say("sends it not", logging.WARNING)
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("gradwire", "sends it not")]
    assert not lines()


# -- on ranks --------------------------------------------------------------------------------------------------------


def trained(rank: int, codec: Any, options: dict[str, Any], beta: float, steps: int) -> list[str]:
    """Steps, a copy of the state that goes on, and a second connection, which bring no news."""
    _, ddp = two_large_layers()
    speeds = {Cast: 1e-10}
    with (
        heard() as lines,
        patch.object(probe, "calibration", pretend(beta)),
        patch.object(probe, "codec_speed", lambda codec, *_: cost.CodecSpeed(*[speeds.get(type(codec), 1e-9)] * 2)),
        patch("gradwire.hooks.auto.planner.Planner.needs_trial", lambda *_: False),
    ):
        state = CompressState(ddp, codec, **options)
        ddp.register_comm_hook(state, compress_hook)
        train(rank, ddp, range(steps))
        state.close()
        train(rank, ddp, range(steps, steps + 2))
        state.close()
    return lines()


SLOW, FAST = 1e-7, 1e-12


@pytest.mark.parametrize(
    ("codec", "options", "beta", "expected"),
    [
        (TopK(0.01), {"exchange": "gather"}, SLOW, [r"sends TopK\(density=0.01\) by 'gather', \d+(\.\d)? times fewer"]),
        (
            TopK(0.01),
            {},
            SLOW,
            [r"'auto' sends TopK\(density=0.01\) by '\w+', .* predicted for a step: compressed .* ms"],
        ),
        (
            OneBit(),
            {},
            FAST,
            [r"'auto' sends bfloat16 by '\w+' instead of OneBit\(block=1024\), 2 times .*fallback=None"],
        ),
        (OneBit(), {"fallback": torch.float32}, FAST, [r"'auto' sends float32 instead of OneBit.*: float32 .*=None"]),
        (
            OneBit(),
            {"fallback": None},
            FAST,
            [r"'auto' sends OneBit\(block=1024\) by 'gather', 3\d(\.\d)? times fewer"],
        ),
        (
            TopK(0.01),
            {"exchange": "union", "warmup_steps": 3},
            SLOW,
            [r"sends float32 in the first 3 steps \(warmup_steps=3\)$", r"sends TopK\(density=0.01\) by 'union'"],
        ),
        (Identity(), {"exchange": "dense"}, SLOW, ["sends float32$"]),
    ],
    ids=str,
)
def test_one_rank_hears_once_what_is_sent(
    ranks: Ranks, codec: Any, options: dict[str, Any], beta: float, expected: list[str]
) -> None:
    first, *others = ranks(2).run(trained, codec, options, beta, 6)
    assert others == [[]]
    assert len(first) == len(expected), first
    for line, pattern in zip(first, expected, strict=True):
        assert re.search(f"^gradwire: {pattern}", line), line


def schedule(step: int) -> Codec:
    return TopK(max(0.002, 0.1 * 0.99**step)) if step < 70 else OneBit()


def test_a_schedule_is_not_told_step_by_step(ranks: Ranks) -> None:
    lines, _ = ranks(2).run(trained, schedule, {"exchange": "gather"}, SLOW, 72)
    assert [re.findall(r"sends (\w+)", line)[0] for line in lines] == ["TopK", "OneBit"]


def test_one_rank_alone_sends_nothing(ranks: Ranks) -> None:
    assert ranks(1).run(trained, TopK(0.01), {}, SLOW, 4) == [["gradwire: one rank: nothing is sent"]]


def after_a_trial(rank: int, loser: str) -> tuple[list[str], bool]:
    """Training during a trial in which compression, or its fallback, seems to take long."""
    times = {"compressed": 4e-3, "half": 6e-3, "fallback": 5e-3, "planned": 4e-3, loser: 9e-3}

    def record(trial: Any, step: int, seconds: float) -> None:
        real(trial, step, times[trial.candidate])

    real = Trial.record
    _, ddp = two_large_layers()
    with (
        heard() as lines,
        patch.object(probe, "calibration", pretend(1e-9)),
        patch.object(probe, "codec_speed", lambda codec, *_: cost.CodecSpeed(1e-10, 1e-10)),
        patch.object(Trial, "record", record),
        patch("gradwire.hooks.auto.drift.Drift.observe"),  # a busy machine would bring another trial
    ):
        state = CompressState(ddp, OneBit())
        ddp.register_comm_hook(state, compress_hook)
        train(rank, ddp, range(4))
        early, tuning = len(lines()), state.tuning
        train(rank, ddp, range(4, 80))
        done = not state.tuning
        state.close()
    assert tuning
    assert early == (rank == 0)
    return lines(), done


@pytest.mark.parametrize(("loser", "kept"), [("planned", "float32"), ("fallback", "OneBit")])
def test_a_trial_says_when_it_begins_and_what_it_keeps(ranks: Ranks, loser: str, kept: str) -> None:
    (lines, done), (silent, _) = ranks(2).run(after_a_trial, loser)
    assert done
    assert silent == []
    begins, keeps = lines
    assert begins.startswith("gradwire: 'auto' begins with OneBit(block=1024) by 'gather'")
    assert begins.endswith("; the next steps are timed with and without compression")
    assert keeps.startswith(f"gradwire: 'auto' sends {kept}")
    assert "; timed for a step: " in keeps


def on_front(rank: int, name: str) -> list[str]:
    how: dict[str, Any] = {"exchange": "auto"} if name in ("ddp", "overlap", "replicas", "local") else {}
    # On a busy machine measurements may choose another exchange for the next step.
    with (
        heard() as lines,
        patch.object(probe, "calibration", pretend(1e-9)),
        patch.object(probe, "codec_speed", lambda codec, *_: cost.CodecSpeed(1e-10, 1e-10)),
        patch("gradwire.hooks.auto.drift.Drift.observe"),
    ):
        front = FRONTS[name](perceptron(512, 512, 5), None if name == "adam" else TopK(0.02), **how)
        for number in range(3):
            front.step(batch(rank, number, perceptron(512, 1, 1)))
        front.close()
    return lines()


@pytest.mark.parametrize("name", marked(name for name in FRONTS if name != "factors"))
def test_every_front_says_it(ranks: Ranks, name: str) -> None:
    lines, silent = ranks(2).run(on_front, name)
    assert silent == []
    assert len(lines) == 1 + (name == "adam"), lines  # which begins dense
    assert re.search(r" by '\w+', [\d.]+ times fewer bytes than float32", lines[-1]), lines


# -- what is printed -------------------------------------------------------------------------------------------------

COUNTS = st.integers(0, 1 << 70)
DECISIONS = st.dictionaries(
    st.integers(0, 999),
    st.sampled_from(
        [
            "gather of TopK(density=0.01, indices='packed', values=torch.float32): as asked",
            "dense of OneBit(): "
            + "; ".join(f"gather in bfloat16 {n} ms (0 waiting, 0.3 for 0.05 MB)" for n in range(9)),
            "factors: 16 rows",
            "split of rows",
            f"gather of {'Long' * 40}(): as asked",
        ]
    ),
)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.floats(0, 1e9), DECISIONS)
def test_statistics_fit_a_terminal(
    steps: int, dense: int, sent: int, skipped: int, seconds: float, decisions: dict[int, str]
) -> None:
    statistics = Statistics(
        steps, dense, dense, sent, sent, skipped, 0, decisions, {"encode": seconds, "exchange": 0.0}
    )
    text = str(statistics)
    assert all(len(line) <= WIDTH for line in text.splitlines()), text
    plain = re.sub(r"\s+", " ", text)
    assert f"steps {steps:,}" in plain
    assert f"sent {sent:,} bytes" in plain
    named = set[int]()
    for numbers in re.findall(r"^buckets? ([\d, -]+)", text, re.MULTILINE):
        for first, _, last in (run.partition("-") for run in numbers.replace(" ", "").split(",")):
            named |= set(range(int(first), int(last or first) + 1))
    if len(decisions) < 4:  # many take more than one line
        assert named == set(decisions), text


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    decisions = dict.fromkeys((0, 1, 2, 4), "gather of OneBit(block=1024, scale='sided'): as asked")
    decisions[3] = "dense of OneBit(block=1024, scale='sided'): dense 1 ms; gather 2 ms"
    print(Statistics(20, 100, 4_000_000, 50_000, 60_000, 0, 2, decisions, {"encode": 0.5, "exchange": 1.25}))
    assert capsys.readouterr().out == (
        "steps             20\n"
        "as float32        4,000,000 bytes\n"
        "sent              50,000 bytes, 80 times fewer bytes than float32\n"
        "received          60,000 bytes\n"
        "seconds           encode 0.5, exchange 1.25\n"
        "nonfinite steps   2\n"
        "buckets 0-2, 4    gather of OneBit(block=1024, scale='sided'): as asked\n"
        "bucket 3          float32: dense 1 ms; gather 2 ms\n"
    )


def printed(rank: int) -> list[str]:
    """The state printed while its step is under way, as by a signal handler, and afterwards."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 100))
    model, state = wrap(inner, TopK(0.05), exchange="gather")
    texts = [str(state)]
    next(inner.parameters()).register_hook(lambda grad: texts.append(str(state)))
    with patch.object(CompressState, "_flush", side_effect=AssertionError("it waits")):
        train(rank, model, range(2))
        texts.append(str(state))
    texts.append(repr(state))
    state.close()
    return texts


def test_a_state_can_be_printed_at_any_time(ranks: Ranks) -> None:
    *texts, short = ranks(2).run(printed)[0]
    assert len(texts) == 4
    assert "\n" not in short
    for text in texts:
        assert text.startswith("<CompressState of 4 parameters: TopK(density=0.05")
        assert all(len(line) <= WIDTH for line in text.splitlines())
    assert "\nbucket" in texts[-1]
    assert "steps             0" in texts[0]


# -- the documentation -----------------------------------------------------------------------------------------------


def test_the_lines_in_the_documentation_are_said(ranks: Ranks) -> None:
    """Each line of its blocks is one of these tests' own, but for the numbers."""
    text = (DOCS / "troubleshooting.md").read_text("utf-8").partition("## Is it on?")[2].partition("\n## ")[0]
    documented = re.findall(r"^gradwire: .*", text, re.MULTILINE)
    said = [
        *ranks(2).run(trained, TopK(0.01), {"exchange": "gather"}, SLOW, 2)[0],
        *ranks(2).run(trained, TopK(0.01), {"exchange": "gather", "warmup_steps": 2}, SLOW, 3)[0],
        *ranks(2).run(after_a_trial, "planned")[0][0],
        *ranks(1).run(trained, TopK(0.01), {}, SLOW, 1)[0],
    ]
    assert documented
    assert {shape(line) for line in documented} <= {shape(line) for line in said}


def shape(line: str) -> str:
    """The line without its numbers and codec."""
    return re.sub(r"\d[\d.]*", "N", re.sub(r"OneBit\(block=1024\)|TopK\(density=0.01\)", "codec", line))
