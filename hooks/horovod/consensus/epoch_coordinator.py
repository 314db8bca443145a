"""Rank 0 decides where the ranks cannot agree by themselves: what stands before the negotiator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from .negotiation import REMOVE, Decision, Negotiator, Overdue, Request

#: The most decisions after which ranks try to do without, when they could not before.
RAREST = 1024


class OwnPart(Protocol):
    """What the desk needs of rank 0's `Agreement`."""

    def end(self, epoch: int) -> None: ...
    def look(self) -> None: ...
    def surrender(self, key: str, ranks: Mapping[int, int]) -> list[tuple[int, Request]]: ...
    def overdue(self, seconds: float, again: bool = False) -> list[Overdue]: ...


class Desk:
    """Decides between epochs (`ahead`), and when the next one begins. For one thread, without a network.

    Attributes:
        own: rank 0's part in the epochs; given before any rank can say anything.
        leaving: the rank that has left in good order, once its time has come.
    """

    def __init__(self, negotiator: Negotiator) -> None:
        self.negotiator = negotiator
        self.own: OwnPart
        self.leaving: int | None = None
        self._epoch, self._open = 0, True
        #: Ranks whose logs have ended, and what must wait until that of its rank has.
        self._over: set[int] = set()
        self._held: list[tuple[int, dict[str, Any]]] = []
        self._decided, self._until_next = 0, 1

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """A rank announces an operation, or its leave."""
        if self._open or rank not in self._over:
            self._held.append((rank, message))
            if self._open:
                self.own.end(self._epoch)
        elif "bye" in message:
            self.leaving = rank
        else:
            self._announce(rank, message)

    def take_over(self, left: Sequence[tuple[int, Request | None]], agreed: int | None) -> None:
        """See `Actions.left`."""
        if agreed is not None:
            self._open, self._decided = False, 0
            self._over.clear()
            # Where the ranks' orders differ all the time an epoch only costs.
            self._until_next = 1 if agreed >= 4 * self._until_next else min(2 * self._until_next, RAREST)
        for rank, request in left:
            if request is not None:
                self._announce(rank, request)
                continue
            self._over.add(rank)
            held, self._held = self._held, []
            for other, message in held:
                self.hear(other, message)

    def collect(self, key: str) -> None:
        """Ranks may have announced a key with its payload of which others have announced no more than the key."""
        self.negotiator.look_again(REMOVE)
        ranks = self.negotiator.waiting(key)
        for rank, request in self.own.surrender(key, ranks) if ranks else ():
            self.negotiator.announce(rank, {**request, "parcel": True})

    def decisions(self) -> Iterator[Decision]:
        """Everything that can be said now, in the order in which it must be sent."""
        for decision in self.negotiator.decisions():
            self._decided += decision.acknowledge is not None
            yield decision
        quiet = self.negotiator.idle and len(self._over) == self.negotiator.size and self.leaving is None
        if not self._open and quiet and self._decided >= self._until_next:
            self._open = True
            self._epoch += 1
            yield Decision(tuple(range(self.negotiator.size)), {"do": "begin", "epoch": self._epoch})

    def _announce(self, rank: int, request: Request) -> None:
        self.negotiator.announce(rank, request)
        self.collect(request["key"])

    def look(self) -> None:
        """Now and then: for what others cannot wait."""
        for key in self.negotiator.pending():
            self.collect(key)
        self.own.look()

    def overdue(self, seconds: float, again: bool = False) -> list[Overdue]:
        """What some ranks wait for longer than this. Each once, unless `again`."""
        return [*self.negotiator.overdue(seconds, again), *self.own.overdue(seconds, again)]
