"""`gradwire-bench` on the GPU that is not there, with rows forked from one process: seconds in place of minutes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.benchmarks import cli
from gradwire.benchmarks.gpu.processes import Ended, Processes

OURS = (sys.executable, "-m", "gradwire.benchmarks.cli")
_run = Processes.run


def run(self: Processes, command: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float) -> Ended:
    if tuple(command[:3]) != OURS:
        return _run(self, command, folder, environment, seconds)
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as printed:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                os.environ |= dict(environment)
                sys.modules["sitecustomize"].OnTheCpu().__enter__()  # modes belong to threads
                status = cli.main(command[3:])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        printed.seek(0)
        return Ended(status, printed.read(), time.monotonic() - start)


if __name__ == "__main__":
    Processes.run = run  # type: ignore[method-assign]
    sys.exit(cli.main())
