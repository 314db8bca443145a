"""A process of the preloading server is what a process of a plain Python is, but sooner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pages import plain_environment
from preloaded import PLAIN_PYTHON, Server

SAYS = "import sys; print('torch' in sys.modules)"


@pytest.fixture(autouse=True)
def server() -> None:
    if sys.executable == PLAIN_PYTHON:
        pytest.skip("no server on this machine")


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_other_settings_get_a_python_of_their_own(tmp_path: Path) -> None:
    assert run("-I", "-c", SAYS).stdout == "False\n"
    assert run("-c", SAYS, env=plain_environment()).stdout == "True\n"
    assert run("-c", SAYS, env=plain_environment() | {"PYTHONPATH": str(tmp_path)}).stdout == "False\n"
    assert run("-c", SAYS, env={**os.environ, "MALLOC_ARENA_MAX": "1"}).stdout == "False\n"


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys, warnings
import beside
print(__name__, __file__, sys.argv[1:], sys.path[0], os.getcwd(), os.environ["MINE"], sorted(os.sched_getaffinity(0)))
print(sorted(name for name in globals() if not name.startswith("__")), sorted(os.listdir("/proc/self/fd")))
import torch
print(torch.get_num_threads(), sys.stdin.read(), ("ignore", None, UserWarning, None, 0) in warnings.filters)
""")
    (tmp_path / "beside.py").write_text("")
    read, write = os.pipe()
    env = {**os.environ, "MINE": "3", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::UserWarning"}
    options: Any = {"cwd": "/", "pass_fds": [write], "env": env, "input": "in"}
    answers = []
    for python in (sys.executable, PLAIN_PYTHON):
        command = [python, str(script), "x", "-y"]
        answers.append(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options))
    os.close(read)
    os.close(write)
    assert answers[0].stdout == answers[1].stdout
    assert answers[0].stdout.startswith("__main__ ")
    assert answers[0].stderr == answers[1].stderr == ""


@pytest.mark.parametrize(("options", "variables"), [([], {}), (["-u"], {}), ([], {"PYTHONUNBUFFERED": "1"})])
def test_what_a_killed_process_has_not_flushed_is_lost_as_ever(options: list[str], variables: dict[str, str]) -> None:
    script = "import os; print('said'); os.kill(os.getpid(), 9)"
    written = []
    for python in (sys.executable, PLAIN_PYTHON):
        command = [python, *options, "-c", script]
        written.append(
            subprocess.run(command, env={**os.environ, **variables}, capture_output=True, check=False).stdout
        )
    assert written == [b"said\n" if options or variables else b""] * 2


@pytest.mark.slow
def test_temporary_files_may_be_anywhere(tmp_path: Path) -> None:
    """In a folder whose name has quotes, and is longer than a socket's may be."""
    folder = tmp_path / ("it's long " * 10)
    folder.mkdir()
    server = Server(folder)
    try:
        assert subprocess.run([server.python, "-c", SAYS], capture_output=True, check=True).stdout == b"True\n"
    finally:
        server.close()


def test_it_ends_as_a_process_ends() -> None:
    assert run("-c", "import sys; sys.exit(3)").returncode == 3
    assert run("-c", "import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    assert run("-c", "import os; os.abort()").returncode == -signal.SIGABRT
    assert run("-c", "import atexit; atexit.register(print, 'bye')").stdout == "bye\n"
    failed = run("-c", "1 / 0")
    assert failed.returncode == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_can_be_ended(number: int) -> None:
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait() == -number
    process.stdout.close()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.05)
    else:
        pytest.fail("it goes on")
