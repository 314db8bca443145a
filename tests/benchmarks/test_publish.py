"""The published set: its commands parse, and docs/tables-*.md have what their JSON files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gradwire import recommend
from gradwire.benchmarks import publish
from gradwire.benchmarks.common import report
from gradwire.benchmarks.common.report import Table
from gradwire.benchmarks.learning import learn
from gradwire.benchmarks.learning.arms import LEARNED
from gradwire.benchmarks.links import turns
from gradwire.benchmarks.publish import ROOT, SET, Publication
from gradwire.benchmarks.steps import exchange


def test_the_page_says_what_was_measured() -> None:
    texts = publish.pages()
    assert publish.filled(texts) == texts, "run `gradwire-bench publish --tables`"
    text = "".join(texts.values())
    for publication in SET:
        assert f"gradwire-bench {publication.command}" in text
        if publication.plot:
            assert (ROOT / "docs" / f"{publication.name}.png").stat().st_size > 10_000


def test_a_wrong_figure_is_found() -> None:
    texts = publish.pages()
    wrong = {path: text.replace("| PyTorch DDP |", "| PyTorch, float64 |") for path, text in texts.items()}
    assert wrong != texts
    assert publish.filled(wrong) == texts
    torn = {path: text.replace(f"<!-- {SET[0].name}:end -->", "") for path, text in texts.items()}
    with pytest.raises(ValueError, match=f"have 0 places for {SET[0].name}"):
        publish.filled(torn)
    twice = texts | {Path("copy.md"): "".join(texts.values())}
    with pytest.raises(ValueError, match=f"have 2 places for {SET[0].name}"):
        publish.filled(twice)


def result(name: str) -> Any:
    return json.loads((ROOT / publish.RESULTS / f"{name}.json").read_text("utf-8"))


def times_faster() -> dict[str, list[str]]:
    """The cells of a table of docs/benchmarks.md by the names of its rows: at 100 Mbit/s, 1 Gbit/s and 10 Gbit/s."""

    def shown(ratio: float) -> str:
        return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"

    def step(name: str, arm: str) -> str:
        seconds = {row["arm"]: turns.medians(row)[0] for row in result(name)["networks"][0]["arms"]}
        return shown(seconds["fp16"] / seconds[arm])

    rates = [{row["arm"]: row for row in network["arms"]} for network in result("exchange")["networks"][:3]]
    gradient = {arm: [shown(exchange.faster(rate[arm], rate) or 0) for rate in rates] for arm in ("onebit", "topk")}
    return {
        "one gradient of 25.6 M elements, `OneBit`": gradient["onebit"],
        "one gradient of 25.6 M elements, `TopK` of 0.1 %": gradient["topk"],
        "a DDP step of 25 M parameters, `OneBit`": ["", step("step", "onebit"), ""],
        "a DDP step, 25 ms one way, `OneBit`": [
            step("step-far-slow", "onebit-gather"),
            step("step-far", "onebit-gather"),
            "",
        ],
        "a DDP step, 25 ms one way, `TopK` of 1 %": [
            step("step-far-slow", "topk-gather"),
            step("step-far", "topk-gather"),
            "",
        ],
    }


def times_sooner() -> tuple[dict[str, list[str]], list[str]]:
    """The cells of the table of equal losses, and its rows' speedups at 10 Gbit/s over float32 without a hook."""
    (near,), (far,) = result("train-large")["worlds"], result("train-far")["worlds"]
    rows, beside = {}, []
    names = {
        "[`LocalUpdates`](periodic.md) every tenth step, ternary": "local",
        "`TernGrad()`": "terngrad",
        "`TopK` of 8 %, int8": "topk8",
        "PyTorch's PowerSGD hook": "powersgd",
    }
    for title, arm in names.items():
        learned = near["learning"][arm]
        change = {side: 100 * share for side, share in learned["change"].items()}
        interval = f"{change['mean']:.1f} % [{change['low']:+.1f}, {change['high']:+.1f}]".replace("-0.0 %", "0.0 %")
        gains = [world["joined"]["100mbit"][arm]["speedup"]["mean"] for world in (near, far)]
        fast = [near["joined"][rate][arm]["speedup"]["mean"] for rate in ("1gbit", "10gbit")]
        fewer = f"{32 / learned['bits_per_element']:.0f}"
        rows[title] = [fewer, interval, *(f"{gain:.1f}" for gain in gains), *(f"{gain:.2f}" for gain in fast)]
        beside.append(f"{fast[1] / near['joined']['10gbit']['fp32']['speedup']['mean']:.2f}")
    return rows, beside


