"""Links of a known speed, and length, between processes of one machine.

`ShapedLinks` gives every rank a network namespace of its own, joins them by veth pairs on a bridge (in a namespace
too, so nothing outside is touched), and limits what each rank sends with a token bucket:

    with ShapedLinks(world_size=2, rate=parse_rate("1gbit")) as links:
        results = links.run(function, {"argument": 1}, timeout=60)    # function runs on every rank, joined by Gloo
        proof, results = links.run_proven(function, {"argument": 1}, timeout=60)    # after an all-reduce that shows
                                                                                    # at which rate the links run

`DistantLinks` are links of the same kind on which every packet arrives later, by a delay. The kernel's own way to
that, the scheduler netem, is missing in many kernels; so these are TUN devices, and packets wait in a process,
`delay`.

Both need iproute2, and root or a user namespace (`as_root_of_its_own`). `BucketLinks` need a C compiler alone: they
limit what each process sends over the loopback interface. `Loopback` has the same interface without any of that, and
without shaping.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..common.launch import PREFIX, LinkError, Processes, path_of
from . import delay, verification
from .flags import Distance
from .verification import Proof, proven

INTERFACE = "link0"
#: Bits a second of the slowest links.
SLOWEST = 10**6
#: The token bucket; and the rate for which the bytes of an unlimited one's proof are made.
BUCKET, UNLIMITED = Path(__file__).with_name("bucket.c"), 10**10
_SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
#: TCP's settings that decide what it does at a distance; a proof names them.
_TCP = ("congestion_control", "wmem", "rmem", "slow_start_after_idle")


def missing(distance: Distance | None = None) -> str | None:
    """One sentence on what shaped links, or those with a distance, lack on this machine, or None if it has them."""
    if not sys.platform.startswith("linux"):
        return f"shaped links need Linux's network namespaces, which {sys.platform} does not have"
    if os.geteuid() != 0:
        return "shaped links need root, or user namespaces, to make network namespaces"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool, path=_SEARCH) is None]
    if tools:
        return f"shaped links need iproute2, and {' and '.join(tools)} cannot be found: install iproute2"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except LinkError as error:
        return f"shaped links need network namespaces, which this machine refuses to make ({error})"
    if distance is not None:
        try:
            os.close(delay.open_tun(_device(0)))
        except OSError as error:
            return f"links with a distance need TUN devices, which this machine refuses to make ({error})"
    return None


def as_root_of_its_own(module: str, arguments: Sequence[str]) -> None:
    """Run a module anew in this process's place, as root of a user namespace, with a network and a /run of its own.

    Returns where that is of no use, or the machine makes no such namespaces.
    """
    unshare = [_which("unshare"), "--user", "--map-root-user", "--net", "--mount", "sh", "-c"]
    begin = 'mount -t tmpfs none /run && ip link set lo up && exec "$@"'
    if os.geteuid() == 0 or not sys.platform.startswith("linux"):
        return
    with suppress(OSError):
        if subprocess.run([*unshare, begin, "sh", "true"], check=False, capture_output=True).returncode == 0:
            os.execvp(unshare[0], [*unshare, begin, "sh", sys.executable, "-m", module, *arguments])


class NoRoot(LinkError):
    """Links need root; where there are user namespaces, everybody can be (`as_root_of_its_own`)."""


class Loopback(Processes):
    """P processes on this machine's loopback interface, as fast as the machine is."""

    rate: int | None = None
    delay: float = 0.0
    burst = 0
    per_node = 1
    #: The counter of the bytes that a rank sends, for captions.
    counter = "the kernel"
    #: `strict`: links that are slower than their rate by more than `tolerance` are always refused.
    strict, tolerance = False, verification.TOLERANCE

    def run_proven(
        self,
        function: Callable[..., Any] | None,
        arguments: Mapping[str, Any],
        timeout: float,
        follow: Callable[[str], None] | None = None,
        strict: bool = False,
    ) -> tuple[Proof | None, list[Any]]:
        """As `run`, after a proof by the same processes that the links run at their rate; a loopback has none: None.
        A token bucket without a rate shows how fast an all-reduce of 25 MB is.

        The proof is an all-reduce, of one rank on each node, whose bytes need 20 ms, on slow links more. All-reduce,
        because Gloo's keeps a link full; its all-gather of megabytes wavers between 1 and 1.5 times that. At a distance
        pings and streams show more (see `verification`).

        Args:
            function: as in `run`; None: prove alone.
            strict: refuse links that are slower than their rate, as where the processors cannot send that fast;
                else the proof says so (`reached`, and `caption`).

        Raises:
            LinkError: the all-reduce was faster than the rate allows, or a ping than the delay, or, if `strict`, so
                slow that something else is the limit.
        """
        if self.rate is None and not self.strict:
            return None, [] if function is None else self.run(function, arguments, timeout, follow)
        size = self.world_size // self.per_node
        sends = max((self.rate or UNLIMITED) / 8 * verification.SECONDS, verification.BURSTS * self.burst)
        numel = max(size, round(sends / 8 * size / (size - 1)))
        job: dict[str, Any] = {"numel": numel, "repeats": 5 if self.delay else 15, "per_node": self.per_node}
        piece = verification.stream_bytes(self.rate) if self.rate and self.delay else 0
        job |= {"piece": piece, "arguments": dict(arguments)}
        job["function"] = None if function is None else path_of(function)
        ranks = self.run(proven, job, timeout, follow)
        first = ranks[:: self.per_node]
        proof = verification.prove(self.rate, self.delay, size, numel, first, self._tcp(), self.tolerance)
        verification.check_proof(proof, str(self), (strict or self.strict) and self.rate is not None)
        return proof, [rank["result"] for rank in ranks]

    def __str__(self) -> str:
        return f"unshaped loopback between {self.world_size} ranks"

    def _tcp(self) -> dict[str, str]:
        return {}


