"""The benchmarks in miniature: that they run, say where they ran, and do their arithmetic right."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire.benchmarks import cli, publish
from gradwire.benchmarks.codec import baselines, speed
from gradwire.benchmarks.common import report
from gradwire.benchmarks.common.arms import ARMS
from gradwire.benchmarks.common.launch import ProcessError
from gradwire.benchmarks.learning import learn, summary
from gradwire.benchmarks.links import links, turns
from gradwire.benchmarks.sparse import allreduce
from gradwire.benchmarks.steps import exchange, hsdp, step
from gradwire.compress import CODECS, QSGD, Codec, OneBit, Ternary, TernGrad, TopK
from gradwire.compress.backends import use_backend
from gradwire.hooks import backend
from matplotlib.text import Text


def check_document(document: dict[str, Any], benchmark: str, threads: int = 1) -> None:
    assert document["schema"] == report.SCHEMA
    assert document["benchmark"] == benchmark
    facts = document["environment"]
    assert facts["threads"] == threads
    assert all(facts[name] for name in ("date", "cpu", "cores", "system", "python", "torch", "numpy", "numba"))
    assert facts["cpu"] in report.describe(facts)


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_fits_a_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert len(said.splitlines()) > 10
    assert max(map(len, said.splitlines())) <= 80
    if command in ("step", "exchange", "hsdp", "paired", "train", "learn"):  # it says what each arm is
        assert "--arms ARM [ARM ...]" in said
        assert re.search(r"\narms:\n(  [\w.-]+ +\S.+\n( {6,}\S.+\n)*)+$", said)


@pytest.fixture
def measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Any], str]]:
    """Runs a command. Returns its document, and what it printed."""

    def run(line: str, benchmark: str = "", plot: bool = False) -> tuple[dict[str, Any], str]:
        file, picture = tmp_path / "deep" / "result.json", tmp_path / "pictures" / "picture.png"
        words = [*line.split(), "--json", str(file)]
        assert cli.main([*words, "--plot", str(picture)] if plot else words) == 0
        document = json.loads(file.read_text())
        check_document(document, benchmark or words[0])
        assert not plot or picture.read_bytes().startswith(b"\x89PNG")
        return document, capsys.readouterr().out

    return run


Measured = Callable[..., tuple[dict[str, Any], str]]

# -- codecs ---------------------------------------------------------------------------------------------------------


def test_codecs_in_miniature(measured: Measured) -> None:
    line = "codecs --numel 20000 30000 --repeats 2 --warmup 1 --ranks 3 --density 0.01 0.1 --threads 1"
    document, printed = measured(line, plot=True)
    assert document["arguments"]["ranks"] == 3
    chosen = [c for codec in CODECS for c in ([TopK(0.01), TopK(0.1)] if isinstance(codec, TopK) else [codec])]
    rows = document["codecs"]
    assert [(row["codec"], row["numel"], row["threads"]) for row in rows] == [
        (repr(codec), numel, 1) for numel in (20_000, 30_000) for codec in chosen
    ]
    for row in rows:
        assert row["label"] in printed
        operations = {"add", "copy", "encode_feedback", "encode_tracking", "encode", "decode_mean"}
        assert operations <= set(row["times_s"]) <= operations | {"torch"}
        assert all(len(times) == 2 for times in row["times_s"].values())
        assert row["ratio_to_add"]["add"] == row["share_of_add"]["add"] == 1
        assert 0 <= row["relative_error"] < 1.5
        wire = row["wire_bytes_per_element"]
        assert row["bytes_per_element"]["encode_feedback"] == pytest.approx(12 + wire)
        assert row["bytes_per_element"]["decode_mean"] == pytest.approx(4 + 3 * wire)
    assert {row["name"] for row in rows if "torch" in row["times_s"]} == {"topk", "onebit", "qsgd", "terngrad"}
    assert [row["name"] for row in document["rivals"]] == ["torch-fp16", "torch-bf16", "torch-powersgd"] * 2


def test_ratios_are_of_medians() -> None:
    result = speed.ratios({"add": [2.0, 1.0, 9.0], "encode": [3.0, 3.0, 100.0]}, 6_000_000_000)
    assert result["median_s"] == {"add": 2.0, "encode": 3.0}
    assert result["ratio_to_add"] == {"add": 1.0, "encode": 1.5}
    assert result["gelem_per_s"] == {"add": 3.0, "encode": 2.0}


@pytest.mark.parametrize(
    "codec", [TopK(density=0.05), OneBit(), QSGD(), QSGD(bits=2), TernGrad()], ids=lambda codec: codec.name
)
def test_the_torch_chains_do_what_the_codec_does(codec: Codec) -> None:
    codec, numel = codec.with_feedback(), 5120
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    expected, theirs = residual.clone(), residual.clone()
    chain = baselines.torch_chain(codec, theirs)
    assert chain is not None
    sent = chain(grad)
    wire = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8)
    with use_backend("reference"):
        codec.encode_feedback(grad, expected, wire, None, codec.workspace(numel))
    if not isinstance(codec, TopK):  # whose chain sends unsorted, unpacked entries
        assert isinstance(sent, tuple)
        codes = codec.parts(numel)[0].view(wire.numpy())[codec.parts(numel)[0].fields[-1].name]
        assert torch.equal(sent[-1].flatten(), torch.from_numpy(codes.reshape(-1).copy()))
    torch.testing.assert_close(theirs, expected, rtol=1e-5, atol=1e-5)


def test_powersgd_keeps_what_it_leaves_out() -> None:
    like = torch.empty(10_001)
    grad = torch.randn(10_001, generator=torch.Generator().manual_seed(1))
    round_trip = baselines.power_sgd(like, 2)
    residual = round_trip(grad)
    assert isinstance(residual, torch.Tensor)
    output = grad - residual
    rows, columns = baselines.square(10_001)
    assert torch.linalg.matrix_rank(output[: rows * columns].view(rows, columns), rtol=1e-4) == 2
    assert 0 < residual.norm() < grad.norm()


# -- step -----------------------------------------------------------------------------------------------------------


def test_step_in_miniature(measured: Measured) -> None:
    line = "step --rate none --width 32 --layers 2 --rounds 2 --steps 2 --warmup 3"
    document, said = measured(f"{line} --arms fp16 onebit local auto hvd-topk")
    assert "NOT SHAPED" in said
    (network,) = document["networks"]
    assert network["bits_per_s"] is network["proof"] is None
    assert network["parameters"] == 2 * (32 * 32 + 32)
    assert [row["arm"] for row in network["arms"]] == ["none", "fp16", "onebit", "local", "auto", "hvd-topk"]
    for row in network["arms"]:
        assert [len(turn) for turn in row["times_s"]] == [2, 2]
        assert bool(row["counted"]) == (row["arm"] in ("onebit", "local", "auto"))
        if row["arm"] == "local":
            assert row["counted"]["payload_bytes"] == Ternary().wire_bytes(2 * (32 * 32 + 32)) / 10
        assert row["sent_bytes"] is None


@pytest.mark.slow
def test_step_by_rates_in_miniature(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates kept by a token bucket, which counts what is sent; and a run that goes on from its file."""
    monkeypatch.setattr(links.BucketLinks, "tolerance", 99.0)  # however busy this machine is
    line = "step --limit bucket --rates 200mbit --model gpt2-tiny --rounds 1 --steps 1 --warmup 1 --arms fp32 fp16"
    document, said = measured(line)
    (network,) = document["networks"]
    assert network["proof"]["fastest_s"] >= 0.95 * network["proof"]["expected_s"] > 0
    assert "all replicas equal" in said
    assert "as the token bucket counts" in " ".join(said.split())
    rows = {row["arm"]: row for row in network["arms"]}
    for arm, size in (("fp32", 4), ("fp16", 2)):
        assert rows[arm]["sent_bytes"] == pytest.approx(size * network["parameters"], rel=0.02)
    assert rows["none"]["sent_bytes"] < 1000
    assert all(row["equal"] for name, row in rows.items() if name != "none")
    monkeypatch.setattr(step, "measured", lambda *given: pytest.fail("measured again"))
    assert measured(f"{line} --resume")[0]["networks"] == document["networks"]
    assert cli.main(["step", "--limit", "bucket", "--stop-after", "0"]) == 2

    none, *others = ({**row, "peak_bytes": 10**9 * i} for i, row in enumerate(network["arms"]))
    lost = {"arm": "onebit", "failed": "OutOfMemoryError: none is left"}
    proof = {**network["proof"], "expected_s": 0.0}
    unlimited = {**network, "rate": "none", "proof": proof, "arms": [none, others[0], {**others[1], "equal": 0}, lost]}
    facts = {**document["environment"], "gpu": "emulated GPU", "gpus": 1, "driver": "", "nccl": ""}
    limited = {**network, "arms": [none, *others, {**others[1], "arm": "onebit", "peak_bytes": 3 * 10**9}]}
    (table,) = step.tables({**document, "environment": facts, "networks": [unlimited, limited]})
    assert [row[-2] for row in table.rows] == ["-1.00", "0.00", "1.00", "2.00"], "memory beyond DDP's"
    assert [row[1] == "failed" for row in table.rows] == [False, False, False, True]
    assert all(row[0].startswith("emulated: ") for row in table.rows)
    for note in ("none: NOT LIMITED: an all-reduce", "200mbit: links proven", "REPLICAS DIFFER: fp16", lost["failed"]):
        assert note in table.caption


