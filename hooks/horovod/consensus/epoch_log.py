"""Agreement without a coordinator, among ranks that submit the same operations in the same order.

Every rank sends what it submits to all others at once, and all apply the same rules to the same logs: agreeing takes
one latency, where asking rank 0 takes two. Nothing here talks to a network or touches a tensor.

Time is divided into epochs. In an epoch the n-th entries of all ranks' logs are compared: while they are equal, they
run, in this order. The first unequal place ends the epoch, on every rank at the same place, for it follows from the
logs and not from when they arrive. A mark, which agrees with nothing, ends an epoch on purpose. Entries that are left,
and all that is submitted until the next epoch, go to rank 0 (`coordinator`, `negotiation`), which finds matches in any
order and says why others never match. Rank 0 starts the next epoch once no operation is waiting.

Small inputs need no order, and travel with their announcement instead (`eager_payloads`).

On four ranks 50 ms apart, an allreduce of 80 kB takes 769 ms with epochs and 835 ms by rank 0 alone, a step of
`OneBit()` by "gather" 157 and 197 ms, an uncompressed one 2125 and 2169 ms:
`gradwire-bench links --world 4 --delay 50ms -- python tests/support/horovod_latency.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ...timeouts import EPOCH_SECONDS
from .negotiation import MAX_IN_FLIGHT, REMOVE, Ready, Request, agree, request_bytes

#: Kinds that change the rules by which ranks agree: the coordinator's business.
COORDINATED = ("join", "process_set.add", REMOVE)


class Entry(NamedTuple):
    """An operation that a rank has submitted. `ends`, of rank 0: it is the last of those that share a buffer."""

    request: Request
    ends: bool = False


#: An entry, or None: a mark.
Line = Entry | None


class LogCallbacks(NamedTuple):
    """Actions of an `EpochLog`."""

    #: Send to all other ranks: epoch, line.
    tell: Callable[[int, Line], None]
    #: Announce to the coordinator.
    ask: Callable[[Request], None]
    #: Run these together: epoch, operations that all agree on.
    run: Callable[[int, list[Ready]], None]
    #: Carry out a decision of the coordinator.
    follow: Callable[[dict[str, Any]], None]
    #: On rank 0: pairs of rank and request for the coordinator, None after a rank's last. With a number the epoch is
    #: over, and so many were agreed on in it.
    hand_over: Callable[[list[tuple[int, Request | None]], int | None], None]


class EpochLog:
    """One rank's view of the logs of all ranks. The first epoch begins with it.

    Args:
        rank, size: of this rank and of the world.
        fusion_bytes: the most bytes of reductions that share a buffer.
        callbacks: called from the methods below.

    Attributes:
        open: the epoch goes on.
        appending: this rank may still add to its log.
        agreed: number of entries that all agree on.
    """

    def __init__(self, rank: int, size: int, fusion_bytes: int, callbacks: LogCallbacks) -> None:
        self.rank, self.size, self.fusion_bytes, self._callbacks = rank, size, fusion_bytes, callbacks
        self.epoch = 0
        self.open = self.appending = True
        #: By epoch: lines of each rank that not all agree on yet.
        self._logs: dict[int, list[deque[Line]]] = {}
        #: The time since which there is an entry that not all agree on.
        self.agreed, self._since = 0, time.monotonic()
        self._together: list[Ready] = []
        self._decisions: deque[dict[str, Any]] = deque()
        #: Requests that rank 0 holds back while enough is in flight, to fuse them.
        self._held: list[Request] = []
        self._running = 0
        self._to_end = -1

    def submit(self, request: Request) -> None:
        """Take an operation that this rank is ready for."""
        if not self.appending:
            self._callbacks.ask(request)
        elif request["kind"] in COORDINATED or request["set"] != 0:
            self.end_epoch()
            self._callbacks.ask(request)
        elif self.rank == 0:
            self._held.append(request)
            if request["fuse"] is None or self._running < MAX_IN_FLIGHT:
                self._add_held()
        else:
            self._add(Entry(request))

    def receive(self, rank: int, epoch: int, line: Line) -> None:
        """Take a line that another rank has added to its log."""
        if epoch < self.epoch or (epoch == self.epoch and not self.open):
            if self.rank == 0:
                self._callbacks.hand_over([(rank, None if line is None else line.request)], None)
            return
        self._log(epoch)[rank].append(line)
        if epoch == self.epoch:
            self._look_at(line)

    def end(self, epoch: int) -> None:
        """On rank 0: end this epoch as soon as it has begun here."""
        self._to_end = epoch
        if epoch == self.epoch:
            self.end_epoch()

    def end_epoch(self) -> None:
        """End this rank's log, and with it the epoch."""
        if self.appending:
            self.appending = False
            self._add(None)
            self._give_up_held()

    def follow(self, message: dict[str, Any]) -> None:
        """Take a decision of the coordinator. It decides once the epoch is over there, which need not be so here."""
        self._decisions.append(message)
        self._obey()

    def done(self, epoch: int) -> None:
        """Count operations that were to run as done."""
        if epoch == self.epoch:
            self._running -= 1
            if self.appending and self._running < MAX_IN_FLIGHT:
                self._add_held()

    def look(self) -> None:
        """On rank 0, now and then: end an epoch in which ranks have waited too long for others."""
        waiting = self.open and any(self._log(self.epoch))
        if waiting and time.monotonic() - self._since > EPOCH_SECONDS:
            self.end_epoch()

    def _log(self, epoch: int) -> list[deque[Line]]:
        return self._logs.setdefault(epoch, [deque() for _ in range(self.size)])

    def _add(self, line: Line) -> None:
        self._callbacks.tell(self.epoch, line)
        self._log(self.epoch)[self.rank].append(line)
        self._look_at(line)

    def _add_held(self) -> None:
        """Neighbours that can be fused end together."""
        held, self._held = self._held, []
        size = 0
        for place, request in enumerate(held):
            after = held[place + 1] if place + 1 < len(held) else None
            size += request_bytes(request)
            ends = (
                after is None
                or request["fuse"] is None
                or after["fuse"] != request["fuse"]
                or size + request_bytes(after) > self.fusion_bytes
            )
            if ends:
                size, self._running = 0, self._running + 1
            if self.appending:
                self._add(Entry(request, ends))
            else:  # the epoch has ended meanwhile
                self._callbacks.ask(request)

    def _give_up_held(self) -> None:
        held, self._held = self._held, []
        for request in held:
            self._callbacks.ask(request)

    def _look_at(self, line: Line) -> None:
        if line is None:
            self.end_epoch()
        self._compare()

    def _compare(self) -> None:
        while self.open:
            logs = self._log(self.epoch)  # another epoch's, where one has ended and the next begun
            lines = [log[0] for log in logs if log]
            if None in lines or len({line.request["key"] for line in lines if line is not None}) > 1:
                self._close()
            elif len(lines) < self.size:
                if len(lines) <= 1:
                    self._since = time.monotonic()
                break
            else:
                self._agree(dict(enumerate(lines)))

    def _agree(self, lines: dict[int, Line]) -> None:
        requests = {rank: line.request for rank, line in lines.items() if line is not None}
        ready, problem = agree(requests, range(self.size))
        if problem is not None:  # the coordinator will say so to all
            self._close()
            return
        self._together.append(ready)
        self.agreed += 1
        for log in self._log(self.epoch):
            log.popleft()
        self._since = time.monotonic()
        first = lines[0]
        if first is not None and first.ends:
            self._run()

    def _run(self) -> None:
        together, self._together = self._together, []
        if together:
            self._callbacks.run(self.epoch, together)

    def _close(self) -> None:
        self.open = False
        self._run()
        if self.appending:  # rank 0 has to know which entry was the last
            self.appending = False
            self._callbacks.tell(self.epoch, None)
            self._log(self.epoch)[self.rank].append(None)
        if self.rank == 0:
            logs = enumerate(self._log(self.epoch))
            rest = [(rank, line and line.request) for rank, log in logs for line in log]
            self._callbacks.hand_over(rest, self.agreed)
        self._give_up_held()
        self._obey()

    def _obey(self) -> None:
        while self._decisions and not self.open:
            message = self._decisions.popleft()
            if message["do"] == "begin":
                self._begin(message["epoch"])
            else:
                self._callbacks.follow(message)

    def _begin(self, epoch: int) -> None:
        self._logs.pop(self.epoch, None)
        self.epoch, self.open, self.appending = epoch, True, True
        self.agreed, self._running, self._since = 0, 0, time.monotonic()
        if epoch == self._to_end or any(None in log for log in self._log(epoch)):
            self.end_epoch()
        self._compare()
