"""Processes of one machine, joined by Gloo: one for each rank, to run a function of ours or somebody's program."""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

#: Prefix of temporary folders.
PREFIX = "gradwire"
#: The variable with the device of a rank's tensors: "cpu" or "cuda:0".
DEVICE = "GRADWIRE_DEVICE"
#: NCCL's, so that ranks of one host, and of one GPU, talk over the loopback interface alone, and no service takes part
#: of the GPU. NCCL refuses two ranks on one GPU of the same host: each needs an NCCL_HOSTID of its own.
NCCL = {
    "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none", "NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2", "NCCL_MAX_P2P_NCHANNELS": "2", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
    "NCCL_DEBUG": "WARN",
}  # fmt: skip
#: Seconds that the other ranks of a program have to end once one has failed.
GRACE = 10.0


class LinkError(RuntimeError):
    """Links could not be made, did not run at their rate, or a process on them failed."""


class ProcessError(LinkError):
    """A process failed, or was not done in time.

    Attributes:
        log: all that it wrote.
    """

    def __init__(self, what: str, log: str) -> None:
        super().__init__(what)
        self.log = log


class Processes:
    """P processes on this machine's loopback interface; subclasses put them elsewhere.

    Attributes:
        device: of the ranks: "cpu", over Gloo, or "cuda", over NCCL, on all GPUs in turns.
    """

    device = "cpu"

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        timeout: float,
        follow: Callable[[str], None] | None = None,
    ) -> list[Any]:
        """Call a module's function on every rank, inside a Gloo process group, one thread each.

        Args:
            function: importable by its module and name.
            arguments: its keyword arguments; they and its result travel as JSON.
            timeout: seconds for all of it, after which every process is ended.
            follow: called with each line that rank 0 writes, as it does.

        Returns:
            What it returned, by rank.

        Raises:
            ProcessError: a process failed or the time is up; with the last lines it wrote.
        """
        deadline = time.monotonic() + timeout
        with ExitStack() as stack:
            folder = self._folder(stack)
            results = [folder / f"{rank}.json" for rank in range(self.world_size)]
            job = {"function": path_of(function), "arguments": dict(arguments), "timeout": timeout}
            jobs = [json.dumps({**job, "result": str(result)}) for result in results]
            processes = self._all(stack, folder, [(sys.executable, "-m", __spec__.name, job) for job in jobs])
            with (folder / "0.log").open(errors="replace") as written:
                while None in (statuses := [process.poll() for process in processes]):
                    if any(statuses) or time.monotonic() > deadline:
                        break
                    self.check()
                    time.sleep(0.02)
                    while follow is not None and (line := written.readline()):
                        follow(line.rstrip("\n"))
            for rank, status in enumerate(statuses):  # of those that failed first
                if status:
                    raise ProcessError(_ended(rank, status, folder), _log(rank, folder))
            if None in statuses:
                late = f"{function.__qualname__} was not done after {timeout:.0f} s on {self}"
                raise ProcessError(late, _log(0, folder))
            return [json.loads(result.read_text()) for result in results]

    def run_program(self, command: Sequence[str]) -> int:
        """Run a program on every rank, with the variables that `torchrun` sets; each rank is a node of its own.

        Rank 0 writes where this process does. What another rank wrote is shown, on standard error, if it fails; the
        others then have ten seconds to end.

        Returns:
            The worst exit status: 128 + n for a process that a signal n has ended.

        Raises:
            LinkError: there is no such program.
        """
        with ExitStack() as stack:
            folder, deadline = self._folder(stack), float("inf")
            local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            local["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
            try:
                processes = self._all(stack, folder, [command] * self.world_size, local, shown=True)
            except OSError as error:
                raise LinkError(f"{command[0]} cannot be run: {error}") from error
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    deadline = min(deadline, time.monotonic() + GRACE)
                self.check()
                time.sleep(0.02)
            statuses = [process.poll() for process in processes]  # None: has to be ended
            failed = next((rank for rank, status in enumerate(statuses) if rank and status), None)
            if failed is not None:
                print(_ended(failed, statuses[failed], folder), file=sys.stderr)
            return max(status if status >= 0 else 128 - status for status in statuses if status is not None)

    def _folder(self, stack: ExitStack) -> Path:
        """A temporary one."""
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")))

    def _all(
        self,
        stack: ExitStack,
        folder: Path,
        commands: Sequence[Sequence[str]],
        variables: Mapping[str, str] = MappingProxyType({}),
        shown: bool = False,
    ) -> list[subprocess.Popen[bytes]]:
        """A process for each rank, which `stack` ends. They write to files in the folder, but rank 0, if `shown`, where
        this process does. Raises OSError."""
        port, processes = self.port(), list[subprocess.Popen[bytes]]()
        stack.callback(_end, processes)
        for rank, command in enumerate(commands):
            with ExitStack() as files:
                log = None if shown and not rank else files.enter_context((folder / f"{rank}.log").open("wb"))
                processes.append(self.start(rank, command, port, log, variables))
        return processes

    def start(
        self, rank: int, command: Sequence[str], port: int, log: Any, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """A process where `rank` runs, with its variables and these, in a session of its own. It writes to `log`, or
        where this one does if that is None. The caller ends it."""
        error = None if log is None else subprocess.STDOUT
        return subprocess.Popen(
            [*self._prefix(rank), *command],
            env=self._variables(rank, port) | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=error,
            start_new_session=True,
        )

    def check(self) -> None:
        """Raises LinkError where what the processes run on has gone."""

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        address, gpu = self._address(port), {}
        if self.device == "cuda":
            gpu = {**NCCL, "NCCL_SOCKET_IFNAME": address["GLOO_SOCKET_IFNAME"], "NCCL_HOSTID": f"{PREFIX}-{rank}"}
            gpu[DEVICE] = f"cuda:{rank % torch.cuda.device_count()}"
        return {
            **os.environ,
            **address,
            **gpu,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that addresses in namespaces have no names
        }

    def port(self) -> int:
        """A free port, below those that connections of other processes might get before rank 0 listens."""
        for port in random.sample(range(15_000, 32_000), 100):
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port
        raise LinkError("no free port among 100 between 15000 and 32000 on 127.0.0.1")

    def _address(self, port: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}

    def _prefix(self, rank: int) -> list[str]:
        return []


def device() -> torch.device:
    """Of this rank."""
    return torch.device(os.environ.get(DEVICE, "cpu"))


def synchronize() -> None:
    """Wait until a rank's GPU, if it has one, is done."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def path_of(function: Callable[..., Any]) -> str:
    """By which another process finds it."""
    return f"{function.__module__}:{function.__qualname__}"


def function_at(path: str) -> Callable[..., Any]:
    """The function that `path_of` named."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _ended(rank: int, status: int | None, folder: Path) -> str:
    """The end of a rank, and the last that it wrote."""
    return f"rank {rank} ended with status {status}:\n{_log(rank, folder)[-3000:]}"


def _log(rank: int, folder: Path) -> str:
    return (folder / f"{rank}.log").read_text(errors="replace").strip()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _worker(job: Mapping[str, Any]) -> None:
    """Main function of each process: join the others, call the function, write its result."""
    torch.set_num_threads(1)
    function = function_at(job["function"])
    if device().type == "cuda":
        torch.cuda.set_device(device())
    dist.init_process_group("nccl" if device().type == "cuda" else "gloo", timeout=timedelta(seconds=job["timeout"]))
    try:
        result = function(**job["arguments"])
    except BaseException:  # leaving the group could wait for ranks that wait for this one
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # DDP lives in reference cycles, which would keep the group's threads until the interpreter ends.
    gc.collect()
    dist.destroy_process_group()
    Path(job["result"]).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # PyTorch itself keeps the group of a DDP model, and its hooks leave callbacks with the group's threads: one that
    # lets go of its callback while the interpreter finalizes aborts the process.
    os._exit(0)


if __name__ == "__main__":
    _worker(json.loads(sys.argv[1]))