def cells(text: str) -> dict[str, list[str]]:
    """The rows of a page's tables by their first cell, whose links are taken as written from docs/."""
    lines = text.replace("](docs/", "](").splitlines()
    return {line.split(" | ")[0].removeprefix("| "): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines}


def test_the_results_are_what_was_measured() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    found, readme = cells(text), cells((ROOT / "README.md").read_text("utf-8"))
    sooner, beside = times_sooner()
    for title, expected in (times_faster() | sooner).items():
        assert found[title] == expected, title
    for title, (fewer, _, slow, _, fast, _) in sooner.items():
        assert readme[title] == [fewer, slow, fast], title
    assert f"compared with it the rows have {', '.join(beside[:-1])} and {beside[-1]}." in text


def ended(name: str, arm: str) -> str:
    """How far above float32 an arm has ended, as the pages say it: "1.0 % below", and its interval."""
    found = {one.arm: one for one in learn.best(result(name)["runs"])}
    pairs = zip(found[arm].losses, found["float32"].losses, strict=True)
    off = report.interval([100 * (mine / dense - 1) for mine, dense in pairs])
    side = f"{abs(off['mean']):.1f} % {'below' if off['mean'] < 0 else 'above'}"
    return side if len(found[arm].losses) < 2 else f"{side} [{off['low']:+.1f}, {off['high']:+.1f}]"


def in_short(name: str, arm: str) -> str:
    """The same in a table's cell: "-1.0 % [-1.9, -0.1]"."""
    text = ended(name, arm)
    number, _, side, *interval = text.split(" ", 3)
    sign = "-" if side == "below" else "+"
    return " ".join([f"{sign}{number} %", *interval]) if interval else f"{sign}{number} % (one seed)"


def said(text: str) -> str:
    """A page as one line, without the words between a figure and its interval."""
    return re.sub(r" (float32's loss|float32|it) (\[)", r" \2", " ".join(text.split()))


def test_pages_say_how_models_ended() -> None:
    results, choose = (said((ROOT / "docs" / name).read_text("utf-8")) for name in ("benchmarks.md", "choose.md"))
    long, wide = ended("learn-long", "chunked25-b5"), ended("learn-long", "wide0.7-b5")
    assert f"{long} with 21 times fewer bytes, and {wide} with 207 times" in results
    less = ended("learn-long", "float32-b8").partition(" [")[0].replace("below", "lower").replace("above", "higher")
    assert f"Float32 itself ends {less} with a β1 of 0.8 than with the usual 0.9" in results
    late = {arm: ended("learn-large-sgd", arm) for arm in ("local10-ternary", "terngrad")}
    assert f"`LocalUpdates` ends {late['local10-ternary']} float32 and `TernGrad` {late['terngrad'][:5]}" in results
    side, _, interval = long.partition(" [")
    assert f"ended {side} float32 with 21 times fewer bytes [{interval}" in choose
    dense, sparse, eden = (ended("learn-sgd", arm) for arm in ("topk12", "topk4-at-once", "eden"))
    with_12 = " with `TopK(density=0.12)`, which `ratio=20` names"
    assert (
        f"a small model ended {dense}{with_12}, {sparse} with a density of 0.04 (`ratio=54`), and {eden} with" in choose
    )
    muon = ended("learn-gpt2-muon", "local5-eden")
    assert f"`EDEN()` every 5 steps ended {muon} float32 with 94 times fewer bytes" in choose
    larger = ended("learn-gpt2-large", "eden")
    assert f"10 M parameters, after 250 steps of 16 KiB, one seed, ended {larger} float32 with `EDEN()`" in choose
    assert recommend("sgd", ratio=20).codec == LEARNED["topk12"].codec
    assert recommend("sgd", ratio=54).codec == LEARNED["topk4-at-once"].codec
    rows = cells((ROOT / "docs" / "choose.md").read_text("utf-8"))
    for title, *where in (
        ("DDP's hook, `EDEN()`", ("learn-gpt2-seeds", "eden"), ("learn-kept", "eden")),
        (
            "`LocalUpdates` with `EDEN()` every 5 steps",
            ("learn-gpt2", "local5-eden"),
            ("learn-kept", "local5-eden"),
        ),
        (
            "`LocalUpdates` with `ChunkedTopK(k=1024)` and `keep_unsent`, every step",
            ("learn-gpt2-seeds", "kept1-longer"),
            ("learn-kept", "kept1-longer"),
        ),
        ("the same every 5 steps", ("learn-gpt2", "kept5-longer"), ("learn-kept", "kept5-longer")),
        (
            "`LocalUpdates` with `QSGD()` every 3 steps",
            ("learn-gpt2", "local3-longer"),
            ("learn-kept", "local3-longer"),
        ),
        (
            "DDP's hook, `ChunkedTopK(k=1024)`, a β1 of 0.5",
            ("learn-gpt2", "chunked25-b5"),
            ("learn-adamw", "chunked25-b5"),
        ),
        ("DDP's hook, `TernGrad()`", ("learn-gpt2", "terngrad"), ("learn-kept", "terngrad")),
        ("DDP's hook, `QSGD()`", ("learn-gpt2", "qsgd4"), ("learn-unbiased", "qsgd4")),
    ):
        assert rows[title][1:] == [in_short(*one) for one in where], title