class ShapedLinks(Loopback):
    """P network namespaces on a bridge, each sending at most `rate`. A context manager: it makes and removes them.

    Args:
        world_size: P, at most 200.
        rate: bits a second that each rank may send, headers included.
        burst: bytes that pass unshaped after an idle moment; by default a millisecond of the link, at least 16 KB.
            With much more the link looks free to anything that pauses.
        per_node: ranks that share a namespace, and with it a link: rank r is on node r // per_node.
    """

    rate: int
    distance: Distance | None = None

    def __init__(self, world_size: int, rate: int, burst: int | None = None, per_node: int = 1) -> None:
        if not 2 <= world_size <= 200:
            raise ValueError(f"world size {world_size}: shaped links join 2 to 200 ranks")
        if per_node < 1 or world_size % per_node or world_size == per_node:
            raise ValueError(
                f"{per_node} ranks a node: expected a divisor of the world size {world_size}, less than it"
            )
        if rate < SLOWEST:
            raise ValueError(f"{rate} bit/s: links run at 1mbit or more, as it takes minutes to prove slower ones")
        super().__init__(world_size)
        self.per_node, self.nodes = per_node, world_size // per_node
        self.rate = rate
        self.burst = burst or max(16 * 1024, rate // 8 // 1000)

    def __enter__(self) -> Self:
        reason = missing(self.distance)
        if reason is not None:
            raise (NoRoot if os.geteuid() else LinkError)(reason)
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
        joined = f"{self.world_size} ranks" if self.per_node == 1 else f"{self.nodes} nodes of {self.per_node} ranks"
        return f"links of {self.rate / 10**6:g} Mbit/s between {joined}"

    def _name(self, member: int | str) -> str:
        return f"{PREFIX}-{os.getpid()}-{member}"

    def _make(self) -> None:
        switch = self._name("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for rank in range(self.nodes):
            name, port = self._name(rank), f"port{rank}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
            _ip("-n", name, "address", "add", f"{_address(rank)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            shaper = ["tbf", "rate", f"{self.rate}bit", "burst", f"{self.burst}b", "latency", "200ms"]
            _tool("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shaper)

    def _remove(self) -> None:
        for name in _namespaces(os.getpid()):
            _remove_namespace(name)

    def port(self) -> int:
        return 29500  # nobody else is in these namespaces

    def _address(self, port: int) -> dict[str, str]:
        return {"MASTER_ADDR": _address(0), "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": INTERFACE}

    def _prefix(self, rank: int) -> list[str]:
        return [_which("ip"), "netns", "exec", self._name(rank // self.per_node)]


class DistantLinks(ShapedLinks):
    """P network namespaces, each sending and receiving at most `rate`, and every packet arrives `distance` later.

    The largest TCP buffers are raised, where they are smaller, to four times what is on its way on a full link: with
    less, one connection does not fill it, and what sends most would look slower than on a host that was set up for such
    links. All else is as the kernel has it, slow start after an idle moment among it, since that is what users have.
    """

    def __init__(self, world_size: int, rate: int, distance: Distance) -> None:
        super().__init__(world_size, rate)
        self.distance, self.delay = distance, distance.delay
        self._emulator: subprocess.Popen[str] | None = None
        #: Counts of the process `delay`, once the links are gone.
        self.carried: dict[str, float] = {}

    def __str__(self) -> str:
        assert self.distance is not None
        return f"{super().__str__()}, {self.delay * 1e3:g} ms one way, MTU {self.distance.mtu}"

    def _make(self) -> None:
        assert self.distance is not None
        # As the kernel gives them to other cards, but of at most a millisecond of the link: what arrives arrives whole.
        piece = max(self.distance.mtu, min(1 << 16, self.rate // 8 // 1000))
        devices: list[int] = []
        try:
            for rank in range(self.world_size):
                name, device = self._name(rank), _device(rank)
                devices.append(delay.open_tun(device))
                _ip("netns", "add", name)
                _ip("link", "set", device, "netns", name, "name", INTERFACE)
                _ip("-n", name, "link", "set", INTERFACE, "mtu", str(self.distance.mtu), "txqueuelen", "2000")
                _ip("-n", name, "link", "set", INTERFACE, "gso_max_size", str(piece))
                _ip("-n", name, "address", "add", f"{_address(rank)}/24", "dev", INTERFACE)
                _ip("-n", name, "link", "set", INTERFACE, "up")
                _ip("-n", name, "link", "set", "lo", "up")
                self._enlarge(rank)
            told = {"devices": devices, "rate": self.rate, **asdict(self.distance)}
            self._emulator = subprocess.Popen(
                [sys.executable, delay.__file__, json.dumps(told)],
                stdin=subprocess.PIPE,  # its end tells the process to end, however this one ends
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=devices,
                start_new_session=True,
            )
        finally:
            for number in devices:
                os.close(number)
        assert self._emulator.stdout is not None
        if self._emulator.stdout.readline().strip() != "ready":
            raise LinkError(f"the process that carries packets between {self} did not start")

    def _enlarge(self, rank: int) -> None:
        """TCP's largest buffers in a rank's namespace."""
        enough = round(4 * self.rate / 8 * 2 * self.delay)
        for name in ("tcp_rmem", "tcp_wmem"):
            least, first, most = _setting(name).split()
            if int(most) < enough:
                file = f"/proc/sys/net/ipv4/{name}"
                _tool(*self._prefix(rank), "sh", "-c", f"echo {least} {first} {enough} > {file}")

    def check(self) -> None:
        if self._emulator is not None and self._emulator.poll() is not None:
            raise LinkError(f"the process that carries packets between {self} has ended")

    def _remove(self) -> None:
        if self._emulator is not None:  # first, as it reads from what is removed
            with suppress(subprocess.TimeoutExpired):
                said, _ = self._emulator.communicate(timeout=10)
                self.carried = json.loads(said or "{}")
            self._emulator.kill()
            self._emulator.wait()
            self._emulator = None
        super()._remove()

    def _tcp(self) -> dict[str, str]:
        inside = [*self._prefix(0), "cat", *(f"/proc/sys/net/ipv4/tcp_{name}" for name in _TCP)]
        values = _tool(*inside).splitlines()
        return dict(zip(_TCP, (" ".join(value.split()) for value in values), strict=True))


class BucketLinks(Loopback):
    """P processes on the loopback interface, each sending at most `rate`. A context manager: it compiles the bucket.

    Args:
        rate: bits a second that each rank may send, headers not included; None: as much as it can, counted.

    Raises:
        LinkError: on entering, where there is no C compiler, or it fails.
    """

    counter = "the token bucket"
    strict, tolerance = True, 1.15

    def __init__(self, world_size: int, rate: int | None) -> None:
        super().__init__(world_size)
        self.rate = rate

    def __enter__(self) -> Self:
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise LinkError("a token bucket is compiled on the spot, and there is no cc, gcc or clang: install one")
        self._made = tempfile.TemporaryDirectory(prefix=f"{PREFIX}-")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(self._library), str(BUCKET), "-ldl", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            self._made.cleanup()
            raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.cleanup()

    def __str__(self) -> str:
        what = "no limit" if self.rate is None else f"{self.rate / 10**6:g} Mbit/s"
        return f"{what}, by a token bucket around the sends of {self.world_size} ranks"

    @property
    def _library(self) -> Path:
        return Path(self._made.name, "bucket.so")

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        file = Path(self._made.name, f"{rank}")
        file.write_bytes(struct.pack("dQ", (self.rate or 0) / 8, 0))
        preloaded = ":".join(filter(None, (str(self._library), os.environ.get("LD_PRELOAD"))))
        return super()._variables(rank, port) | {"LD_PRELOAD": preloaded, verification.BUCKET: str(file)}


def open_links(
    world_size: int, rate: int | None, distance: Distance | None = None, per_node: int = 1, limit: str | None = None
) -> Loopback:
    """`ShapedLinks` at `rate`, `DistantLinks` if there is a distance, or `Loopback` where the rate is None; to be used
    in a `with` statement.

    Args:
        limit: what keeps the rate: "tc", or "bucket", `BucketLinks`, which also count without a rate; None: these where
            there is no tc.
    """
    if limit == "bucket" and (distance or per_node > 1):
        raise ValueError("a token bucket gives links no distance, and no node several ranks: leave --limit out")
    if rate is None and (limit != "bucket" or world_size == 1):
        return Loopback(world_size)
    if limit is None and distance is None and per_node == 1 and os.geteuid() == 0 and missing() is not None:
        limit = "bucket"
    if limit == "bucket":
        return BucketLinks(world_size, rate)
    assert rate is not None
    if distance is None:
        return ShapedLinks(world_size, rate, per_node=per_node)
    return DistantLinks(world_size, rate, distance)


def remove_leftovers() -> None:
    """Remove the namespaces, and end the processes in them, of runs that were killed before they could do so."""
    for name in _namespaces():
        try:
            os.kill(int(name.split("-")[1]), 0)
        except ProcessLookupError:
            _remove_namespace(name)
        except PermissionError:
            pass


def _address(rank: int) -> str:
    return f"10.231.0.{rank + 1}"


def _device(rank: int) -> str:
    """A TUN device's name, until it is in its namespace; at most 15 characters."""
    return f"gw{os.getpid()}r{rank}"


def _setting(name: str) -> str:
    return Path(f"/proc/sys/net/ipv4/{name}").read_text().strip()


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
