"""Links of a known speed between processes of one machine.

`ShapedLinks` gives every rank a network namespace of its own, joins them by veth pairs on a bridge (in a namespace
too, so nothing outside is touched), and limits what each rank sends with a token bucket:

    with ShapedLinks(world_size=2, rate=parse_rate("1gbit")) as links:
        results = links.run(function, {"argument": 1}, timeout=60)    # function runs on every rank, joined by Gloo
        proof, results = links.run_proven(function, {"argument": 1}, timeout=60)    # after an all-reduce that shows
                                                                                    # at which rate the links run

It needs root and iproute2. `Loopback` has the same interface without any of that, and without shaping.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

import torch
import torch.distributed as dist

from .report import median

#: Names of our namespaces: this, the process that made them, and a rank or "switch".
PREFIX = "gradwire"
INTERFACE = "link0"
_SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
#: How much longer than its bytes need an all-reduce may take on links that run at their rate.
TOLERANCE = 1.3
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class LinkError(RuntimeError):
    """Links could not be made, did not run at their rate, or a process on them failed."""


def parse_rate(text: str) -> int | None:
    """Bits a second of "1gbit", "100mbit" or "2.5gbit"; None for "none".

    Raises:
        ValueError: anything else.
    """
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"rate {text!r}: expected a number and a unit such as 100mbit or 1gbit, or none")
    return round(float(match[1]) * _UNITS[match[2]])


def missing() -> str | None:
    """One sentence on what shaped links lack on this machine, or None when they can be had."""
    if not sys.platform.startswith("linux"):
        return f"shaped links need Linux's network namespaces, which {sys.platform} does not have"
    if os.geteuid() != 0:
        return "shaped links need root, to make network namespaces"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool, path=_SEARCH) is None]
    if tools:
        return f"shaped links need iproute2, and {' and '.join(tools)} cannot be found: install iproute2"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except LinkError as error:
        return f"shaped links need network namespaces, which this machine refuses to make ({error})"
    return None


class Proof(TypedDict):
    """An all-reduce on the links: bytes that each rank sends, the seconds that takes at the rate, the median and the
    fastest measured, and whether the rate was reached."""

    bytes_sent: float
    expected_s: float
    median_s: float
    fastest_s: float
    reached: bool


class Loopback:
    """P processes on this machine's loopback interface, as fast as the machine is."""

    rate: int | None = None

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
            LinkError: a process failed or the time is up; with the last lines it wrote.
        """
        deadline = time.monotonic() + timeout
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")))
            port = self._port()
            processes: list[subprocess.Popen[bytes]] = []
            stack.callback(_end, processes)
            for rank in range(self.world_size):
                job = {
                    "function": _path(function),
                    "arguments": dict(arguments),
                    "result": str(folder / f"{rank}.json"),
                    "timeout": timeout,
                }
                variables = {
                    **os.environ,
                    **self._address(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(self.world_size),
                    "OMP_NUM_THREADS": "1",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that addresses in namespaces have no names
                }
                command = [*self._prefix(rank), sys.executable, "-m", __spec__.name, json.dumps(job)]
                with (folder / f"{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=variables,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            with (folder / "0.log").open(errors="replace") as written:
                while any(process.poll() is None for process in processes):
                    failed = [rank for rank, process in enumerate(processes) if process.poll()]
                    if failed or time.monotonic() > deadline:
                        break
                    time.sleep(0.02)
                    while follow is not None and (line := written.readline()):
                        follow(line.rstrip("\n"))
            for rank, process in enumerate(processes):
                if process.poll():
                    said = (folder / f"{rank}.log").read_text(errors="replace").strip()[-3000:]
                    raise LinkError(f"rank {rank} ended with status {process.returncode}:\n{said}")
            if any(process.poll() is None for process in processes):
                raise LinkError(f"{function.__qualname__} was not done after {timeout:.0f} s on {self}")
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(self.world_size)]

    def run_proven(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        timeout: float,
        follow: Callable[[str], None] | None = None,
        strict: bool = False,
    ) -> tuple[Proof | None, list[Any]]:
        """As `run`, after a proof by the same processes that the links run at their rate; a loopback has none: None.

        The proof is an all-reduce whose bytes need 20 ms, and which takes 20 ms. All-reduce, because Gloo's keeps a
        link full; its all-gather of megabytes wavers between 1 and 1.5 times that.

        Args:
            strict: refuse links that are slower than their rate, as where the processors cannot send that fast;
                else the proof says so (`reached`, and `caption`).

        Raises:
            LinkError: the all-reduce was faster than the rate allows, or, if `strict`, so slow that something else is
                the limit.
        """
        if self.rate is None:
            return None, self.run(function, arguments, timeout, follow)
        numel = max(self.world_size, round(self.rate / 8 * 0.02 / 8 * self.world_size / (self.world_size - 1)))
        sent = 2 * (self.world_size - 1) * 4 * numel / self.world_size
        job = {"numel": numel, "repeats": 15, "function": _path(function), "arguments": dict(arguments)}
        ranks = self.run(proven, job, timeout, follow)
        slowest_rank = [max(step) for step in zip(*(rank["times"] for rank in ranks), strict=True)]
        expected, typical = sent * 8 / self.rate, median(slowest_rank)
        proof = Proof(
            bytes_sent=sent,
            expected_s=expected,
            median_s=typical,
            fastest_s=min(slowest_rank),
            reached=typical <= TOLERANCE * expected,
        )
        check_proof(proof, str(self), strict)
        return proof, [rank["result"] for rank in ranks]

    def __str__(self) -> str:
        return f"unshaped loopback between {self.world_size} ranks"

    def _port(self) -> int:
        """A free port, below those that connections of other processes might get before rank 0 listens."""
        for port in random.sample(range(15_000, 32_000), 100):
            with suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port
        raise LinkError("no free port among 100 between 15000 and 32000 on 127.0.0.1")

    def _address(self, port: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}

    def _prefix(self, rank: int) -> list[str]:
        return []


class ShapedLinks(Loopback):
    """P network namespaces on a bridge, each sending at most `rate`. A context manager: it makes and removes them.

    Args:
        world_size: P, at most 200.
        rate: bits a second that each rank may send, headers included.
        burst: bytes that pass unshaped after an idle moment; by default a millisecond of the link, at least 16 KB.
            With much more the link looks free to anything that pauses.
    """

    rate: int

    def __init__(self, world_size: int, rate: int, burst: int | None = None) -> None:
        if not 2 <= world_size <= 200:
            raise ValueError(f"world size {world_size}: shaped links join 2 to 200 ranks")
        super().__init__(world_size)
        self.rate = rate
        self.burst = burst or max(16 * 1024, rate // 8 // 1000)

    def __enter__(self) -> Self:
        reason = missing()
        if reason is not None:
            raise LinkError(reason)
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def __str__(self) -> str:
        return f"links of {self.rate / 10**6:g} Mbit/s between {self.world_size} ranks"

    def _name(self, member: int | str) -> str:
        return f"{PREFIX}-{os.getpid()}-{member}"

    def _make(self) -> None:
        switch = self._name("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for rank in range(self.world_size):
            name, port = self._name(rank), f"port{rank}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"10.231.0.{rank + 1}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            shaper = ["tbf", "rate", f"{self.rate}bit", "burst", f"{self.burst}b", "latency", "200ms"]
            _tool("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shaper)

    def _remove(self) -> None:
        for name in _namespaces(os.getpid()):
            _remove_namespace(name)

    def _port(self) -> int:
        return 29500  # nobody else is in these namespaces

    def _address(self, port: int) -> dict[str, str]:
        return {"MASTER_ADDR": "10.231.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": INTERFACE}

    def _prefix(self, rank: int) -> list[str]:
        return [_which("ip"), "netns", "exec", self._name(rank)]


def check_proof(proof: Proof, links: str, strict: bool = True) -> None:
    """Raises LinkError unless the measured all-reduce took about as long as its bytes take at the rate.

    Longer is an error only if `strict`.
    """
    expected, fastest, typical = proof["expected_s"], proof["fastest_s"], proof["median_s"]
    if fastest < 0.95 * expected:
        raise LinkError(
            f"{links} are not shaped: an all-reduce took {fastest * 1e3:.1f} ms, its bytes need {expected * 1e3:.1f}"
        )
    if strict and not proof["reached"]:
        raise LinkError(
            f"{links} do not reach their rate: an all-reduce took {typical * 1e3:.1f} ms instead of "
            f"{expected * 1e3:.1f}; the machine is busy, or too slow for this rate"
        )


def caption(proof: Proof | None) -> str:
    """What a table has to say about the links below it; None is a loopback's proof."""
    if proof is None:
        return "NOT SHAPED: loopback, as fast as the processors allow; says nothing about a network"
    expected, took = proof["expected_s"] * 1e3, proof["median_s"] * 1e3
    measured = f"an all-reduce that needs {expected:.1f} ms at this rate took {took:.1f}"
    if proof["reached"]:
        return f"links proven: {measured}"
    return f"RATE NOT REACHED: {measured}; what this machine can send and receive is the limit, not the link"


