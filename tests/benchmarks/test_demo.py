"""The demo: its data, its model, its table and picture, and a small run of the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gradwire.benchmarks.common.language_model import (
    GPT2,
    LanguageModel,
    installed_source,
    standard_library,
    text_file,
    total_loss,
    update,
    validation_starts,
    windows,
)
from gradwire.benchmarks.learning import demo
from gradwire.benchmarks.learning.demo import Point, Run, plot, summarize, table


def test_text_is_split_by_file_and_always_the_same() -> None:
    corpus, again = standard_library(), standard_library()
    assert corpus.digest == again.digest
    assert set(corpus.train_files).isdisjoint(corpus.validation_files)
    assert len(corpus.train) > 10 * 64 * 512
    assert len(corpus.validation) > 64 * 512
    assert len(corpus.validation) < len(corpus.train)


def test_text_may_be_a_file_or_installed_packages(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.py").write_text(f"number = {number % 150}\n" * 100)  # a quarter says the same
    corpus = installed_source([tmp_path])
    assert len(corpus.train_files) + len(corpus.validation_files) == 150
    assert 0 < len(corpus.validation_files) < 30
    assert bytes(corpus.train.tolist()).count(b"\n") == 100 * len(corpus.train_files)
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)) * 1000)
    whole = text_file(path)
    assert (len(whole.train), len(whole.validation)) == (190_000, 10_000)
    assert bytes(torch.cat([whole.train, whole.validation]).tolist()) == path.read_bytes()
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes: expected 100,000 or more"):
        text_file(path)
    with pytest.raises(ValueError, match="nothing: No such file"):
        text_file(tmp_path / "nothing")


@pytest.mark.parametrize("kind", [LanguageModel, GPT2])
def test_the_model_learns_and_sees_no_future(kind: type[LanguageModel] | type[GPT2]) -> None:
    torch.manual_seed(0)
    model = kind(context=16)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    text, generator = torch.arange(4000) % 7, torch.Generator().manual_seed(0)  # a pattern that can be learned
    inputs, targets = windows(text, validation_starts(text, 8, 16), 16)
    before = total_loss(model, inputs, targets)
    for _ in range(30):
        x, y = windows(text, torch.randint(len(text) - 16, (4,), generator=generator), 16)
        torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        update([optimizer], 1e-3, 1.0)
    assert total_loss(model, inputs, targets) < before / 2
    changed = inputs.clone()
    changed[:, 8:] += 1
    with torch.no_grad():
        model.eval()
        torch.testing.assert_close(model(changed)[:, :8], model(inputs)[:, :8])


def synthetic(arm: str, seed: int) -> Run:
    sent = {"fp32": 4000, "19x": 133}[arm]
    curve = tuple(Point(step, 8.0 / step + seed / 10, sent * step) for step in (10, 20))
    phases = {"encode": 0.2, "exchange": 0.3, "decode": 0.1} if arm == "19x" else {}
    return Run(arm, seed, 1000, curve, 0.05, 1.0, phases)


def test_summary_table_and_picture(tmp_path: Path) -> None:
    runs = [synthetic(arm, seed) for seed in (0, 1) for arm in ("fp32", "19x")]
    dense, compressed = summarize(runs)
    assert dense["change"] == compressed["change"] == 0.0
    assert compressed["bits_per_element"] == pytest.approx(133 * 8 / 1000)
    assert compressed["times_fewer_than_fp32"] == pytest.approx(32 / 1.064)
    assert dense["spread"] == pytest.approx(0.1 / 2**0.5)
    columns, rows = table([dense, compressed])
    assert [len(row) for row in rows] == [len(columns)] * 2
    assert rows[1][-2:] == ["30.1", "50"]
    plot(runs, tmp_path / "picture.png", "synthetic")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_small_run_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "gradwire.benchmarks.learning.demo", "--steps", "2", "--arms", "fp32,19x", "--output", "small"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "loopback, which is no slow network" in done.stdout
    found = json.loads((tmp_path / "small.json").read_text())
    assert [summary["arm"] for summary in found["summaries"]] == ["fp32", "19x"]
    assert found["summaries"][1]["bits_per_element"] == pytest.approx(1.677, rel=0.001)
    assert (tmp_path / "small.png").stat().st_size > 10_000


def test_without_processes_it_says_how(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert demo.main([]) == 2
    assert "torchrun" in capsys.readouterr().err
