"""A Python that has imported torch and gradwire, and has its kernels, for the hundreds of processes that tests start:
each saves three seconds.

    server = Server(folder)
    sys.executable = server.python
    subprocess.run([sys.executable, "-m", "torch.distributed.run", …])

`server.python` is a small program. It hands its arguments, environment, descriptors, working directory and affinity to
the server, which forks; the child runs the script, module or text in the real `__main__` and ends as any Python ends.
Signals go on to it, and its end is the program's end; killed, the program takes it along. Whatever a forked process
cannot have, such as other settings of the interpreter or the allocator, or another network, gets a Python of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import secrets
import select
import selectors
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded_client

#: The interpreter of the tests, before the server's takes its place.
PLAIN_PYTHON = sys.executable
#: Imported at the first request: what ranks of DDP import by and by, and the test files that they load.
MODULES = (
    "gradwire.hooks",
    "hypothesis.strategies",
    "numba.extending",
    "pytest",
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "torch.nn.parallel",
    "torch.profiler",
)


class Server:
    """Forks processes until it is closed, or until the process that made it is gone.

    Args:
        folder: for its program.

    Attributes:
        python: what stands for `sys.executable`.
        real: what `sys.executable` was.
    """

    def __init__(self, folder: Path) -> None:
        self.real = sys.executable
        python, known = folder / "python", folder / "known.json"
        address = f"gradwire-{secrets.token_hex(8)}"  # no file's: a folder's name may be longer than a socket's
        packages = [path for path in sys.path if Path(path, "gradwire").is_dir()]
        known.write_text(json.dumps({**preloaded_client.surroundings(), "packages": packages}), "utf-8")
        words = shlex.join([self.real, "-IS", preloaded_client.__file__, address, str(known), self.real])
        python.write_text(f'#!/bin/sh\nexec {words} "$@"\n', "utf-8")
        python.chmod(0o700)
        self.python = str(python)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{address}")
            listener.listen(128)
            command = [self.real, str(Path(__file__).resolve()), str(listener.fileno()), self.python]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(listener: socket.socket) -> dict[str, Any]:
    """Fork a child for each request. Returns in the children only, with what they are to run."""
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for source in (listener, ended, sys.stdin):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection = listener.accept()[0]
                text, descriptors = receive(connection)
                if not text:  # gone already
                    connection.close()
                elif (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for end in (listener, ended, wake, connection, *children.values()):
                        end.close()
                    request: dict[str, Any] = json.loads(text)
                    adopt(descriptors, request["descriptors"])
                    return request
                else:
                    for descriptor in descriptors:
                        os.close(descriptor)
                    children[pid] = connection
                    selector.register(connection, selectors.EVENT_READ, pid)
                    answer(connection, pid)
            elif key.fileobj is ended:
                ended.recv(4096)
                for pid in list(children):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        connection = children.pop(pid)
                        if connection.fileno() >= 0:
                            selector.unregister(connection)
                            answer(connection, os.waitstatus_to_exitcode(status))
                            connection.close()
            elif key.fileobj is sys.stdin:  # who made this process has closed it, or has gone
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            else:  # a client has been killed: it never says anything
                os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)
                children[key.data].close()


def answer(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the client has been killed
        connection.send(f"{number}\n".encode())


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A request and the descriptors that come with its first bytes."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 250)
    size, text = int(head or b"0", 16), b""
    while len(text) < size and (more := connection.recv(size - len(text))):
        text += more
    return text, descriptors


def adopt(descriptors: list[int], targets: list[int]) -> None:
    """Have these descriptors under the numbers they had in the client, and none besides."""
    import fcntl

    floor = 1 + max([*descriptors, *targets, 2])
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, floor) for descriptor in descriptors]
    os.closerange(0, floor)
    for source, target in zip(moved, targets, strict=True):
        os.dup2(source, target)
        os.close(source)


def settle(request: dict[str, Any], python: str, filters: int) -> None:
    """Be what a process that starts with this request is, once it has imported the modules.

    Args:
        python: what stands for `sys.executable`.
        filters: the number of Python's own filters of warnings; those of the modules go before them.
    """
    import atexit
    import gc
    import multiprocessing.spawn
    import random
    import warnings

    import numpy as np
    import torch

    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["affinity"])
    sys.executable = python
    multiprocessing.spawn.set_executable(python)
    if request["unbuffered"]:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    random.seed()
    np.random.seed()  # noqa: NPY002 - for tests that use it
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or len(request["affinity"]))
    options = [option for option in os.environ.get("PYTHONWARNINGS", "").split(",") if option] + request["warnings"]
    sys.warnoptions[:] = options
    modules, warnings.filters[:] = warnings.filters[:-filters], warnings.filters[-filters:]  # type: ignore[index]
    warnings._processoptions(options)  # type: ignore[attr-defined]
    warnings.filters[:0] = modules  # type: ignore[index]
    sys.argv[:] = request["arguments"]
    if "triton" in sys.modules:  # which says at the end what of it has not been collected
        atexit.register(gc.unfreeze)


def run(request: dict[str, Any]) -> None:
    """Run it as `python PATH`, `-m MODULE` or `-c TEXT` would, in the module `__main__`."""
    kind, what, names = request["kind"], request["what"], vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")] + ["__file__", "__cached__"]:
        names.pop(name, None)
    if kind == "-m":
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.path[0] = ""
        exec(compile(what, "<string>", "exec", dont_inherit=True), names)
    else:
        sys.path[0] = str(Path(what).resolve().parent)
        names["__file__"] = what
        exec(compile(Path(what).read_bytes(), what, "exec", dont_inherit=True), names)


def main() -> dict[str, Any]:
    import gc
    import importlib
    import warnings

    number, python = sys.argv[1:]
    listener = socket.socket(fileno=int(number))
    if listener not in select.select([listener, sys.stdin], [], [])[0]:
        os._exit(0)  # nobody has asked for a process
    filters = len(warnings.filters)
    for module in MODULES:
        importlib.import_module(module)
    compress, cpu = importlib.import_module("gradwire.compress"), importlib.import_module("torch").device("cpu")
    for codec in compress.CODECS:  # ranks would load their kernels one by one
        codec.kernels(cpu).prepare(codec, importlib.import_module("torch").float32, cpu)
    gc.collect()
    gc.freeze()
    request = serve(listener)
    settle(request, python, filters)
    return request


if __name__ == "__main__":
    import preloaded  # by its name: what is run gets the module `__main__` for itself

    preloaded.run(preloaded.main())
