"""Ranks as threads of one process, of which one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .cuda import installed
from .machine import Machine, Schedule
from .nccl import Communicator, Keeping, Words, check_order
from .tensors import Factories


class Deadlock(RuntimeError):
    """All ranks wait, and so does every GPU."""


class World:
    """Some ranks, each with a GPU: `World(2).run(function)` calls `function(world, rank)` on each.

    Args:
        size: ranks.
        schedule: what the GPUs run when.
        keeping: how NCCL keeps memory.
    """

    def __init__(self, size: int, schedule: Schedule | None = None, keeping: Keeping = "hold") -> None:
        self.size, self.keeping, self.machine = size, keeping, Machine(schedule or Schedule())
        self.machine.yield_until = self.wait_until
        self.order: dict[int, list[tuple[str, int]]] = {}
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        self._words: dict[tuple[int, ...], Words] = {}
        self.words = Words(range(size), self.wait_until)
        self._turn = threading.Condition()
        self._running = 0
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._alive = set(range(size))
        self._failure: BaseException | None = None

    def communicator(self, ranks: tuple[int, ...]) -> Communicator:
        """NCCL's of these ranks."""
        if ranks not in self._communicators:
            name = "nccl" if len(ranks) == self.size else f"nccl {ranks}"
            self._communicators[ranks] = Communicator(self.machine, name, ranks, self.keeping, self.order)
        return self._communicators[ranks]

    def words_of(self, ranks: tuple[int, ...]) -> Words:
        """Messages between the hosts of these ranks."""
        return self._words.setdefault(ranks, Words(ranks, self.wait_until))

    def run(self, function: Callable[[World, int], Any]) -> list[Any]:
        """What each rank returns.

        Raises:
            what the first of them that failed has raised.
        """
        results: list[Any] = [None] * self.size
        with installed(self.machine):
            threads = [threading.Thread(target=self._rank, args=(function, r, results)) for r in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self._failure is not None:
                raise self._failure
            self.machine.finish()
            check_order(self.order)
        return results

    def _rank(self, function: Callable[[World, int], Any], rank: int, results: list[Any]) -> None:
        self.machine.host.rank = rank
        with self._turn:
            self._turn.wait_for(lambda: self._running == rank)
            try:
                if self._failure is None:
                    with torch.no_grad(), Factories():
                        results[rank] = function(self, rank)
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                self._alive.discard(rank)
                self._pass_on(rank)

    def wait_until(self, there: Callable[[], bool], what: str) -> None:
        """Let other ranks run until something is there.

        Raises:
            Deadlock: it never will be.
        """
        rank = self.machine.host.rank
        self._waiting[rank] = there, what
        try:
            while not there():
                self._pass_on(rank)
                self._turn.wait_for(lambda: self._running == rank)
                if self._failure is not None:
                    raise RuntimeError("another rank has failed") from self._failure
        finally:
            del self._waiting[rank]

    def _pass_on(self, rank: int) -> None:
        """Let another rank run that can."""
        while self._alive:
            others = [(rank + i) % self.size for i in range(1, self.size + 1) if (rank + i) % self.size in self._alive]
            for other in others:
                if self._failure is not None or other not in self._waiting or self._waiting[other][0]():
                    self._running = other
                    self._turn.notify_all()
                    return
            if not self.machine.demand():
                self._failure = Deadlock(f"{ {r: what for r, (_, what) in self._waiting.items()} }")
