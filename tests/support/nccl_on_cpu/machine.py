"""Streams and events, and what runs them."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class HostWaits(Exception):
    """The host would have waited for the device."""


@dataclass
class Schedule:
    """In which order the machine runs what may run.

    Args:
        starved: the stream that runs only what is demanded, by its name; None: all run as soon as they may.
        seed: of the order in which the others run, and of how far; None: each as far as it may, in turn.
    """

    starved: str | None = None
    seed: int | None = None


@dataclass(eq=False)
class Launch:
    """Something in a stream's queue: runs once it is the first there, and `ready`."""

    run: Callable[[], Any]
    ready: Callable[[], bool]


def always() -> bool:
    return True


class Event:
    """As torch.cuda.Event: a place in a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.place = self.step = self.time = 0
        self.timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or active().current
        if self.timed:
            stream.launch(self._pass)
        self.stream, self.place, self.step = stream, stream.launched, active().step

    def _pass(self) -> None:
        self.time = active().launches

    def elapsed_time(self, end: Event) -> float:
        """A launch of the machine takes a millisecond."""
        assert self.query()
        assert end.query()
        return float(end.time - self.time)

    def query(self) -> bool:
        return self.stream is None or self.stream.ended >= self.place

    def wait(self, stream: Stream | None = None) -> None:
        (stream or active().current).wait_event(self)

    def synchronize(self) -> None:
        """Allowed while a step runs only where the event is of an earlier one."""
        machine = active()
        if machine.strict and self.step >= machine.step:
            raise HostWaits("an event of this step was waited for")
        machine.wait_for(self.query, "an event")


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, name: str) -> None:
        self.name, self.queue = name, deque[Launch]()
        self.launched = self.ended = 0

    def launch(self, run: Callable[[], Any], ready: Callable[[], bool] = always) -> None:
        self.queue.append(Launch(run, ready))
        self.launched += 1

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        twin = Event()  # as it is now: it may be recorded again
        twin.stream, twin.place = event.stream, event.place
        self.launch(lambda: None, twin.query)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return not self.queue

    def step(self) -> bool:
        """Run what is first, if it may; returns whether it did."""
        if not self.queue or not self.queue[0].ready():
            return False
        self.queue.popleft().run()
        self.ended += 1
        return True


class Host(threading.local):
    """What each rank's thread has: its number, its current stream, and how many streams it has made."""

    rank = 0
    current: Stream | None = None
    strict = False
    step = 0
    made = 0


@dataclass
class Machine:
    """The GPUs of all ranks. Used by one thread at a time.

    Attributes:
        waited: how often a host has waited for the device.
        launches: how many have run.
        held: bytes that each rank has allocated and not freed, by rank.
        most: the most of them, by rank and step (`never_waiting`).
    """

    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        self.streams: list[Stream] = []
        self.host = Host()
        self.random = random.Random(self.schedule.seed)
        self.waited = self.launches = 0
        self.held, self.most = Counter[int](), Counter[tuple[int, int]]()
        self.closed = False
        #: Lets other ranks go on; without any there is nobody who could.
        self.yield_until: Callable[[Callable[[], bool], str], None] | None = None

    # -- what a rank's thread sees ---------------------------------------------------------------------------------

    @property
    def current(self) -> Stream:
        if self.host.current is None:
            self.host.current = self.new_stream("default")
        return self.host.current

    @property
    def strict(self) -> bool:
        return self.host.strict

    @property
    def step(self) -> int:
        return self.host.step

    def new_stream(self, name: str | None = None) -> Stream:
        """By default as torch.cuda.Stream() makes them: "0 side 1" is rank 0's first."""
        if name is None:
            self.host.made += 1
            name = f"side {self.host.made}"
        stream = Stream(f"{self.host.rank} {name}")
        self.streams.append(stream)
        return stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.host.current = self.current, stream
        yield
        self.host.current = before

    @contextmanager
    def never_waiting(self) -> Iterator[None]:
        """A step of training, on this rank: nothing in it may wait for the device, but for steps before."""
        self.host.step += 1
        self.host.strict = True
        try:
            yield
        finally:
            self.host.strict = False

    def waits(self, what: str) -> None:
        """The host is about to wait for the current stream.

        Raises:
            HostWaits: while a step runs.
        """
        if self.strict:
            raise HostWaits(what)
        stream = self.current
        place = stream.launched
        self.wait_for(lambda: stream.ended >= place, what)

    # -- running ---------------------------------------------------------------------------------------------------

    def launch(self, run: Callable[[], Any]) -> None:
        """On the current stream."""
        self.current.launch(run)
        self.advance()

    def advance(self) -> None:
        """The device goes on beside the host, but for the stream that is kept back."""
        if self.schedule.seed is None:
            while self._step(starved=False):
                pass
            return
        for _ in range(self.random.choice((0, 0, 1, 3, 10))):
            self._step(starved=False)

    def demand(self) -> bool:
        """Run something, what is kept back last; returns whether there was anything that may run."""
        return self._step(starved=False) or self._step(starved=True)

    def _step(self, starved: bool) -> bool:
        streams = [stream for stream in self.streams if (stream.name == self.schedule.starved) == starved]
        if self.schedule.seed is not None:
            self.random.shuffle(streams)
        ran = any(stream.step() for stream in streams)
        self.launches += ran
        return ran

    def wait_for(self, there: Callable[[], bool], what: str) -> None:
        """The host waits until something is there."""
        self.waited += 1
        while not there():
            if not self.demand():
                if self.yield_until is None:
                    raise RuntimeError(f"{what} will never be there")
                self.yield_until(there, what)

    def finish(self) -> None:
        """Run all that has been launched."""
        while self.demand():
            pass
        left = [stream.name for stream in self.streams if stream.queue]
        if left:
            raise RuntimeError(f"these streams wait for what never comes: {left}")

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocated(self, size: int) -> int:
        """Returns the rank that holds so many bytes more."""
        rank = self.host.rank
        self.held[rank] += size
        self.most[rank, self.step] = max(self.most[rank, self.step], self.held[rank])
        return rank

    def freed(self, memory: Tensor, rank: int, stream: Stream, users: set[Stream]) -> None:
        """The allocator gives a block to whoever asks next on its stream: at once as that stream sees it, unless
        others are recorded as its users."""
        self.held[rank] -= memory.untyped_storage().nbytes()
        if self.closed:
            return
        if users - {stream}:
            reuse = Stream(f"{stream.name} reuse")
            self.streams.append(reuse)
            for user in (stream, *users):
                reuse.wait_stream(user)
            stream = reuse
        stream.launch(lambda: memory.fill_(0xFF))


class Block:
    """Memory on the device, until nobody on a host refers to it.

    Attributes:
        users: the streams that `record_stream` has named.
    """

    def __init__(self, inner: Tensor) -> None:
        machine = active()
        self.users: set[Stream] = set()
        memory = torch.empty(0, dtype=torch.uint8).set_(inner.untyped_storage())
        rank = machine.allocated(memory.untyped_storage().nbytes())
        weakref.finalize(self, machine.freed, memory, rank, machine.current, self.users).atexit = False


_active: list[Machine] = []


def active() -> Machine:
    """The machine that tensors on GPUs are on."""
    return _active[-1]


@contextmanager
def activated(machine: Machine) -> Iterator[Machine]:
    _active.append(machine)
    try:
        yield machine
    finally:
        machine.closed = True
        _active.remove(machine)
