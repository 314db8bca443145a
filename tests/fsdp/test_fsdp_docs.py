"""docs/fsdp.md and examples/fsdp.py run, as they are, on four ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from fsdp_drawn import mesh_of
from lacking import needs_reduce_scatter
from pages import assert_printed, expected
from ranks import TORCHS_OWN, Pool
from trained import surroundings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/fsdp.md").read_text("utf-8")


def run_the_page(rank: int, folder: str) -> str:
    mesh_of((2, 2))  # so that its groups are made once
    names: dict[str, object] = {}
    printed = io.StringIO()
    there_already = mock.patch.object(dist, "init_process_group")
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(), there_already, surroundings(rank, folder):
        warnings.simplefilter("error")  # also what a user would be warned of
        for theirs in TORCHS_OWN:
            warnings.filterwarnings("ignore", message=theirs)
        for snippet in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
            exec(compile(snippet, "docs/fsdp.md", "exec"), names)
    state: object = names["state"]
    assert state.step == 3  # type: ignore[attr-defined]
    state.close()  # type: ignore[attr-defined]
    return printed.getvalue()


@needs_reduce_scatter
def test_the_page_runs(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    printed, *_ = ranks(4).run(run_the_page, str(tmp_path))
    assert_printed(printed, expected(ROOT / "docs/fsdp.md"))


@needs_reduce_scatter
def test_the_example_learns() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(ROOT / "examples/fsdp.py"), "--codec=topk", "--exchange=gather"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "replicas are equal" in done.stdout
    sent, dense = map(int, re.findall(r"(\d+) bytes sent, (\d+) as float32", done.stdout)[0])
    assert 0 < sent < dense / 5