def test_what_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate that is refused, and arms that end a rank, or hang."""
    untils, ends = [], [("fp16", "E: 1\ntorch.OutOfMemoryError: none is left\n  frame"), ("onebit", "")]

    def made(options: Any, rate: str, function: Any, how: Any, world: int) -> Any:
        untils.append(how["until"] - time.time())
        if rate == "1gbit":
            raise links.LinkError("too slow for this rate")
        if ends and rate == "10gbit":
            name, said = ends.pop(0)
            raise ProcessError("rank 1 ended with status -9:\n...", f"begins: none\nbegins: {name}\n{said}")
        row = {"wall_s": [[1.0]], "cpu_s": [], "sent_bytes": 0, "counted": {}, "sends": []}
        ranks = [{"parameters": 1, "buckets": 1, "arms": dict.fromkeys(how["arms"], row)}]
        return {"rate": rate, "proof": None, "links": ""}, ranks

    monkeypatch.setattr(step, "measured", made)
    file = str(tmp_path / "steps.json")
    line = ["step", "--rates", "1gbit", "10gbit", "--arms", "fp16", "fp32", "onebit", "--json", file]
    assert cli.main([*line, "--stop-after", "100"]) == 1
    (network,) = json.loads(Path(file).read_text())["networks"]
    assert [(row["arm"], row.get("failed")) for row in network["arms"]] == [
        ("none", None), ("fp16", "torch.OutOfMemoryError: none is left"), ("fp32", None),
        ("onebit", "rank 1 ended with status -9:")]  # fmt: skip
    assert untils == pytest.approx([50, 100, 100, 100], abs=5), "each rate has its share of what is left"
    assert cli.main([*line, "--resume", "--width", "9"]) == 2, "of another width"
    assert cli.main([*line, "--stop-after", "0"]) == 2
    assert capsys.readouterr().out.count("not measured within --stop-after 0") == 2
    unlimited: Any = {"expected_s": 0.0, "bytes_sent": 10**9, "fastest_s": 1.0}
    step.expect_within(10**10, [None])
    step.expect_within(9 * 10**9, [unlimited, unlimited | {"expected_s": 1.0, "bytes_sent": 1}])
    with pytest.raises(links.LinkError, match=r"reached 8\.0 Gbit/s"):
        step.expect_within(25 * 10**9, [unlimited])
    monkeypatch.setattr(step, "measured", lambda *_: (_ for _ in ()).throw(ProcessError("no", "begins: none")))
    assert cli.main(["step", "--rates", "1gbit"]) == 2, "no step without communication"


def test_no_round_but_the_first_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "sent_bytes", lambda: 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainees = {"one": [turns.Trainee(None, lambda: None)]}
        for late, rounds in ((-1.0, 1), (99.0, 3)):
            assert len(turns.take_turns(trainees, 3, 2, until=time.time() + late)["one"]) == rounds
    finally:
        dist.destroy_process_group()


def test_replicas_are_equal_only_with_the_same_bits() -> None:
    model = torch.nn.Linear(3, 2)
    before = [step.sums(p) for p in model.parameters()]
    with torch.no_grad():
        model.weight[0, 0] = torch.nextafter(model.weight[0, 0], torch.tensor(9.0))
    after = [step.sums(p) for p in model.parameters()]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True]


def test_arms_name_their_exchange_and_their_buckets(measured: Measured) -> None:
    line = "step --rate none --width 64 --layers 4 --rounds 1 --steps 1 --warmup 3 --bucket-mb 0.01"
    document, _ = measured(f"{line} --arms onebit-gather onebit-two_pass topk-gather")
    (network,) = document["networks"]
    assert network["buckets"] == 4
    assert document["arguments"]["bucket_mb"] == 0.01
    sent = {row["arm"]: row["counted"].get("payload_bytes") for row in network["arms"]}
    # Of a layer's 4160 elements; every second slice of OneBit's, and the mean of the other, go to the other rank.
    assert sent["onebit-gather"] == 4 * OneBit().wire_bytes(4160)
    assert sent["onebit-two_pass"] == 4 * 2 * OneBit().wire_bytes(3 * 1024)
    assert sent["topk-gather"] == 4 * TopK(density=0.01).wire_bytes(4160)


def test_powersgd_gets_one_bucket() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models = {name: ARMS[name].install(torch.nn.Linear(2, 2), 1.0).model for name in ("fp16", "powersgd")}
        caps = {name: model.bucket_bytes_cap for name, model in models.items()}
    finally:
        dist.destroy_process_group()
    assert caps == {"fp16": 1 << 20, "powersgd": 10_000 << 20}


def test_paired_in_miniature(measured: Measured) -> None:
    line = "paired --rounds 7 --steps 1 --models 2 --warmup 1 --width 8 --layers 2 --batch 2 --arms python dense"
    document, said = measured(line)
    (network,) = document["networks"]
    assert [row["arm"] for row in network["arms"]] == ["builtin", "python", "dense", "builtin again"]
    for row in network["arms"]:
        for kind in turns.KINDS:
            assert len(row[f"{kind}_ratios"]) == (7 if row["arm"].startswith("builtin") else 14)
            assert row[f"{kind}_ratio"]["low"] <= row[f"{kind}_ratio"]["median"] <= row[f"{kind}_ratio"]["high"]
    assert "gradwire, OneBit(block=1024) by dense" in said


#: Commands that can measure nothing, and words of the one line that they say.
REFUSED = [
    *(
        (line, rf"{line[line.index('--') :].split()[0]} \S.*: expected at least \d\n")
        for line in (
            "paired --rounds 0", "paired --models 0", "paired --steps 0", "paired --world 1", "step --rounds 0",
            "step --warmup -1", "exchange --steps 0", "exchange --numel 7", "hsdp --rounds 0",
            "allreduce --repeats 0", "allreduce --world 4 1", "train --timed 0", "train --steps 0",
            "learn runs.jsonl --jobs 0", "learn runs.jsonl --world 1",
        )
    ),
    ("codecs --numel 0", "--numel"),
    ("codecs --threads 1 0", "--threads"),
    ("step --density 2", r"density=2.0: expected a number in \(0.0, 1.0\]"),
    ("exchange --density 2", r"density=2.0: expected a number in \(0.0, 1.0\]"),
    ("exchange --numel 3", "at least 8"),
    ("exchange --rates none --plot exchange.png", "it draws times against the links' rates"),
    ("allreduce --density 0", "densities above 0"),
    ("allreduce --overlap 2", "up to 1"),
    ("pipeline --world 3 --layers 4", "--layers 4 --chunks 8: expected a multiple of --world 3"),
    *((f"step --rate={rate}", "such as 100mbit") for rate in ("", "1", "gbit", "-1gbit", "0mbit", "fast")),
    ("step --delay 25", "expected a number and a unit"),
    ("step --limit bucket --delay 25ms", "a token bucket gives links no distance"),
    ("step --worlds 1 2", "one rank has no link: --rates none"),
    ("step --arms bf16-hook", "--device cuda alone"),
    ("allreduce --delay 0ms", "more than 0"),
    ("train --delay 5ms --rates none", "no distance"),
    ("links --delay 5ms --rate none -- true", "no distance"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_what_cannot_be_measured_is_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    assert cli.main(line.split()) == 2
    assert re.search(words, capsys.readouterr().err)


def test_steps_are_compared_within_a_round_with_the_faster_reference() -> None:
    """What slows a whole round down is in no ratio, and the reference takes part twice."""
    rounds = [1.0, 9.0, 2.0, 3.0, 1.0, 5.0, 4.0, 2.0]
    seconds = {"fp32": 3.0, "fp16": 2.0, "auto": 2.2, "fp32 again": 3.0, "fp16 again": 2.0}
    rank: dict[str, dict[str, Any]] = {
        name: {"wall_s": [[s * r] for r in rounds], "cpu_s": [[s * s * r] for r in rounds], "sends": ["compressed"]}
        for name, s in seconds.items()
    }
    rank["fp16 again"]["wall_s"][1:] = [[2.2 * r] for r in rounds[1:]]
    rows = {row["arm"]: row for row in turns.compared([rank, rank], ["fp32", "fp16"])}
    assert {row["reference"] for row in rows.values()} == {"fp16"}
    assert rows["auto"]["wall_ratios"] == pytest.approx([1.1] * 9 + [1.0] * 7), "to one turn, then to the other"
    assert rows["fp16"]["wall_ratios"] == pytest.approx([1.0] + [1 / 1.1] * 7), "to its other turn"
    assert rows["fp16 again"]["wall_ratio"]["median"] == pytest.approx(1.1)
    assert rows["auto"]["cpu_ratio"] == pytest.approx(dict.fromkeys(("median", "low", "high"), 2.2**2 / 2.0**2))


def test_an_arm_that_is_like_the_reference_is_as_fast() -> None:
    """Turns that are late now and then: the mean of two is late more often, but is not what is compared with."""
    drawn, count = random.Random(0), 600
    names = ("fp16", "fp16 again", *(f"equal{i}" for i in range(20)))
    rank: dict[str, dict[str, Any]] = {name: {"sends": [], "cpu_s": [[1.0]] * count} for name in names}
    for sides in rank.values():
        late = [drawn.gauss(1.0, 0.05) + drawn.expovariate(4.0) * (drawn.random() < 0.3) for _ in range(count)]
        sides["wall_s"] = [[seconds] for seconds in late]
    found = [row["wall_ratio"] for row in turns.compared([rank], ["fp16"]) if row["arm"].startswith("equal")]
    assert statistics.fmean(ratio["median"] for ratio in found) == pytest.approx(1.0, abs=5e-3)
    assert sum(ratio["low"] <= 1.0 <= ratio["high"] for ratio in found) >= 18


@pytest.mark.parametrize(("count", "outside"), [(5, 0), (6, 0), (8, 0), (9, 1), (20, 5), (100, 39)])
def test_the_interval_of_a_median_is_the_sign_test_s(count: int, outside: int) -> None:
    """By the tables of that test: so many values on each side of the interval."""
    found = report.median_interval([float(v) for v in reversed(range(count))])
    assert found == {"median": (count - 1) / 2, "low": float(outside), "high": float(count - 1 - outside)}
    twice = report.median_interval([float(v) for v in range(count)] * 2, independent=count)
    assert twice == found, "each value twice tells no more"


def side(**times: list[list[float]]) -> dict[str, Any]:
    """One rank's results: seconds by turns and steps."""
    facts = {"cpu_s": [], "sent_bytes": 8.0, "counted": {}, "sends": []}
    return {name: {"wall_s": seconds, **facts} for name, seconds in times.items()}


