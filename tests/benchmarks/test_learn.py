"""Learning on ranks that share a process: the same as on ranks that do not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import (
    QSGD,
    Aggregate,
    ChunkedTopK,
    Codec,
    Identity,
    LocalUpdates,
    Momentum,
    OneBit,
    PowerSGD,
    Residual,
    Rounds,
    Ternary,
    TopK,
    Tracking,
)
from gradwire.benchmarks import cli
from gradwire.benchmarks.common import report
from gradwire.benchmarks.learning import learn, search
from gradwire.benchmarks.learning.arms import LEARNED, LearningArm
from gradwire.benchmarks.learning.independent_replicas import IndependentReplicas, RoundSchedule
from gradwire.benchmarks.learning.ranks import InProcessRanks
from gradwire.compress import Feedback
from gradwire.compress.aggregation import Aggregation
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.compress.formats.layout import Slot
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.ports import drive
from gradwire.hooks.core.bucket import Bucket
from gradwire.hooks.exchanges import EXCHANGES
from lacking import needs
from nccl_on_cpu import DEVICE, Machine, on_gpu, read
from nccl_on_cpu.cuda import installed
from nccl_on_cpu.tensors import Factories
from ranks import Ranks
from training import digest

NUMEL, STEPS = 5000, 4
LAYOUT = (Slot("a", 0, (NUMEL,), (1,)),)


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + rank))


def really(rank: int, codec: Codec, exchange: str, strategy: Feedback | None) -> tuple[list[str], int]:
    """Digests of what is handed out, and bytes received in the last step."""
    keeps = strategy is not None and not codec.lossless
    codec = (codec.with_feedback() if keeps else codec).for_layout(LAYOUT)
    unit = Bucket(0, [], LAYOUT, frozenset(), torch.empty(NUMEL), strategy)
    group = Group(dist.group.WORLD).channel(f"{codec} {exchange} {strategy}")
    unit.use(EXCHANGES[exchange](codec, NUMEL, 0, torch.device("cpu"), group), 3, rank)
    memory, digests = FeedbackStore(strategy), []
    for step in range(STEPS):
        flat = gradient(rank, step)
        drive(unit.reduce(flat, memory, keeps, step))
        digests.append(digest([flat]))
    return digests, unit.exchange.bytes_received


@pytest.mark.parametrize(
    ("codec", "exchange", "strategy"),
    [
        (OneBit(), "two_pass", Residual()),
        (Ternary(), "two_pass", Tracking()),
        (QSGD(), "gather", None),
        (TopK(0.05), "split", Tracking()),
        (TopK(0.05, values=torch.int8), "union", Residual(0.9)),
        (Identity(), "gather", Tracking()),
        (TopK(0.05), "gather", Momentum()),
        (TopK(0.05), "union", Momentum(nesterov=True)),
        (TopK(0.05), "split", Momentum()),
        (TopK(0.05, values=torch.int8), "mask", Residual()),
        (TopK(0.05), "mask", Momentum()),
        (OneBit(), "two_pass", Momentum()),
        (PowerSGD(2), "factors", Residual()),
        (PowerSGD(1), "factors", Tracking()),
    ],
    ids=str,
)
def test_virtual_ranks_are_as_real_ones(ranks: Ranks, codec: Codec, exchange: str, strategy: Feedback | None) -> None:
    virtual = InProcessRanks(3, LAYOUT, codec, exchange, strategy, seed=3)
    digests = [digest([virtual.reduce([gradient(rank, step) for rank in range(3)])]) for step in range(STEPS)]
    real = ranks(3).run(really, codec, exchange, strategy)
    assert [found for found, _ in real] == [digests] * 3
    assert max(received for _, received in real) == virtual.bytes_received


def test_virtual_ranks_clip_each_gradient() -> None:
    virtual = InProcessRanks(2, LAYOUT, Identity(), "dense", Tracking(0.0, clip=1.0))
    large, small = 5 * gradient(0, 0), 1e-3 * gradient(1, 0)
    expected = (large / large.norm() + small) / 2
    assert torch.allclose(virtual.reduce([large.clone(), small.clone()]), expected, atol=1e-6)


@pytest.mark.parametrize(("codec", "exchange"), [(OneBit(), "two_pass"), (TopK(0.1), "gather"), (Identity(), "dense")])
def test_ranks_whose_gradients_are_not_numbers_do_not_differ(codec: Codec, exchange: str) -> None:
    virtual = InProcessRanks(2, LAYOUT, codec, exchange, Residual())
    spoilt = gradient(1, 0)
    spoilt[7] = torch.nan
    assert virtual.reduce([gradient(0, 0), spoilt])[7].isnan()


def test_ranks_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = InProcessRanks(2, LAYOUT, OneBit(), "gather", None)
    reduce = Bucket.reduce

    def wrong(self: Bucket, buffer: torch.Tensor, *others: object) -> object:
        yield from reduce(self, buffer, *others)  # type: ignore[arg-type]
        buffer[0] += self is virtual.units[1]

    monkeypatch.setattr(Bucket, "reduce", wrong)
    with pytest.raises(RuntimeError, match="ranks differ after step 1"):
        virtual.reduce([gradient(0, 0), gradient(1, 0)])


@pytest.mark.parametrize(
    ("codec", "exchange", "strategy"),
    [
        (ChunkedTopK(k=100), "two_pass", Residual()),
        (TopK(0.05), "gather", Residual()),
        (Identity(), "dense", None),
    ],
    ids=str,
)
def test_virtual_ranks_share_a_gpu(codec: Codec, exchange: str, strategy: Feedback | None) -> None:
    on_cpus = InProcessRanks(3, LAYOUT, codec, exchange, strategy)
    expected = [on_cpus.reduce([gradient(rank, step) for rank in range(3)]).clone() for step in range(STEPS)]
    with installed(Machine()), Factories():
        on_one = InProcessRanks(3, LAYOUT, codec, exchange, strategy, device=DEVICE)
        found = [read(on_one.reduce([on_gpu(gradient(rank, step)) for rank in range(3)])) for step in range(STEPS)]
    assert all(map(torch.equal, expected, found))
    assert on_one.bytes_received == on_cpus.bytes_received


LINE = "--task digits --world 2 --steps 3 --seeds 2 --jobs 1 --arms tracking-ternary local2-ternary"


def test_runs_are_made_once_and_compared_at_their_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "runs.jsonl", tmp_path / "loss.png"
    arguments = ["learn", str(file), *LINE.split(), "--learning-rates", "1e-3", "1e-2"]
    assert cli.main([*arguments, "--stop-after", "0"]) == 1
    assert not file.exists(), "no run is begun that would not end"
    assert cli.main([*arguments, "--plot", str(plot), "--json", str(tmp_path / "loss.json")]) == 0
    first = file.read_text()
    runs = [json.loads(line) for line in first.splitlines()]
    assert len(runs) == 9, "three arms: two rates with the first seed, the second seed at the best"
    assert {run["made"]["cpu"] for run in runs} == {report.cpu_model()}
    assert {run["source"] for run in runs} == {"scikit-learn's digits"}
    document = json.loads((tmp_path / "loss.json").read_text())
    assert document["arguments"]["learning_rates"] == [1e-3, 1e-2]
    assert search.origin(document, document["runs"]) in learn.tables(document)[0].caption
    assert plot.stat().st_size > 10_000
    assert cli.main(arguments) == 0
    assert file.read_text() == first, "nothing is made again"
    assert "float32" in capsys.readouterr().out
    shares = {run["arm"]: run["share_of_bytes"] for run in runs}
    assert shares["float32"] == 1.0
    assert 15 < 1 / shares["tracking-ternary"] < 21
    for one in learn.best(runs):
        tried = {r["learning_rate"]: r["loss"] for r in runs if r["arm"] == one.arm and r["seed"] == 0}
        assert one.learning_rate == min(tried, key=tried.__getitem__)
        assert one.losses[0] == tried[one.learning_rate]


def test_runs_say_where_they_were_made(tmp_path: Path) -> None:
    """A table of kept runs must not name the machine that writes it, nor compare runs on other data."""
    file, common = tmp_path / "runs.jsonl", {"task": "digits", "source": "these"}
    made = search.Runs(str(file), common, ["float32"], 1, None)
    for rate in (0.1, 0.2, 0.4):
        made.add({"arm": "float32", "seed": 0, "learning_rate": rate, "loss": rate, "share_of_bytes": 1.0})
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    assert search.origin({"runs_say_where": True}, runs) == report.describe(runs[-1]["made"])
    runs[0]["made"] |= {"cpu": "Abacus", "date": "1642-01-01T00:00:00+00:00"}
    del runs[1]["made"]
    runs[2]["source"] = "others"
    file.write_text("".join(f"{json.dumps(run)}\n" for run in runs))
    kept = search.Runs(str(file), common, ["float32"], 1, None)
    assert [run["learning_rate"] for run in kept] == [0.1, 0.2], "not what was trained on other data"
    first, second = search.origin({"runs_say_where": True}, kept).splitlines()
    assert first.startswith("1 of 2 runs: Abacus, ")
    assert first.endswith(", 1642-01-01T00:00:00+00:00")
    assert second == "1 of 2 runs do not say where they were made"
    assert not search.origin({"runs_say_where": True}, kept[1:]).count("Abacus")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_is_handed_out_with_momentum_trains_without(optimizer: str) -> None:
    """DGC that sends everything is float32's SGD with momentum, where nothing is clipped."""
    rate = learn.TASKS["digits"].learning_rates[optimizer]
    options: dict[str, Any] = {"task": "digits", "optimizer": optimizer, "learning_rate": rate, "seed": 0}
    options |= {"world": 2, "batch": 16, "steps": 30}
    for arm in ("float32", "float32-b5", "topk1-b5", "dgc-topk1", "tracking"):
        way = LEARNED[arm]
        (made,) = learn.optimizers_of(learn.task_of("digits", optimizer, 16, 30), torch.nn.Linear(1, 1), way)
        group = made.param_groups[0]
        momentum = group["momentum"] if optimizer == "sgd" else group["betas"][0]
        assert momentum == (0.0 if way.has_momentum else 0.5 if arm.endswith("-b5") else 0.9)
    if optimizer == "sgd":
        whole = replace(LEARNED["dgc-topk1"], codec=Identity())
        tasks = {"digits": replace(learn.TASKS["digits"], clip=1e9)}
        with patch.dict(LEARNED, whole=whole), patch.dict(learn.TASKS, tasks):
            losses = [learn.learn(arm=arm, **options)["loss"] for arm in ("float32", "whole")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_gradients_arrive_as_late_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one until then, and afterwards that of so many steps before."""
    arrived: list[float] = []
    reduced = iter(range(5))
    monkeypatch.setattr(InProcessRanks, "reduce", lambda self, flats: flats[0].fill_(next(reduced)))
    monkeypatch.setattr(learn, "put", lambda parameters, flat, layout: arrived.append(float(flat[0])))
    monkeypatch.setattr(learn, "update", lambda optimizer, rate, clip: None)
    task = learn.task_of("digits", "sgd", 16, 5)
    data = [task.batches(0, rank, 2) for rank in range(2)]
    learn.train_together(LearningArm(late=2), task, task.model(), data, [0.1] * 5, 0)
    assert arrived == [0, 0, 0, 1, 2]


def test_one_seed_has_no_interval_and_one_rate_no_search() -> None:
    def tables(seeds: int, rates: tuple[float, ...]) -> list[learn.report.Table]:
        runs = [
            {"arm": arm, "learning_rate": rate, "seed": seed, "loss": 1.0 + rate + 0.1 * seed, "share_of_bytes": 1.0}
            for arm in ("float32", "topk1")
            for rate in rates
            for seed in range(seeds)
        ]
        arguments = {"optimizer": "sgd", "world": 2, "steps": 3, "seeds": seeds}
        facts = learn.report.environment()
        task = {"title": "digits", "loss_unit": "nats"}
        return learn.tables({"runs": runs, "arguments": arguments, "environment": facts, "task": task})

    one, several = tables(1, (0.1,)), tables(2, (0.1, 0.2))
    assert len(one) == 1
    assert [row[-1] for row in one[0].rows] == ["+0.0", "+0.0"]
    assert "95 %" not in one[0].caption
    assert len(several) == 2
    assert all(row[-1].endswith("[+0.0, +0.0]") for row in several[0].rows)
    assert several[1].columns == ["", "0.1", "0.2"]


def test_a_best_rate_at_an_end_is_told() -> None:
    def said(**losses: dict[float, float]) -> str:
        runs = [
            {"arm": arm, "learning_rate": rate, "seed": 0, "loss": loss}
            for arm, tried in losses.items()
            for rate, loss in tried.items()
        ]
        return learn.search({"runs": runs}).caption

    inside, low, high = ({0.1: a, 0.2: b, 0.4: c} for a, b, c in ((2.0, 1.0, 2.0), (1.0, 2.0, 3.0), (3.0, 2.0, 1.0)))
    assert "end" not in said(float32=inside, topk1=inside).partition("\n")[2]
    assert said(float32=inside, topk1=low).endswith(f"at an end of what was tried here: {LEARNED['topk1'].title}")
    assert said(float32=high, topk1=low).endswith("at an end of what was tried here: all")


def test_a_run_that_diverges_is_null_and_shown_as_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, document = tmp_path / "runs.jsonl", tmp_path / "learn.json"
    line = "--task digits --optimizer sgd --batch 8 --world 2 --steps 1 --seeds 1 --jobs 1 --learning-rates 1e30"
    command = ["learn", str(runs), *line.split(), "--arms", "float32", "--json", str(document)]
    assert cli.main(command) == 0
    assert [json.loads(run)["loss"] for run in runs.read_text().splitlines()] == [None]
    assert "inf" in capsys.readouterr().out
    assert "Infinity" not in document.read_text()


def searched(losses: Callable[[float], float | None], seeds: int = 2) -> dict[float, list[int]]:
    """Which seeds a search trains at which rates, where losses are these."""
    runs: list[dict[str, Any]] = []
    while jobs := list(search.still_needed(runs, ["float32"], None, 1.0, seeds)):
        runs += [job | {"loss": losses(job["learning_rate"])} for job in jobs]
    return {
        rate: sorted(run["seed"] for run in runs if run["learning_rate"] == rate)
        for rate in sorted({run["learning_rate"] for run in runs})
    }


def test_a_search_goes_on_until_the_best_rate_has_a_worse_one_on_either_side() -> None:
    assert searched(lambda rate: abs(rate - 1.0)) == {0.5: [0], 1.0: [0, 1], 2.0: [0]}
    assert searched(lambda rate: abs(rate - 4.0), 3) == {0.5: [0], 1.0: [0], 2.0: [0], 4.0: [0, 1, 2], 8.0: [0]}
    assert searched(lambda rate: rate if rate < 2 else None)[1 / 16] == [0, 1], "it ends"


@needs("optim.Muon", hasattr(torch.optim, "Muon"))
def test_muon_has_the_matrices_of_blocks() -> None:
    way, model = LearningArm(momentum=0.95), learn.TASKS["small"].model()
    muon, adamw = learn.optimizers_of(learn.task_of("small", "muon", 16, 30), model, way)
    assert {p.shape for p in muon.param_groups[0]["params"]} == {(384, 128), (128, 128), (512, 128), (128, 512)}
    assert {p.shape for p in adamw.param_groups[0]["params"]} == {(256, 128)}
    held = [p for one in (muon, adamw) for group in one.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert (muon.param_groups[0]["momentum"], adamw.param_groups[0]["betas"]) == (0.95, (0.9, 0.99))
    with pytest.raises(ValueError, match="--optimizer muon: digits has sgd and adamw only"):
        learn.task_of("digits", "muon", 16, 30)


def test_float32_on_virtual_ranks_learns_alike_on_any_number() -> None:
    """The global batch does not depend on the number of ranks, and so does not the curve, but for rounding."""
    with patch.dict(os.environ):  # scikit-learn sets some variables when it is imported
        two, four = (learn.learn("digits", "sgd", world, 64, 12, learn.FLOAT32, 0.1, 0) for world in (2, 4))
    assert four["loss"] == pytest.approx(two["loss"], rel=1e-3)


def really_apart(rank: int, way: LearningArm, rounds: RoundSchedule) -> tuple[str, int]:
    """A digest of the parameters after rounds of a real rank, and the bytes received in the last."""
    task, model, optimizer = learn.task_of("digits", "adamw", 6, 7), small_model(), None
    (optimizer,) = learn.optimizers_of(task, model, way)
    updates = LocalUpdates(
        model,
        optimizer,
        way.codec.inner if isinstance(way.codec, Aggregation) else way.codec,
        every=rounds.every,
        rounds=Rounds(
            delay=rounds.delay, keep_local=rounds.carry, keep_unsent=rounds.unsent, lengthen_steps=rounds.lengthened
        ),
        exchange=Aggregate("senders") if isinstance(way.codec, Aggregation) else cast(Any, way.exchange),
        error_feedback=way.strategy or False,
        seed=3,
    )
    batches = task.batches(0, rank, 3)
    for _ in range(7):
        inputs, targets = next(batches)
        task.loss(model(inputs), targets).backward()
        learn.update([optimizer], 0.01, task.clip)
        before = updates.statistics().bytes_received
        updates.step()
    updates.synchronise()
    received = updates.statistics().bytes_received - before
    updates.close()
    return digest(model.parameters()), received


def small_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 70), torch.nn.ReLU(), torch.nn.Linear(70, 10))


@pytest.mark.parametrize(
    ("way", "rounds"),
    [
        (LearningArm(Ternary(), "two_pass", Residual()), RoundSchedule(3)),
        (LearningArm(Aggregation(TopK(0.05), "senders"), "gather", Residual(0.95)), RoundSchedule(1)),
        (LearningArm(QSGD(bits=4), "two_pass"), RoundSchedule(4)),
        (LearningArm(TopK(0.05), "gather", Residual()), RoundSchedule(3, delay=2)),
        (LearningArm(Ternary(), "two_pass", Residual()), RoundSchedule(2, delay=1, carry=True)),
        (LearningArm(TopK(0.05), "gather", Residual()), RoundSchedule(2, unsent=True)),
        (LearningArm(ChunkedTopK(k=200), "two_pass", Residual()), RoundSchedule(2, unsent=True, lengthened=True)),
        (LearningArm(TopK(0.05), "split", Residual()), RoundSchedule(3, delay=2, unsent=True, lengthened=True)),
    ],
    ids=["ternary", "senders", "qsgd", "late", "carried", "unsent", "lengthened", "lengthened late"],
)
def test_rounds_of_virtual_ranks_are_the_real_ones(ranks: Ranks, way: LearningArm, rounds: RoundSchedule) -> None:
    task, model = learn.task_of("digits", "adamw", 6, 7), small_model()
    layout = learn.in_order(dict(model.named_parameters()))
    virtual = InProcessRanks(3, layout, way.codec, way.exchange, way.strategy, seed=3)
    one = IndependentReplicas(
        rounds,
        virtual,
        model,
        lambda one: learn.optimizers_of(task, one, way),
        learn.backward_of(task, model),
        task.clip,
    )
    data = [task.batches(0, rank, 3) for rank in range(3)]
    steps = [one.step(data, 0.01) for _ in range(7)]
    most = steps[-1] + one.synchronise()
    digests = {digest(each.parameters()) for each in one.models}
    assert len(digests) == 1
    for found, received in ranks(3).run(really_apart, way, rounds):
        assert {found} == digests
        assert 0 < received <= most


def test_rounds_share_their_bytes_among_steps() -> None:
    options: dict[str, Any] = {"task": "digits", "optimizer": "sgd", "world": 2, "batch": 8, "learning_rate": 0.1}
    rare = LearningArm(rounds=RoundSchedule(5))
    with patch.dict(os.environ), patch.dict(LEARNED, rare=rare):
        shares = {steps: learn.learn(arm="rare", steps=steps, seed=0, **options) for steps in (10, 11)}
    assert shares[10]["share_of_bytes"] == pytest.approx(1 / 5)
    assert shares[11]["share_of_bytes"] == pytest.approx(3 / 11), "the last step is followed by a round too"
    assert 0.0 < shares[10]["accuracy"] <= 1.0