def test_published_figures_name_the_machine_and_the_command() -> None:
    for publication in filter(lambda one: one.there, SET):
        result = json.loads((ROOT / publication.json).read_text("utf-8"))
        facts = result["environment"]
        assert all(facts[name] for name in ("date", "cpu", "cores", "torch", "numba", "revision"))
        options = vars(publish.parsed(publication.arguments))
        for name in ("rate", "rates", "seeds", "world", "numel", "task", "optimizer"):
            if name in result["arguments"] and name in options:
                assert result["arguments"][name] == options[name], f"{publication.name} was made with other options"


def test_results_are_files_with_a_row_a_line() -> None:
    for publication in filter(lambda one: one.there, SET):
        text = (ROOT / publication.json).read_text("utf-8")
        assert text == report.json_text(json.loads(text)) + "\n", publication.json
    rows = {"rows": [{"a": [1.5, None], "b": {}}, {"a": list(range(500))}], "name": "ä"}
    text = report.json_text({**rows, "long": "x" * report.LINE})
    assert json.loads(text) == {**rows, "long": "x" * report.LINE}
    assert [line.strip()[:5] for line in text.splitlines()] == [
        "{",
        '"rows',
        '{"a":',
        "{",
        '"a": ',
        "}",
        "],",
        '"name',
        '"long',
        "}",
    ]


def test_without_links_it_says_so_and_runs_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[str] = []

    class Done:
        def __init__(self, command: list[str]) -> None:
            ran.append(command[3])
            self.returncode = int(command[3] == "codecs")

    monkeypatch.setattr(publish.subprocess, "run", lambda command, cwd, check: Done(command))
    set_ = [
        Publication("first", "codecs"),
        Publication("second", "step", plot=False),
        Publication("third", "step --rate none", plot=False),
        Publication("fourth", "hsdp --rate none --arms backend-qsgd8", plot=False),
    ]
    monkeypatch.setattr(publish.backend, "PYTHON", False)
    with pytest.raises(ValueError, match="first failed; their figures are the older ones"):
        publish.make(set_, "shaped links need root")
    assert ran == ["codecs", "step"]
    said = capsys.readouterr().out
    assert "second: left out, as shaped links need root" in said
    assert "fourth: left out, as the backend gradwire needs PyTorch 2.15" in said


def test_markdown() -> None:
    table = Table("Title", ["arm", "two\nlines"], [["a|b", "1"]], "note\nother")
    assert publish.markdown(table) == (
        "**Title**\n\n| arm | two lines |\n| --- | --: |\n| a\\|b | 1 |\n\n- note\n- other"
    )