def shown(command: Any, rows: list[dict[str, Any]], **arguments: Any) -> dict[str, list[str]]:
    """The cells of a command's table, below its columns, by the names of arms."""
    arguments |= {"density": 0.01, "batch": 1, "rounds": 2, "steps": 2, "numel": 1, "world": 2}
    facts = {"parameters": 1, "buckets": 1, "links": "links", "proof": None, "arms": rows}
    table = command.table({"arguments": arguments, "environment": report.environment()}, facts)
    return {"": list(table.columns)} | {row["arm"]: cells for row, cells in zip(rows, table.rows, strict=True)}


def test_the_tax_is_what_a_step_costs_beyond_the_floor() -> None:
    ranks = [
        side(none=[[1.0, 1.0], [1.0, 1.0]], fp16=[[5.0, 5.0], [4.0, 9.0]], onebit=[[2.0, 2.0], [2.0, 0.0]]),
        side(none=[[0.5, 1.0], [1.0, 0.1]], fp16=[[2.0, 4.0], [5.0, 5.0]], onebit=[[1.0, 2.0], [1.0, 3.0]]),
    ]
    floor, fp16, mine = rows = turns.joined(ranks, shaped=True)
    assert floor["times_s"] == [[1.0, 1.0], [1.0, 1.0]], "a step lasts until its slowest rank is done"
    assert mine["times_s"] == [[2.0, 2.0], [2.0, 3.0]]
    assert (step.taxes(floor, floor)[0], step.taxes(fp16, floor)[0]) == (0.0, 4.0)
    assert step.taxes(mine, floor) == [1.0, 1.0, 1.5]
    cells = shown(step, rows)
    assert cells["onebit"][1:] == [
        "2000.0", "2000.0 to 2250.0", "1000.0", "0.250", "0.250 to 0.250", "0.00", "", "", "",
    ]  # fmt: skip
    assert cells["none"][4:6] == ["", ""]
    assert turns.joined(ranks, shaped=False)[0]["sent_bytes"] is None
    alone = shown(step, turns.joined([side(none=[[1.0]], topk=[[1.0]])], shaped=True))
    assert alone["topk"][4:6] == ["", ""], "no opponent, no ratio"


