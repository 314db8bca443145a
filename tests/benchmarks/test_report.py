"""Tables for people: at any width no number is cut, words stay whole, and every line of a row is found by its name."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest
from gradwire.benchmarks import cli, publish
from gradwire.benchmarks.common import report
from gradwire.benchmarks.common.report import Table
from gradwire.benchmarks.learning import demo
from hypothesis import given
from hypothesis import strategies as st

words = st.text("abc1.()=%", min_size=1, max_size=12)
cells = st.one_of(st.just(""), st.lists(words, min_size=1, max_size=5).map(" ".join))


@functools.cache
def published() -> dict[str, list[Table]]:
    """The tables of one file of each command, and the demo's."""
    found: dict[str, list[Table]] = {}
    for publication in filter(lambda one: one.there, publish.SET):
        result = json.loads((publish.ROOT / publication.json).read_text("utf-8"))
        found.setdefault(publication.arguments[0], list(cli.module(publication.arguments[0]).tables(result)))
    summaries = json.loads((publish.ROOT / "benchmarks/results/demo.json").read_text("utf-8"))["summaries"]
    return found | {"demo": [Table("demo", *demo.table(summaries), caption="\n".join(demo.limits(3, 2, 2)))]}


def check(table: Table, width: int) -> None:
    lines = table.text(width).splitlines()
    texts = [table.title, table.caption, *table.columns, *(cell for row in table.rows for cell in row)]
    known = {word for text in texts for word in text.split()}
    assert all(set(line.split()) <= known for line in lines if set(line) != {"-"}), "a word is broken"
    short = [
        cell for row in table.rows for text in row[1:] for cell in text.splitlines() if 0 < len(cell) <= report.LONG
    ]
    assert not [cell for cell in short if not any(cell.strip() in line for line in lines)], "a number is cut"


@given(st.data(), st.integers(1, 6), st.integers(20, 120))
def test_words_and_numbers_stay_whole_at_any_width(data: st.DataObject, columns: int, width: int) -> None:
    row = st.lists(cells, min_size=columns, max_size=columns)
    table = Table(data.draw(cells), data.draw(row), data.draw(st.lists(row, max_size=4)), data.draw(cells))
    check(table, width)
    assert max(map(len, table.text(120).splitlines()), default=0) <= 120, "its longest cells fit"


@pytest.mark.parametrize("width", [80, 100])
def test_published_tables_fit(width: int) -> None:
    for command, tables in published().items():
        for table in tables:
            check(table, width)
            assert max(map(len, table.text(width).splitlines())) <= width, command


@pytest.mark.parametrize(("command", "width"), [("demo", 80), ("codecs", 80), ("codecs", 100)])
def test_tables_are_whole_where_most_read_them(command: str, width: int) -> None:
    for table in published()[command]:
        lines = table.text(width).splitlines()
        assert sum(set(line) == {"-"} for line in lines) == 1, "columns are beside each other"
    if width == 100:
        numbers = [row[1:] for row in table.rows]
        assert all(
            any(line.startswith(name) and line.split()[-len(rest) :] for line in lines)
            for (name, *_), rest in zip(table.rows, numbers, strict=True)
        ), "a line of grep has it all"


def test_columns_that_do_not_fit_follow_below() -> None:
    table = Table("t", ["arm", *"abcd"], [["one of them", *["12345678"] * 4], ["x", *["1"] * 4]])
    assert table.text(36).splitlines() == [
        "t",
        "",
        "arm                 a         b",
        "-------------------------------",
        "one of them  12345678  12345678",
        "x                   1         1",
        "",
        "arm                 c         d",
        "-------------------------------",
        "one of them  12345678  12345678",
        "x                   1         1",
    ]


def test_a_pipe_is_a_hundred_wide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("title", ["arm", *"abcdefghi"], [["name", *["123456789"] * 9]], "word " * 40)
    for columns, most in ((None, 100), ("80", 80)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys, "__stdout__", None)
        table.print()
        assert most - 12 < max(map(len, capsys.readouterr().out.splitlines())) <= most


def test_help_needs_no_torch_and_lists_all_commands() -> None:
    code = "import sys; sys.modules['torch'] = None; from gradwire.benchmarks.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {name} " in done.stdout for name in cli.COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 100
