"""Worlds larger than a machine: the exchanges' own code, on ranks that are threads, over links that are arithmetic.

    world = World(1024, Network(alpha=50e-6, beta=8e-9))
    results = world.run(function)        # function(group) on every rank; group is used like `hooks.group.Group`
    world.times, world.work              # seconds of each rank in the network, and of its processor

Selection, packing, merging and the choice of what to keep are the library's. What is simulated is the transport. A
collective starts when the last rank has come, and ends for a rank after

    all-to-all                 α + (P-1)·o + b·β
    all-gather                 ⌈log2 P⌉·α + b·β
    all-reduce                 2·⌈log2 P⌉·α + b·β

with b the larger of the bytes it sends and receives, α the latency and o what one more message costs, as good
implementations do (recursive doubling, and Rabenseifner's all-reduce); several in flight share the link. The processor
time of each rank's thread between its collectives is counted apart, `world.work`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...compress import TopK
from ...compress.feedback.base import NOTHING
from ...hooks.comm.entry_exchange import Entries, EntryExchanger
from ...hooks.comm.group import Group
from ...hooks.comm.pipeline import drive
from ...hooks.comm.ports import Work
from ...hooks.exchanges.split import Split
from ..common import report

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
    """One rank's time: where it is, when its link is free, what its thread has worked, and when it was last seen."""

    clock: float = 0.0
    link: float = 0.0
    work: float = 0.0
    seen: float = 0.0


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
    """

    size: int
    network: Network
    _arguments: list[Any] = field(default_factory=list)

    def run(self, function: Callable[..., Any]) -> list[Any]:
        """Call `function(group)` on every rank; what each returned, by rank. The first exception is raised here."""
        self.ranks = [Rank() for _ in range(self.size)]
        self._arguments = [None] * self.size
        self._shared: dict[int, tuple[Tensor, int]] = {}
        self._lock = threading.Lock()
        self._move: Callable[[list[Any]], None] | None = None
        self._barrier = threading.Barrier(self.size, action=self._move_once)
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def serve(rank: int) -> None:
            torch.set_num_threads(1)  # or every rank would get a team of threads of its own
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

    @property
    def work(self) -> list[float]:
        return [rank.work for rank in self.ranks]

    def tick(self, rank: int) -> None:
        """Add what a rank's thread has worked since it was last seen."""
        state, now = self.ranks[rank], time.thread_time()
        state.work += now - state.seen
        state.seen = now

    def meet(
        self,
        rank: int,
        argument: Any,
        move: Callable[[list[Any]], None],
        latency: float,
        size: int | Callable[[], int],
    ) -> _Done:
        """A collective: the last rank to come moves everybody's data, after which its size is asked for."""
        self.tick(rank)
        state = self.ranks[rank]
        self._arguments[rank] = argument, state.clock
        self._move = move
        self._barrier.wait()
        start = max(clock for _, clock in self._arguments)
        moved = size() if callable(size) else size
        state.link = max(start + latency, state.link) + moved * self.network.beta
        self._barrier.wait()  # nobody may come to the next one while others still read this one's arguments
        state.seen = time.thread_time()  # moving was not the rank's own work
        return _Done(state, state.link)

    def _move_once(self) -> None:
        move, self._move = self._move, None
        if move is not None:
            move(self._arguments)

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
        self._ranks = range(world.size)
        self._calls = self._tag = 0

    def begin(self) -> None:
        """What this rank's thread has worked so far does not count."""
        self.world.ranks[self.rank].seen = time.thread_time()

    def gather_output(
        self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
    ) -> Tensor:
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

    def variable_message(self, longest: int, ahead: int = 2) -> Any:
        return SimulatedPort(self)

    def sum(self, tensor: Tensor, pieces: Tensor) -> Generator[Work, None, None]:
        yield self.all_reduce(tensor)

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


class SimulatedPort:
    """What a `VariableMessage` is, with as much room as it takes."""

    def __init__(self, group: SimulatedGroup) -> None:
        self._group = group

    def send(self, letters: Sequence[Tensor]) -> Any:
        group, network, rank = self._group, self._group.world.network, self._group.rank
        to_all = all(letter is letters[0] for letter in letters)
        latency = math.ceil(math.log2(group.size)) * network.alpha if to_all else network.alpha
        latency += 0.0 if to_all else (group.size - 1) * network.overhead
        sent = len(letters[0]) if to_all else sum(map(len, letters)) - len(letters[rank])
        arrived = list[Tensor]()

        def move(arguments: list[Any]) -> None:
            for to, (given, _) in enumerate(arguments):
                given[1].extend(arguments[source][0][0][to] for source in range(group.size))

        def size() -> int:
            lengths = [len(letter) for letter in arrived]
            self.received = torch.empty(group.size, max(lengths), dtype=torch.uint8)
            for row, letter in zip(self.received, arrived, strict=True):
                row[: len(letter)] = letter
            return max(sent, sum(lengths) - lengths[rank])

        return group.world.meet(rank, (letters, arrived), move, latency if group.size > 1 else 0.0, size)


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