def test_a_turn_is_of_whole_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm that exchanges every third step: its steps share the time, and it opens with as many."""
    clock, barriers, took = 0.0, 0, iter([9.0, 9.0, 9.0, 1.0, 1.0, 4.0, 2.0, 2.0, 5.0])

    def step_() -> None:
        nonlocal clock
        clock += next(took)

    def barrier() -> None:
        nonlocal barriers
        barriers += 1

    monkeypatch.setattr(turns.dist, "barrier", barrier)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock)
    monkeypatch.setattr(turns, "sent_bytes", lambda: 10.0 * clock)
    trainee = turns.Trainee(None, step_)
    trainee.every = 3
    found = turns.take_turns({"local": [trainee]}, 1, 2)
    assert found["local"][0].wall == [1.0, 1.0, 4.0, 2.0, 2.0, 5.0]
    assert barriers == 2
    (row,) = turns.results({"local": [trainee]}, found).values()
    assert row["wall_s"] == [[2.0, 3.0]]
    assert row["sent_bytes"] == 25.0
    took = iter([9.0, 9.0, 9.0, 1.0, 4.0])
    once = turns.take_turns({"local": [trainee]}, 1, 2, "turn")["local"][0]
    assert (once.wall, once.every, barriers) == ([1.0, 4.0], 1, 3), "steps, in a turn that begins but once"


# -- hsdp -----------------------------------------------------------------------------------------------------------


def test_what_nodes_send_by_formula() -> None:
    shards = [1000, 2000]
    assert hsdp.formula("none", shards) == 0
    assert hsdp.formula("hsdp", shards) == 2 * hsdp.formula("hsdp-bf16", shards) == 2 * 4 * 3000
    wires = OneBit().wire_bytes(1000) + OneBit().wire_bytes(2000)
    assert hsdp.formula("onebit", shards) == 2 * wires


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["none", "1gbit"])
def test_hsdp_in_miniature(measured: Measured, rate: str) -> None:
    if rate != "none" and (reason := links.missing()) is not None:
        pytest.skip(reason)
    arms = ["topk", "mesh", "mesh-qsgd8", *(("backend-qsgd8", "mesh-backend-qsgd8") if backend.PYTHON else ())]
    size = "--width 512 --layers 2 --rounds 2 --steps 2 --warmup 2"
    document, said = measured(f"hsdp --rate {rate} {size} --arms {' '.join(arms)}")
    (network,) = document["networks"]
    assert network["parameters"] == 2 * (512 * 512 + 512)
    floor, own, topk, mesh, *encoded = network["arms"]
    assert [row["arm"] for row in network["arms"]] == ["none", "hsdp", *arms]
    assert own["formula_bytes"] == 4 * network["parameters"]
    if rate == "none":
        assert "NOT SHAPED" in said
    else:  # both ranks of a node share a link, which the kernel counts, and what passes inside it does not
        assert network["links"] == "links of 1000 Mbit/s between 2 nodes of 2 ranks"
        assert floor["sent_bytes"] < 0.02 * own["sent_bytes"]
        assert own["sent_bytes"] == pytest.approx(own["formula_bytes"], rel=0.1)
        assert topk["formula_bytes"] < topk["sent_bytes"] < 0.1 * own["sent_bytes"]
        assert mesh["sent_bytes"] == pytest.approx(own["sent_bytes"], rel=0.1)
        for row in encoded:
            assert row["formula_bytes"] < row["sent_bytes"] < 0.3 * own["sent_bytes"], row["arm"]


def test_arms_that_need_a_newer_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "PYTHON", False)
    options = publish.parsed(["hsdp", "--rate", "none", "--arms", "topk", "backend-qsgd8"])
    with pytest.raises(
        ValueError, match=r"--arms backend-qsgd8: the backend gradwire needs PyTorch 2\.15 .*leave them"
    ):
        hsdp.run(options)


@pytest.mark.parametrize("name", ["hsdp", "hsdp-backend"])
def test_published_replicas_are_what_is_promised(name: str) -> None:
    document = json.loads((publish.ROOT / f"benchmarks/results/{name}.json").read_text())
    for row in document["networks"][0]["arms"]:
        if row["formula_bytes"]:
            assert row["sent_bytes"] == pytest.approx(row["formula_bytes"], rel=0.1), row["arm"]


# -- exchange -------------------------------------------------------------------------------------------------------


def test_exchange_in_miniature(measured: Measured) -> None:
    line = "exchange --rates none --numel 20001 --arms fp32 topk auto --rounds 2 --steps 2 --warmup 3"
    document, said = measured(line)
    (found,) = document["networks"]
    assert (found["rate"], found["bits_per_s"], found["proof"]) == ("none", None, None)
    assert found["buckets"] >= 1
    assert [row["arm"] for row in found["arms"]] == ["none", "fp16", "fp32", "topk", "auto"]
    for row in found["arms"]:
        assert [len(turn) for turn in row["times_s"]] == [2, 2]
        assert row["sent_bytes"] is None
        assert bool(row["counted"]) == (row["arm"] in ("topk", "auto"))
    assert "NOT SHAPED" in said


def test_exchanges_are_compared_with_and_without_the_floor(tmp_path: Path) -> None:
    def rank(**times: float) -> dict[str, Any]:
        return side(**{name: [[seconds, seconds], [seconds, 0.0]] for name, seconds in times.items()})

    rows = turns.joined([rank(none=1.0, fp16=11.0, topk=2.0), rank(none=0.5, fp16=9.0, topk=3.0)], shaped=True)
    assert rows[0]["times_s"] == [[1.0, 1.0], [1.0, 0.0]], "an exchange lasts until its slowest rank is done"
    cells = shown(exchange, rows)
    assert cells["none"][3:6] == ["", "", ""]
    assert cells["fp16"][3:6] == ["10000.0", "1.0", "1.0"]
    assert cells["topk"][3:6] == ["2000.0", "3.7", "5.0"]
    assert shown(exchange, turns.joined([rank(none=1.0, fp16=2.0, topk=1.0)], True))["topk"][5] == ""
    facts = {"proof": {"reached": False}, "arms": rows}
    networks = [{"rate": f"{n}gbit", "bits_per_s": n * 10**9, **facts} for n in (1, 10)]
    arguments = {"arms": ["none", "fp16", "topk"], "density": 0.01, "numel": 1, "world": 2}
    picture = tmp_path / "exchange.png"
    exchange.plot({"networks": networks, "arguments": arguments}, picture)
    assert picture.stat().st_size > 10_000


# -- allreduce ------------------------------------------------------------------------------------------------------


def test_allreduce_in_miniature(measured: Measured) -> None:
    line = "allreduce --rate none --world 2 --numel 20000 --density 0.01 0.1 --overlap 0.5 --repeats 2"
    document, said = measured(line, plot=True)
    assert [(cell["world_size"], cell["density"], cell["k"]) for cell in document["cells"]] == [
        (2, 0.01, 200),
        (2, 0.1, 2000),
    ]
    for cell in document["cells"]:
        assert set(cell["arms"]) == set(allreduce.ARMS)
        assert cell["winner"] in allreduce.ALGORITHMS
        assert cell["arms"]["auto"]["chosen"] in allreduce.ALGORITHMS
        assert "ms (" in cell["arms"]["auto"]["why"]
        assert cell["arms"]["dense"]["formula_bytes"] > 8 * 20_000 / 2
        assert all(arm["received_bytes"] is None and arm["seconds"] > 0 for arm in cell["arms"].values())
    assert "NOT SHAPED" in said


def test_a_cell_lasts_as_long_as_its_slowest_rank() -> None:
    def side(gather: list[float], union: list[float]) -> list[dict]:
        facts = {"received_bytes": gather[0], "formula_bytes": 1, "chosen": "", "why": ""}
        arms = {"gather": {"times_s": gather, **facts}, "union": {"times_s": union, **facts}}
        return [{"density": 0.1, "overlap": 0.0, "k": 1, "arms": arms}]

    (cell,) = allreduce.summarize([side([1, 9, 1], [4, 4, 4]), side([5, 1, 1], [2, 2, 5])], 2, shaped=True)
    assert cell["arms"]["gather"]["seconds"] == 5
    assert cell["arms"]["union"]["seconds"] == 4
    assert cell["arms"]["gather"]["received_bytes"] == 5
    assert cell["winner"] == "union"


def test_without_extras_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["codecs"]) == 2
    assert "pip install 'gradwire[bench]'" in capsys.readouterr().err


PICTURES: dict[str, Any] = {"exchange": exchange.plot, "learn": learn.plot}
PICTURES["train"] = summary.plot


@pytest.mark.parametrize(
    "name", ["exchange", "learn-adamw", "learn-digits", "learn-sgd", "train-digits", "train-large"]
)
def test_labels_do_not_cover_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(report, "save", lambda figure, path, dpi: drawn.append(figure))
    draw = PICTURES[name.partition("-")[0]]
    draw(json.loads((publish.RESULTS / f"{name}.json").read_text("utf-8")), Path("nowhere.png"))
    drawn[0].draw_without_rendering()
    texts = [text for axes in drawn[0].axes for text in axes.texts if text.get_text()]
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts]  # without their arrows
    assert len(boxes) >= 3
    assert all(len(axes.texts) <= 5 for axes in drawn[0].axes)
    for (one, box), (other, beside) in itertools.combinations(boxes, 2):
        assert not box.overlaps(beside), (one, other)
