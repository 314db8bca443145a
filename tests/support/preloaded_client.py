"""The program that stands for Python, see `preloaded.py`: python -IS THIS SOCKET KNOWN REAL [arguments of Python]."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

#: Variables that are read when a process starts, or when one of the modules is imported that the server has imported.
EARLY = (
    "GLIBC_", "GRADWIRE_CACHE", "HOME", "KMP_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_", "PYTHON",
    "PYTORCH_", "TORCH_", "XDG_CACHE_HOME",
)  # fmt: skip
#: Those among them that a forked process takes over, or that change nothing but what is logged.
LATE = (
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn sets both when it is imported
    "KMP_INIT_AT_FORK",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # lightning sets it when it is imported
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


def surroundings() -> dict[str, str]:
    """What a process must have in common with the server that forks it."""
    early = {k: v for k, v in os.environ.items() if k.startswith(EARLY) and k not in LATE}
    return {**early, "network": os.readlink("/proc/self/ns/net")}


def fits(known: dict[str, Any]) -> bool:
    """Whether the server's fork is what a process with these surroundings is. It may find other packages besides."""
    mine, theirs = surroundings(), {name: value for name, value in known.items() if name != "packages"}
    if set(mine.get("PYTHONPATH", "").split(os.pathsep)) <= {"", *known["packages"]}:
        mine["PYTHONPATH"] = theirs["PYTHONPATH"] = ""
    return mine == theirs


def parse(arguments: Sequence[str]) -> tuple[str, str, list[str], list[str]] | None:
    """(kind, what, sys.argv, warnings) of a command line for Python; None if it is one for a Python of its own."""
    warnings: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-m", "-c"):
            return word, rest[0], [word, *rest[1:]], warnings
        if not word.startswith("-"):
            return "path", word, [word, *rest], warnings
        if word.startswith("-W"):
            warnings.append(word[2:] or rest.pop(0))
        elif word not in ("-u", "-B"):
            return None
    return None


def descriptors() -> list[int]:
    """Those that a program started from here would have."""
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            if os.get_inheritable(number):
                found.append(number)
        except OSError:  # the one with which the folder was read
            pass
    return found


def main() -> None:
    address, known, real, *arguments = sys.argv[1:]
    with open(known, encoding="utf-8") as file:
        expected = json.load(file)
    parsed = parse(arguments)
    server = socket.socket(socket.AF_UNIX)
    if parsed is None or not fits(expected) or server.connect_ex(f"\0{address}"):
        os.execv(real, [real, *arguments])
    kind, what, argv, warnings = parsed
    passed = descriptors()
    request: dict[str, Any] = {
        "kind": kind,
        "what": what,
        "arguments": argv,
        "warnings": warnings,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": os.umask(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "descriptors": passed,
        "unbuffered": bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in arguments[: -len(argv)],
    }
    text = json.dumps(request).encode()
    socket.send_fds(server, [b"%08x" % len(text)], passed)
    server.sendall(text)
    answers = server.makefile()
    pid = int(answers.readline())
    for passed_on in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(passed_on, lambda number, _: os.kill(pid, number))
    status = int(answers.readline() or -signal.SIGKILL)
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
