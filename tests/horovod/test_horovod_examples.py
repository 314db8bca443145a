"""The example scripts run, on 2 and on 4 ranks, learn what they should, and are Horovod code but for one line."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_horovod_surface import SIGNATURES

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "horovod"
SCRIPTS = sorted(FOLDER.glob("*.py"))


#: Each runs on two ranks or on four in `make test`, and on both in `make test-all`.
SLOW = pytest.mark.slow


def worlds(quick: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", [pytest.param(n, marks=() if n == quick else SLOW) for n in (2, 4)])


def run(script: str, world: int, *arguments: str, restarts: int = 0) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [f"--max-restarts={restarts}", str(FOLDER / script), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@worlds(2)
def test_image_classification(world: int) -> None:
    output = run("image_classification.py", world, f"--epochs={world}", "--fp16-allreduce")
    accuracies = [float(text) for text in re.findall(r"accuracy ([\d.]+)", output)]
    assert len(accuracies) == world
    assert accuracies[-1] > 0.8, output


@pytest.mark.parametrize(
    ("compression", "world"),
    [pytest.param("none", 2, marks=SLOW), ("topk", 2), pytest.param("topk", 4, marks=SLOW)],
)
def test_synthetic_benchmark(compression: str, world: int) -> None:
    output = run("synthetic_benchmark.py", world, "--width=128", "--num-iters=2", f"--compression={compression}")
    assert re.search(rf"{compression}: [\d.]+ \+- [\d.]+ samples/s on {world} ranks", output), output


@worlds(2)
def test_language_model(world: int) -> None:
    output = run("language_model.py", world, "--steps=40")
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0], output
    assert "replicas are equal" in output


@worlds(2)
def test_elastic(world: int) -> None:
    output = run("elastic.py", world, "--epochs=2", f"--samples={128 * world}", restarts=1)
    assert f"begin at epoch 1, batch 0, on {world} ranks" in output
    assert f"begin at epoch 2, batch 4, on {world} ranks" in output
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    # 128 samples a rank in batches of 16, 8 in an epoch, none of them twice after the restart.
    assert "epoch 2: 8 batches" in output
    assert output.count("finished") == 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_nothing_but_the_import_is_ours(path: Path) -> None:
    source = path.read_text("utf-8")
    assert source.count("gradwire") == 1
    assert "import gradwire.hooks.horovod as hvd\n" in source
    assert f"torchrun --standalone --nproc-per-node 2{' --max-restarts 1' * (path.stem == 'elastic')} " in source
    used = {
        ast.unparse(node).removeprefix("hvd.")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("hvd.")
    }
    horovods = {
        *SIGNATURES,
        "Compression",
        "Compression.none",
        "Compression.fp16",
        "elastic",
        "Average",
        "Sum",
        "Adasum",
    }
    ours = {f"Compression.{name}" for name in ("bf16", "topk", "onebit", "qsgd", "terngrad", "ternary")}
    assert used <= horovods | (ours if path.stem == "synthetic_benchmark" else set())
