"""Processes that start in no time and end as scripts do, with the interpreter's own finalization.

A server has imported everything and forks the ranks of each run, which call a function and then come to the end of the
script: with status 0, or by the function's exception with status 1. `multiprocessing` would end them by `os._exit`.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks import _load


@dataclass
class Ended:
    """What is left of a run: by rank the exit status (negative: the signal), what was printed, what was returned."""

    statuses: list[int]
    printed: list[str]
    results: list[Any]


class Forker:
    """The server. `run` calls a function on every rank, each in a fork of it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._runs = 0
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, within: float = 300.0) -> Ended:
        """Call `function(rank, store, *args)` on every rank; `store` is where they can meet. All of it travels as JSON.

        Raises:
            AssertionError: a rank has not ended `within` seconds; all are ended then.
        """
        self._runs += 1
        folder = Path(self._folder.name) / str(self._runs)
        folder.mkdir()
        task = inspect.getfile(function), function.__name__, args, world_size, str(folder)
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(task) + "\n")
        self._server.stdin.flush()
        pids = self._answer()
        late = threading.Event()

        def end() -> None:
            late.set()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(within, end)
        timer.start()
        statuses = self._answer()
        timer.cancel()
        printed = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(world_size)]
        assert not late.is_set(), f"{function.__name__}{args} was not done within {within:.0f} s: {printed}"
        files = [folder / f"{rank}.json" for rank in range(world_size)]
        return Ended(statuses, printed, [json.loads(file.read_text()) if file.exists() else None for file in files])

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()
        self._folder.cleanup()


def _serve() -> Callable[[], None] | None:
    """Runs until there is nothing to do, in the server; in a fork the call that it is for."""
    for line in sys.stdin:
        path, name, args, world_size, folder = json.loads(line)
        function, pids = _load(path, name), []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                return lambda rank=rank: _become(rank, folder, function, args)  # type: ignore[misc]
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
    return None


def _become(rank: int, folder: str, function: Callable[..., Any], args: list[Any]) -> None:
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    result = function(rank, f"{folder}/store", *args)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    import torch
    import torch._dynamo  # which DDP imports, for some seconds
    from gradwire import QSGD, OneBit, TopK

    torch.set_num_threads(1)
    for codec in (TopK(density=0.1), OneBit(), QSGD()):
        codec.kernels(torch.device("cpu")).prepare(codec, torch.float32, torch.device("cpu"))
    if call := _serve():
        call()
