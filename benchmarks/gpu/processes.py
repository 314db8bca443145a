"""Processes that end in time, with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Ended:
    """The end of a process: its exit status (None: it had to be stopped), what it printed, and how long it took."""

    status: int | None
    output: str
    seconds: float


class Processes:
    """Those that run; leaving the block stops them."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[Any]] = set()

    def run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float) -> Ended:
        """Run a command, in a session of its own; never raises for what becomes of it."""
        start = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as printed:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return Ended(127, str(error), 0.0)
            self._running.add(process)
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                stop(process)  # and what it has left running
                self._running.discard(process)
            printed.seek(0)
            return Ended(status, printed.read(), time.monotonic() - start)

    def close(self) -> None:
        for process in list(self._running):
            stop(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stop(process: subprocess.Popen[Any]) -> None:
    """Kill a session that `Processes` has started, by its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
