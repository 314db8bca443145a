"""What `gradwire-bench pipeline` and `learn` say of the way between stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire import QSGD, Identity
from gradwire.benchmarks import cli
from gradwire.benchmarks.learning import learn
from gradwire.benchmarks.learning.arms import LEARNED
from gradwire.benchmarks.learning.stages import StageCodes, train_in_stages


def test_steps_of_two_stages_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pipeline.json"
    line = "pipeline --rates none --rounds 2 --steps 1 --warmup 1 --arms q8-q4 float16"
    sizes = "--width 32 --layers 2 --context 32 --rows 2 --chunks 2"
    assert cli.main([*line.split(), *sizes.split(), "--json", str(file)]) == 0
    (network,) = json.loads(file.read_text())["networks"]
    assert [row["arm"] for row in network["arms"]] == ["float32", "q8-q4", "float16", "float32 again"]
    plain = 2 * 2 * 32 * 32 * 4
    assert network["bytes"]["float32"] == network["bytes"]["float32 again"] == plain
    assert network["bytes"]["float16"] == plain / 2
    assert network["bytes"]["q8-q4"] == 2 * QSGD(bits=8).wire_bytes(2 * 32 * 32)
    assert "QSGD(bits=8), gradients QSGD(bits=4)" in capsys.readouterr().out


def trained(codes: StageCodes | None) -> tuple[Any, float]:
    task = learn.task_of("small", "adamw", 4, 3)
    torch.manual_seed(0)
    model = task.model()
    data = [task.batches(0, rank, 2) for rank in range(2)]
    rates = [task.rate(step) for step in range(3)]
    if codes is None:
        return learn.train_together(LEARNED["float32"], task, model, data, rates, 0)[0], 1.0
    updates = learn.optimizers_of(task, model, LEARNED["float32"])
    return model, train_in_stages(codes, task, model, updates, data, rates, 0)


def test_stages_train_what_ranks_do() -> None:
    dense, _ = trained(None)
    plain, share = trained(StageCodes(4, Identity(), Identity()))
    assert share == 1.0
    for one, other in zip(dense.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-4)
    coded, share = trained(StageCodes(2, QSGD(bits=8), QSGD(bits=4)))
    assert share == pytest.approx((8 + 4 + 2 * 32 / 512) / 64, rel=1e-3)
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), coded.parameters(), strict=True))
    assert not any(block._forward_hooks for block in coded.blocks)
