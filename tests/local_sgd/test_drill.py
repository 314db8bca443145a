"""The drill (`tests/support/drill.py`): replicas that are killed, stopped and cut off, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).parents[1] / "support" / "drill.py"
SCENARIOS = int(os.environ.get("GRADWIRE_DRILL_SCENARIOS", "500"))
SEED = int(os.environ.get("GRADWIRE_DRILL_SEED", "0"))
CHUNKS = 10


def drill(first: int, count: int, folder: Path) -> tuple[int, str]:
    """Play so many scenarios; the exit status and the output."""
    command = [sys.executable, str(DRILL), "--seed", str(SEED), "--first", str(first), "--count", str(count)]
    done = subprocess.run(
        [*command, "--keep", str(folder)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_replicas_that_come_and_go(chunk: int, tmp_path: Path) -> None:
    """`GRADWIRE_DRILL_SCENARIOS` and `GRADWIRE_DRILL_SEED` say how many, and which."""
    first, end = chunk * SCENARIOS // CHUNKS, (chunk + 1) * SCENARIOS // CHUNKS
    status, output = drill(first, end - first, tmp_path)
    failures = output[output.find("FAILED") :] if "FAILED" in output else output
    assert status == 0, failures[:20000]
    counts = json.loads(output.splitlines()[-1])
    assert counts["scenarios"] == end - first
    assert counts["rounds"] > 5 * (end - first)


@pytest.mark.soak
def test_the_drill_finds_a_state_that_is_named_by_its_round_alone(tmp_path: Path) -> None:
    """A verdict that compares rounds only lets two states of one name live."""
    script = tmp_path / "seeded.py"
    script.write_text(
        "import sys, drill\n"
        "from dataclasses import replace\n"
        "from gradwire.hooks.local_sgd import verdict, view_changer\n"
        "decide = verdict.decide\n"
        "plain = lambda view, reports: decide(view, [replace(r, agreed=min(r.agreed, 1), view=min(r.view, 1))"
        " for r in reports])\n"
        "view_changer.decide = plain\n"
        "sys.exit(drill.main())\n"
    )
    path = os.pathsep.join([str(DRILL.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), "--seed", "0", "--count", "60"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert "FAILED" in done.stdout
