"""Worlds larger than a machine: the exchanges' own code, on ranks that are threads, over links that are arithmetic.

    world = World(1024, Network(alpha=50e-6, beta=8e-9))
    results = world.run(function)        # function(group) on every rank; group is used like `hooks.group.Group`
    world.times                          # seconds that each rank was under way

Selection, packing, merging and the choice of what to keep are the library's. What is simulated is the transport. A
collective starts when the last rank has come, and ends for a rank after

    all-to-all                 α + (P-1)·o + b·β
    all-gather                 ⌈log2 P⌉·α + b·β
    all-reduce                 2·⌈log2 P⌉·α + b·β

with b the larger of the bytes it sends and receives, α the latency and o what one more message costs, as good
implementations do (recursive doubling, and Rabenseifner's all-reduce); several in flight share the link. To that is added
the processor time of the rank's thread between its collectives, or nothing with `work=False`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hooks.group import Group

#: Thousands of threads, each with a stack of its own.
STACK_BYTES = 1 << 19


@dataclass(frozen=True)
class Network:
    """α–β–o: seconds of latency, seconds a byte, and seconds for each message of an all-to-all."""

    alpha: float
    beta: float
    overhead: float = 2e-6


@dataclass
class Rank:
    """One rank's time: where it is, when its link is free, and its thread's processor time when that was last seen."""

    clock: float = 0.0
    link: float = 0.0
    seen: float = 0.0
    received: int = 0


@dataclass
class _Done:
    """A collective that has been moved already; waiting for it moves the rank's clock."""

    rank: Rank
    end: float

    def wait(self) -> bool:
        self.rank.clock = max(self.rank.clock, self.end)
        return True


@dataclass
class World:
    """`size` ranks, each a thread; collectives are rendezvous of all.

    Args:
        size: P.
        network: between any two ranks.
        work: whether processor time counts.
    """

    size: int
    network: Network
    work: bool = True
    _arguments: list[Any] = field(default_factory=list)

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """Call `function(group)` on every rank; what each returned, by rank. The first exception is raised here."""
        self.ranks = [Rank() for _ in range(self.size)]
        self._arguments = [None] * self.size
        self._shared: dict[int, tuple[Tensor, int]] = {}
        self._lock = threading.Lock()
        self._move: Callable[[list[Any]], None] = lambda arguments: None
        self._barrier = threading.Barrier(self.size, action=lambda: self._move(self._arguments))
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def serve(rank: int) -> None:
            self.ranks[rank].seen = time.thread_time()
            try:
                group = SimulatedGroup(self, rank)
                results[rank] = function(group)
                self.tick(rank)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        before = threading.stack_size(STACK_BYTES)
        try:
            threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(self.size)]
            for thread in threads:
                thread.start()
        finally:
            threading.stack_size(before)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    @property
    def times(self) -> list[float]:
        return [rank.clock for rank in self.ranks]

    def tick(self, rank: int) -> None:
        """Add what a rank's thread has worked since it was last seen."""
        state, now = self.ranks[rank], time.thread_time()
        if self.work:
            state.clock += now - state.seen
        state.seen = now

    def meet(self, rank: int, argument: Any, move: Callable[[list[Any]], None], latency: float, size: int) -> _Done:
        """A collective: the last rank to come moves everybody's data."""
        self.tick(rank)
        state = self.ranks[rank]
        self._arguments[rank] = argument, state.clock
        self._move = move
        self._barrier.wait()
        start = max(clock for _, clock in self._arguments)
        state.link = max(start + latency, state.link) + size * self.network.beta
        state.received += size
        self._barrier.wait() if self.size > 1 else None
        state.seen = time.thread_time()  # moving was not the rank's own work
        return _Done(state, state.link)

    def shared(self, rank: int, call: int, make: Callable[[], Tensor]) -> Tensor:
        """The same memory for the same call on every rank: what an all-gather returns is the same everywhere."""
        with self._lock:
            tensor, left = self._shared.pop(call, (None, self.size))
            tensor = make() if tensor is None else tensor
            if left > 1:
                self._shared[call] = tensor, left - 1
            return tensor


class SimulatedGroup(Group):
    """What `Group` is to a process group, to a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.ranks = tuple(range(world.size))
        self._calls = 0

    def gathered(self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu") -> Tensor:
        self._calls += 1
        return self.world.shared(self.rank, self._calls, lambda: torch.zeros(*shape, dtype=dtype, device=device))

    def all_gather(self, output: Tensor, row: Tensor) -> Any:
        return self.all_gather_v(output, row, [row.numel()] * self.size)

    def all_gather_v(self, output: Tensor, row: Tensor, sizes: Sequence[int]) -> Any:
        def move(arguments: list[Any]) -> None:
            rows = [given[1].view(-1) for given, _ in arguments]
            whole = torch.cat(rows)
            for into in {given[0].data_ptr(): given[0] for given, _ in arguments}.values():
                into.view(-1).copy_(whole)

        latency = math.ceil(math.log2(self.size)) * self.world.network.alpha if self.size > 1 else 0.0
        others = (sum(sizes) - row.numel()) * row.element_size()
        return self.world.meet(self.rank, (output, row), move, latency, others)

    def all_to_all(self, output: Tensor, rows: Tensor) -> Any:
        sizes = [rows.numel() // self.size] * self.size
        return self.all_to_all_v(output, rows, sizes, sizes)

    def all_to_all_v(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Any:
        own = received[self.rank]
        size = max(sum(received) - own, sum(sent) - own) * rows.element_size()
        network = self.world.network
        latency = network.alpha + (self.size - 1) * network.overhead if self.size > 1 else 0.0
        return self.world.meet(self.rank, (output, rows, sent), _transpose, latency, size)

    def all_reduce(self, tensor: Tensor) -> Any:
        def move(arguments: list[Any]) -> None:
            total = arguments[0][0].clone()
            for given, _ in arguments[1:]:
                total += given
            for given, _ in arguments:
                given.copy_(total)

        steps = 2 * math.ceil(math.log2(self.size)) if self.size > 1 else 0
        moved = 2 * tensor.nbytes * (self.size - 1) // self.size
        return self.world.meet(self.rank, tensor, move, steps * self.world.network.alpha, moved)


def _transpose(arguments: list[Any]) -> None:
    """Piece r of rank s becomes piece s of rank r."""
    sizes = np.array([given[2] for given, _ in arguments], np.int64)
    words = [given[1].view(-1).view(torch.uint8).numpy() for given, _ in arguments]
    width = arguments[0][0][0].element_size()
    everything = np.concatenate(words)
    begins = np.cumsum([0, *(len(word) for word in words[:-1])])[:, None] + width * (np.cumsum(sizes, 1) - sizes)
    for rank, (given, _) in enumerate(arguments):
        lengths = width * sizes[:, rank]
        into = given[0].view(-1).view(torch.uint8).numpy()
        ends = np.cumsum(lengths)
        place = np.arange(ends[-1]) + np.repeat(begins[:, rank] - (ends - lengths), lengths)
        into[: ends[-1]] = everything[place]