#: Entries of all ranks beyond which only some unpack and sum what they gather: the others would do the same.
EVERYBODY = 1 << 19
#: Entries of all ranks together beyond which `union` is left out: every rank has to look at all of them.
UNION_ENTRIES = 1 << 21


@dataclass(frozen=True)
class Task:
    """One all-reduce in a simulated world; called with each rank's group."""

    algorithm: str
    numel: int
    dtype: torch.dtype
    index_sets: Sequence[Tensor]

    def __call__(self, group: SimulatedGroup) -> tuple[int, Entries | None]:
        """Bytes received, and the result on the first rank."""
        carrier = EntryExchanger(self.numel, self.dtype, torch.device("cpu"), group)
        entries = self.entries(group.rank)
        k = len(entries)
        if self.algorithm == "split-k":
            return self.largest(group, entries, k)
        group.begin()
        sums = self.reduce(carrier, entries, k, group.rank == 0 or k * group.size <= EVERYBODY)
        return carrier.received, sums if group.rank == 0 else None

    def entries(self, rank: int) -> Entries:
        indices = self.index_sets[rank]
        return Entries(indices.int(), torch.randn(len(indices), generator=torch.Generator().manual_seed(rank)))

    def reduce(self, carrier: EntryExchanger, entries: Entries, k: int, observed: bool) -> Entries | None:
        if self.algorithm == "gather":
            moving = carrier.start_gather(entries, k)
            for _, work in moving:
                work.wait()
            return carrier.finish_gather(moving, k) if observed else None
        if self.algorithm == "union":
            union: Entries = drive(carrier.union(entries, k))
            return union
        bounds = drive(carrier.balanced_bounds(entries.indices))
        owned = drive(carrier.to_owners(entries, bounds))
        counts = drive(carrier.all_counts(len(owned)))
        shares = carrier.start_sharing(owned, counts, bounds)
        for _, work in shares:
            work.wait()
        return carrier.finish_sharing(shares, counts, bounds) if observed else None

    def largest(self, group: SimulatedGroup, entries: Entries, k: int) -> tuple[int, Entries | None]:
        """With the k largest sums alone, as a model's gradients are exchanged, in the first step."""
        codec = TopK((k - 0.5) / self.numel, values=self.dtype)
        exchange = Split(codec, self.numel, 0, torch.device("cpu"), group)
        group.begin()
        means = drive(exchange.bring_together(entries, torch.zeros(0), NOTHING))
        sums = Entries(means.indices, means.values * group.size) if group.rank == 0 else None
        return exchange.bytes_received, sums


def simulate(task: Task, world_size: int, network: Network) -> dict[str, Any]:
    """Bytes received by the busiest rank, its seconds in the network, and with the work of a typical one.

    Raises:
        RuntimeError: the result is not the sum, in float64, of what the ranks had.
    """
    world = World(world_size, network)
    results = world.run(task)
    check(task, world_size, results[0][1])
    received, spent = max(received for received, _ in results), max(world.times)
    # The first rank does everything; of the others the middle one, as threads disturb each other.
    work = max(world.work[0], report.median(world.work))
    return {"received_bytes": received, "network_s": spent, "seconds": spent + work}


def check(task: Task, world_size: int, result: Entries | None) -> None:
    """Raises RuntimeError unless `result` holds sums of what the ranks of the task have, and all or the largest."""
    assert result is not None
    total = torch.zeros(task.numel, dtype=torch.float64)
    for rank in range(world_size):
        entries = task.entries(rank)
        total[entries.indices.long()] += entries.values
    at = result.indices.long()
    exact = task.dtype == torch.float32
    close = torch.isclose(result.values.double(), total[at], rtol=1e-4 if exact else 0.1, atol=1e-3 if exact else 1.0)
    missing = total.clone()
    missing[at] = 0
    bound = 0.0 if task.algorithm != "split-k" else float(total[at].abs().min())
    if not bool(close.all()) or float(missing.abs().max()) > bound * 1.001 + 1e-9:
        raise RuntimeError(f"the simulated {task.algorithm} of {world_size} ranks does not give the sum")


def estimate_dense(numel: int, world_size: int, network: Network) -> dict[str, Any]:
    """A dense all-reduce, which needs no simulation."""
    moved = 8 * numel * (world_size - 1) // world_size
    seconds = 2 * math.ceil(math.log2(world_size)) * network.alpha + moved * network.beta
    return {"received_bytes": moved, "seconds": seconds, "network_s": seconds}
