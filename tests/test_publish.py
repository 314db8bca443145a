"""The published set: its commands parse, and docs/benchmarks.md has what their JSON files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gradwire.benchmarks import publish
from gradwire.benchmarks.common.report import Table
from gradwire.benchmarks.publish import PAGE, ROOT, SET, Publication


def test_the_page_says_what_was_measured() -> None:
    text = (ROOT / PAGE).read_text()
    assert publish.filled(text) == text, "run `gradwire-bench publish --tables`"
    for publication in SET:
        assert f"gradwire-bench {publication.command}" in text
        if publication.plot:
            assert (ROOT / "docs" / f"{publication.name}.png").stat().st_size > 10_000


def test_a_wrong_figure_is_found() -> None:
    text = (ROOT / PAGE).read_text()
    wrong = text.replace("| PyTorch DDP |", "| PyTorch, float64 |")
    assert wrong != text
    assert publish.filled(wrong) == text
    with pytest.raises(ValueError, match=f"no place for {SET[0].name}"):
        publish.filled(text.replace(f"<!-- {SET[0].name}:end -->", ""))


def test_published_figures_name_the_machine_and_the_command() -> None:
    for publication in SET:
        result = json.loads((ROOT / publication.json).read_text())
        facts = result["environment"]
        assert all(facts[name] for name in ("date", "cpu", "cores", "torch", "numba", "revision"))
        options = vars(publish.parsed(publication.arguments))
        for name in ("rate", "rates", "seeds", "world", "numel", "task", "optimizer"):
            if name in result["arguments"] and name in options:
                assert result["arguments"][name] == options[name], f"{publication.name} was made with other options"


def test_what_needs_links_is_known() -> None:
    assert Publication("a", "step --rate 1gbit", plot=False).shaped
    assert not Publication("a", "step --rate none", plot=False).shaped
    assert Publication("a", "train").shaped
    assert not Publication("a", "train --rates none").shaped
    assert not Publication("a", "allreduce --simulate 16").shaped
    assert not Publication("a", "codecs").shaped


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
    ]
    with pytest.raises(ValueError, match="first failed; their figures are the older ones"):
        publish.make(set_, "shaped links need root")
    assert ran == ["codecs", "step"]
    assert "second: left out, as shaped links need root" in capsys.readouterr().out


def test_markdown() -> None:
    table = Table("Title", ["arm", "two\nlines"], [["a|b", "1"]], "note\nother")
    assert publish.markdown(table) == (
        "**Title**\n\n| arm | two lines |\n| --- | --: |\n| a\\|b | 1 |\n\n- note\n- other"
    )
