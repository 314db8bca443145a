"""docs/first-steps.md: its script, changed as the page says, runs by its two commands and prints what it shows."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

from pages import ROOT, assert_printed, blocks, plain_environment

SCRIPT, _, CHANGES, ALONE, FIRST, SECOND, PRINTED = blocks(ROOT / "docs" / "first-steps.md")


def changed(script: str, diff: str) -> str:
    """The script after a diff of hunks without line numbers."""
    for hunk in diff.split("@@\n"):
        old, new = ("".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[:1] != sign) for sign in "+-")
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def test_the_script_runs_on_two_machines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(changed(SCRIPT.text, CHANGES.text), "utf-8")
    assert "train.py" in ALONE.text
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    machines = []
    for number, block in enumerate((FIRST, SECOND)):
        interfaces, command = block.lines
        names = re.findall(r"(\w+)=eth0", interfaces)
        assert names == ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
        assert f"--node-rank {number} " in command
        arguments = command.replace("10.0.0.1", "127.0.0.1").replace("29500", port).split()[1:]
        given = plain_environment() | dict.fromkeys(names, "lo")
        pipe = subprocess.PIPE
        machines.append(
            subprocess.Popen([*launcher, *arguments], cwd=tmp_path, env=given, stdout=pipe, stderr=pipe, text=True)
        )
    (first, errors), (second, _) = (machine.communicate(timeout=120) for machine in machines)
    assert [machine.returncode for machine in machines] == [0, 0], errors
    assert second == ""
    # Which exchange is faster here and now is measured; a change of mind is another line.
    said = next(line for line in errors.splitlines(keepends=True) if line.startswith("gradwire: "))
    assert_printed(re.sub("by '(split|union)'", "by 'gather'", said) + first, PRINTED.text)
    assert "Warning" not in errors
