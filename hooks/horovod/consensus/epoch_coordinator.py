"""Rank 0's part in epochs: it decides between them, and when the next one begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from .negotiation import REMOVE, Decision, Negotiator, Overdue, Request

#: The most decisions between two epochs, however often epochs have failed.
RAREST = 1024


class Epochs(Protocol):
    """The part of rank 0's `Agreement` that its coordinator uses."""

    def end(self, epoch: int) -> None: ...
    def look(self) -> None: ...
    def release(self, key: str, ranks: Mapping[int, int]) -> list[tuple[int, Request]]: ...
    def overdue(self, seconds: float, again: bool = False) -> list[Overdue]: ...


class EpochCoordinator:
    """Feeds the negotiator between epochs (`epoch_log`), and begins epochs. For one thread, without a network.

    Attributes:
        agreement: rank 0's; set before any rank can say anything.
        leaving: the rank that has left in good order, once no epoch is open.
    """

    def __init__(self, negotiator: Negotiator) -> None:
        self.negotiator = negotiator
        self.agreement: Epochs
        self.leaving: int | None = None
        self._epoch, self._open = 0, True
        #: Ranks whose logs have ended, and messages that wait until that of their rank has.
        self._over: set[int] = set()
        self._held: list[tuple[int, dict[str, Any]]] = []
        self._decided, self._until_next = 0, 1

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Take a rank's announcement of an operation, or of its leave."""
        if self._open or rank not in self._over:
            self._held.append((rank, message))
            if self._open:
                self.agreement.end(self._epoch)
        elif "bye" in message:
            self.leaving = rank
        else:
            self._announce(rank, message)

    def take_over(self, left: Sequence[tuple[int, Request | None]], agreed: int | None) -> None:
        """See `LogCallbacks.hand_over`."""
        if agreed is not None:
            self._open, self._decided = False, 0
            self._over.clear()
            # An epoch only costs if the ranks' orders differ all the time.
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
        """Announce to the negotiator each rank's payload of a key that others announced without payload."""
        self.negotiator.look_again(REMOVE)
        ranks = self.negotiator.waiting(key)
        for rank, request in self.agreement.release(key, ranks) if ranks else ():
            self.negotiator.announce(rank, {**request, "eager": True})

    def decisions(self) -> Iterator[Decision]:
        """Every decision that can be made now, in the order in which it must be sent."""
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
        """Look, now and then, for announcements in another order, and for late ones."""
        for key in self.negotiator.pending():
            self.collect(key)
        self.agreement.look()

    def overdue(self, seconds: float, again: bool = False) -> list[Overdue]:
        """Keys that some ranks have waited for longer than this. Each once, unless `again`."""
        return [*self.negotiator.overdue(seconds, again), *self.agreement.overdue(seconds, again)]