def open_links(world_size: int, rate: int | None) -> Loopback:
    """`ShapedLinks` at `rate`, or `Loopback` where it is None; to be used in a `with` statement."""
    return Loopback(world_size) if rate is None else ShapedLinks(world_size, rate)


def remove_leftovers() -> None:
    """Remove the namespaces, and end the processes in them, of runs that were killed before they could do so."""
    for name in _namespaces():
        try:
            os.kill(int(name.split("-")[1]), 0)
        except ProcessLookupError:
            _remove_namespace(name)
        except PermissionError:
            pass


def sent_bytes() -> int:
    """Bytes this rank's interface has sent so far, counted by the kernel, headers and all."""
    return _counter("tx_bytes")


def received_bytes() -> int:
    """Bytes this rank's interface has received so far, counted by the kernel, headers and all."""
    return _counter("rx_bytes")


def _counter(name: str) -> int:
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{interface}/statistics/{name}").read_text())


def timed_all_reduce(numel: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` all-reduces of `numel` float32, with idle moments between them."""
    x = torch.zeros(numel)
    times = []
    for repeat in range(5 + repeats):
        dist.barrier()
        if repeat >= 5:  # the first ones open TCP's windows
            time.sleep(0.01)
        begin = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - begin)
    return times[5:]


def proven(numel: int, repeats: int, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What every rank does for `run_proven`."""
    return {"times": timed_all_reduce(numel, repeats), "result": _function(function)(**arguments)}


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _which(tool: str) -> str:
    return shutil.which(tool, path=_SEARCH) or tool


def _tool(tool: str, *arguments: str) -> str:
    command = [_which(tool), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _ip(*arguments: str) -> str:
    return _tool("ip", *arguments)


def _namespaces(owner: int | None = None) -> list[str]:
    """Our namespaces, or those that the process `owner` made."""
    pattern = re.compile(rf"{PREFIX}-{owner or '[0-9]+'}-[a-z0-9]+")
    names = (line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip())
    return [name for name in names if pattern.fullmatch(name)]


def _remove_namespace(name: str) -> None:
    for pid in _ip("netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", name)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def _worker(job: Mapping[str, Any]) -> None:
    """What each process does: join the others, call the function, leave its result behind."""
    torch.set_num_threads(1)
    function = _function(job["function"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=job["timeout"]))
    try:
        result = function(**job["arguments"])
    finally:
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
