"""examples/elastic_ray.py: Ray starts a killed replica again, the others train on, and all end with one state."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "elastic_ray.py"


@pytest.mark.slow
def test_a_killed_actor_comes_back_by_another_number() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--port", port], env={**os.environ, "PYTHONUNBUFFERED": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "3 replicas have equal states" in done.stdout, done.stdout
    (killed,) = re.findall(r"killing member (\d+)", done.stdout)
    reports = [ast.literal_eval(line) for line in re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE)]
    alone = [set(r["members"]) for r in reports if len(r["members"]) == 2]
    assert alone, "the others have not trained on"
    assert all(int(killed) not in members for members in alone)
    last = [r for r in reports if r["rounds"] == max(r["rounds"] for r in reports)]
    assert {r["member"] for r in last} == {0, 1, 2, 3} - {int(killed)}
    assert all(set(r["members"]) == {r["member"] for r in last} for r in last)
    assert min(r["views"] for r in last) == 1, "the one that came back"
