"""Ranks that share a process: the library's own exchanges, feedback and codecs, over memory instead of a network.

    results = World(1024).run(stages)    # stages(group) on every rank: a generator that yields what it waits for

Ranks run in lockstep on one thread: each goes on until it yields, and all have yielded before anything is waited for.
Only the transport is simulated: a collective moves everybody's data once the last rank has joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compress.backends import ScratchPool
from ...hooks.comm.group import Group
from ...hooks.comm.ports import Collective, Port, Stages, Work


class World:
    """`size` ranks.

    Attributes:
        groups: one for each rank.
        completed: how many collectives have been moved.
        pending: the ranks' parts, in their order, of collectives that have not been moved yet, by number.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.groups = [InProcessGroup(self, rank) for rank in range(size)]
        self.pending = defaultdict[int, list[_Part]](list)
        self.completed = 0
        self._gathered: dict[int, tuple[Tensor, int]] = {}

    def run(self, function: Callable[[InProcessGroup], Stages]) -> list[Any]:
        """Run `function(group)`'s stages on every rank. Returns what each returned, by rank."""
        running, results = {group.rank: function(group) for group in self.groups}, [None] * self.size
        while running:
            works: list[Work] = []
            for rank, stages in list(running.items()):
                try:
                    works.append(next(stages))
                except StopIteration as end:
                    results[rank] = end.value
                    del running[rank]
            for work in works:
                work.wait()
        return results

    def complete(self, number: int) -> None:
        """Move what collectives up to this one move, in the order in which they were started."""
        while self.completed < number:
            self.completed += 1
            parts = self.pending.pop(self.completed)
            if len(parts) < self.size:
                raise RuntimeError(f"{len(parts)} of {self.size} ranks have joined collective {self.completed}")
            parts[0].move([part.arguments for part in parts])

    def gathered(self, number: int, make: Callable[[], Tensor]) -> Tensor:
        """The same memory for the same call on every rank: an all-gather returns the same everywhere."""
        tensor, left = self._gathered.pop(number, (None, self.size))
        tensor = make() if tensor is None else tensor
        if left > 1:
            self._gathered[number] = tensor, left - 1
        return tensor


@dataclass
class _Part:
    """One rank's part in a collective, to be waited for.

    Attributes:
        move: moves everybody's data; it is given the ranks' arguments.
    """

    world: World
    number: int
    arguments: Any
    move: Callable[[list[Any]], None]

    def wait(self) -> None:
        self.world.complete(self.number)


class InProcessGroup(Group):
    """One rank's `Group` in a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._ranks, self.scratch = range(world.size), ScratchPool()
        self._calls = self._gathers = self._tag = 0

    def channel(self, name: str) -> InProcessGroup:
        """This group: in lockstep messages arrive in the order in which they are sent."""
        return self

    def join(self, arguments: Any, move: Callable[[list[Any]], None]) -> Work:
        """Start a collective, by the arguments of `_Part`. Every rank starts the same ones, in the same order."""
        self._calls += 1
        part = _Part(self.world, self._calls, arguments, move)
        self.world.pending[self._calls].append(part)
        return part

    def gather_output(
        self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
    ) -> Tensor:
        self._gathers += 1
        return self.world.gathered(self._gathers, lambda: torch.zeros(*shape, dtype=dtype, device=device))

    def persistent_gather(self, output: Tensor, row: Tensor, ahead: int = 2, coded: bool = False) -> Port:
        return Collective(lambda: self.all_gather(output, row))

    def persistent_swap(self, output: Tensor, rows: Tensor, ahead: int = 2, coded: bool = False) -> Port:
        return Collective(lambda: self.all_to_all(output, rows))

    def all_gather(self, output: Tensor, row: Tensor) -> Work:
        return self.all_gather_v(output, row, [row.numel()] * self.size)

    def all_gather_v(self, output: Tensor, row: Tensor, sizes: Sequence[int]) -> Work:
        def move(arguments: list[Any]) -> None:
            whole = torch.cat([given.view(-1) for _, given in arguments])
            for into in {into.data_ptr(): into for into, _ in arguments}.values():
                into.view(-1).copy_(whole)

        return self.join((output, row), move)

    def all_to_all(self, output: Tensor, rows: Tensor) -> Work:
        sizes = [rows.numel() // self.size] * self.size
        return self.all_to_all_v(output, rows, sizes, sizes)

    def all_to_all_v(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        return self.join((output, rows, sent), _transpose)

    def pairwise(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        own = sent[self.rank]
        received[self.rank][: len(own)].copy_(own)
        return self.join((received, sent), _swap)

    def variable_message(self, longest: int) -> Any:
        return InProcessMessage(self)

    def sum(self, tensor: Tensor, pieces: Tensor) -> Generator[Work, None, None]:
        yield self.all_reduce(tensor)

    def means(self, device: torch.device) -> tuple[Callable[[list[Tensor]], Any], float | None]:
        return (lambda tensors: self.all_reduce(tensors[0])), 1.0 / self.size

    def all_reduce(self, tensor: Tensor) -> Any:
        """Summed in the order of the ranks."""

        def move(tensors: list[Any]) -> None:
            total = tensors[0].clone()
            for given in tensors[1:]:
                total += given
            for given in tensors:
                given.copy_(total)

        return self.join(tensor, move)


class InProcessMessage:
    """A `VariableMessage` of `hooks.comm.ports`, with as much room as its messages take."""

    def __init__(self, group: InProcessGroup) -> None:
        self._group = group
        self.received = torch.empty(0)

    def post_receives(self) -> None:
        """Nothing: no message needs announcing."""

    def send(self, letters: Sequence[Tensor]) -> Any:
        def move(arguments: list[Any]) -> None:
            for to, (_, message) in enumerate(arguments):
                arrived = [given[to] for given, _ in arguments]
                message.received = arrived[0].new_empty(len(arrived), max(map(len, arrived)))
                for row, letter in zip(message.received, arrived, strict=True):
                    row[: len(letter)] = letter

        return self._group.join((letters, self), move)


def _swap(arguments: list[Any]) -> None:
    """Part r of rank s goes to the beginning of place s of rank r."""
    for rank, (received, _) in enumerate(arguments):
        for source, (_, sent) in enumerate(arguments):
            if source != rank and sent[rank].numel():
                received[source][: len(sent[rank])].copy_(sent[rank])


def _transpose(arguments: list[Any]) -> None:
    """Piece r of rank s becomes piece s of rank r."""
    device = arguments[0][0].device
    sizes = torch.tensor([sent for *_, sent in arguments], device=device)
    words = [rows.view(-1).view(torch.uint8) for _, rows, _ in arguments]
    width = arguments[0][0].element_size()
    everything = torch.cat(words)
    lengths = torch.tensor([0, *(len(word) for word in words[:-1])], device=device)
    begins = lengths.cumsum(0)[:, None] + width * (sizes.cumsum(1) - sizes)
    for rank, (output, *_) in enumerate(arguments):
        lengths = width * sizes[:, rank]
        ends = lengths.cumsum(0)
        place = (begins[:, rank] - (ends - lengths)).repeat_interleave(lengths)
        place += torch.arange(len(place), device=device)
        output.view(-1).view(torch.uint8)[: len(place)] = everything[place]
