"""Operations whose input is so small that it travels with their announcement, to every rank.

Nothing is left to exchange then, so that their order does not matter: each ends when the last announcement is here,
after one latency: an allreduce of 16 bytes takes 56 ms on four ranks 50 ms apart, and 414 ms otherwise
(`tests/support/horovod_latency.py`). Nothing here talks to a network or touches a tensor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .negotiation import Overdue, Ready, Request, agree


@dataclass
class _Announcement:
    round: int
    mixed: int
    request: Request
    payload: bytes


class Delivered(NamedTuple):
    """An operation that every member has announced, or has joined before: its inputs, or the problem."""

    key: str
    members: tuple[int, ...]
    ready: Ready
    problem: str | None
    payloads: dict[int, bytes]


@dataclass
class _Waiting:
    members: tuple[int, ...]
    since: float = field(default_factory=time.monotonic)
    warned: bool = False
    queues: dict[int, deque[_Announcement]] = field(default_factory=dict)


class EagerPayloads:
    """Announcements with payload, of this rank and of others.

    A rank may announce a key again as soon as the operation has ended there: others then hold two of its announcements.

    Attributes:
        heard: number of announcements that have come, by rank.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._joins = [0] * size
        self.heard = [0] * size
        self._waiting: dict[str, _Waiting] = {}
        #: Announcements still to come that the coordinator has dealt with, by key and rank.
        self._discarded: dict[tuple[str, int], int] = {}

    def announce(
        self, rank: int, round: int, mixed: int, members: Sequence[int], request: Request, payload: bytes
    ) -> Iterator[Delivered]:
        """Take a rank's announcement; the operations that it completes.

        Args:
            round: how often the rank had joined before.
            mixed: how often it had heard of this key from the coordinator, as others had announced it without payload.
        """
        key = request["key"]
        self.heard[rank] += 1
        if self._discarded.get((key, rank)):
            self._discarded[key, rank] -= 1
            if not self._discarded[key, rank]:
                del self._discarded[key, rank]
            return
        waiting = self._waiting.setdefault(key, _Waiting(tuple(members)))
        waiting.queues.setdefault(rank, deque()).append(_Announcement(round, mixed, request, payload))
        yield from self._settle(key)

    def join(self, rank: int) -> Iterator[Delivered]:
        """Take a rank's join: it announces nothing until all have joined."""
        self._joins[rank] += 1
        for key in list(self._waiting):
            yield from self._settle(key)

    def discard(self, key: str, ranks: Sequence[int]) -> None:
        """Drop these ranks' first announcements of a key, with which the coordinator has dealt."""
        for rank in ranks:
            if not self._take(key, rank):
                self._discarded[key, rank] = self._discarded.get((key, rank), 0) + 1

    def release(self, key: str, ranks: Mapping[int, int]) -> list[tuple[int, Request]]:
        """On rank 0: hand announcements of a key with payload to the coordinator, which deals with the key.

        Args:
            ranks: those that announced the key to the coordinator, each with the number of its announcements with
                payload before that. Until these have come and ended, announcements of the key may belong to them.
        """
        waiting = self._waiting.get(key)
        if waiting is None or any(waiting.queues.get(rank) or self.heard[rank] < n for rank, n in ranks.items()):
            return []
        return [(rank, taken.request) for rank in list(waiting.queues) for taken in self._take(key, rank)]

    def overdue(self, seconds: float, again: bool = False) -> Iterator[Overdue]:
        """See `Negotiator.overdue`."""
        now = time.monotonic()
        for key, waiting in self._waiting.items():
            if now - waiting.since > seconds and (again or not waiting.warned):
                waiting.warned = True
                here = sorted(rank for rank, queue in waiting.queues.items() if queue)
                yield key, here, [rank for rank in waiting.members if rank not in here], now - waiting.since

    def busy(self, set_id: int) -> bool:
        """True if operations of a process set are waiting."""
        return any(
            queue[0].request["set"] == set_id for each in self._waiting.values() for queue in each.queues.values()
        )

    def _take(self, key: str, rank: int) -> list[_Announcement]:
        waiting = self._waiting.get(key)
        queue = waiting.queues.get(rank) if waiting is not None else None
        if waiting is None or not queue:
            return []
        taken = [queue.popleft()]
        if not queue:
            del waiting.queues[rank]
        if not waiting.queues:
            del self._waiting[key]
        return taken

    def _settle(self, key: str) -> Iterator[Delivered]:
        while (waiting := self._waiting.get(key)) is not None:
            heads = {rank: queue[0] for rank, queue in waiting.queues.items()}
            round = min(head.round for head in heads.values())
            present = [rank for rank in waiting.members if rank in heads and heads[rank].round == round]
            if any(rank not in present and self._joins[rank] <= round for rank in waiting.members):
                return
            if len({heads[rank].mixed for rank in present}) > 1:
                return  # the coordinator has an answer on its way to the one that has heard less
            requests = {rank: heads[rank].request for rank in present}
            payloads = {rank: heads[rank].payload for rank in present}
            for rank in present:
                self._take(key, rank)
            if key in self._waiting:
                self._waiting[key].since, self._waiting[key].warned = time.monotonic(), False
            ready, problem = agree(requests, waiting.members)
            yield Delivered(key, waiting.members, ready, problem, payloads)
