"""Agreement without a coordinator, for ranks that submit the same operations in the same order.

Every rank sends what it submits to all others at once, and all apply the same rules to the same logs, so that one
message's way is enough. Nothing here talks to a network or touches a tensor.

`Ledger` is for operations whose order matters. Time is divided into epochs. In an epoch the n-th entries of all ranks'
logs are compared: as long as they are equal, they run, in this order. The first place where they are not ends the
epoch, on every rank at the same place, for it follows from the logs and not from when they arrive; a mark, which agrees
with nothing, ends it on purpose. What is left of the logs, and all that is submitted until the next epoch, goes to the
coordinator (`control`, `negotiation`), which finds matches in any order and says what is wrong with those that never
match. Rank 0 starts the next epoch, when no operation is waiting.

`Parcels` is for operations whose input is so small that it travels with their announcement. Nothing is left to exchange
then, so that their order does not matter: each ends when the last announcement is here.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .negotiation import AHEAD, REMOVE, Overdue, Ready, Request, agree, request_bytes

#: Kinds that change what the ranks agree by: the coordinator's business.
COORDINATED = ("join", "process_set.add", REMOVE)
#: Seconds after which entries that only some ranks have made go to the coordinator, which can run others meanwhile.
PATIENCE = 1.0


class Entry(NamedTuple):
    """What a rank has submitted. `ends` is rank 0's word: it and those since the last such may share one buffer."""

    request: Request
    ends: bool = False


#: An entry, or a mark.
Line = Entry | None


class Actions(NamedTuple):
    """What a `Ledger` wants done."""

    #: Send to all other ranks: epoch, line.
    tell: Callable[[int, Line], None]
    #: Announce to the coordinator.
    ask: Callable[[Request], None]
    #: Run these together: epoch, what all agree on.
    run: Callable[[int, list[Ready]], None]
    #: Carry out what the coordinator has said.
    follow: Callable[[dict[str, Any]], None]
    #: On rank 0: rank, request that are for the coordinator, None after a rank's last. With a number the epoch is
    #: over, in which so many were agreed on.
    left: Callable[[list[tuple[int, Request | None]], int | None], None]


class Ledger:
    """One rank's view of the logs of all. The first epoch begins with it.

    Args:
        rank, size: of this rank and of the world.
        fusion_bytes: reductions are put together up to this many bytes.
        actions: is called from the methods below.
    """

    def __init__(self, rank: int, size: int, fusion_bytes: int, actions: Actions) -> None:
        self.rank, self.size, self.fusion_bytes, self._do = rank, size, fusion_bytes, actions
        self.epoch = 0
        #: Whether the epoch goes on, and whether this rank may still add to its log.
        self.open = self.appending = True
        #: By epoch: what each rank has added, and not all agree on yet.
        self._logs: dict[int, list[deque[Line]]] = {}
        #: How many entries all agree on, and since when there is one that they do not agree on yet.
        self.agreed, self._since = 0, time.monotonic()
        self._together: list[Ready] = []
        self._told: deque[dict[str, Any]] = deque()
        #: Rank 0 keeps back what can be fused while enough is under way.
        self._kept: list[Request] = []
        self._running = 0
        self._to_end = -1

    def submit(self, request: Request) -> None:
        """This rank is ready for an operation."""
        if not self.appending:
            self._do.ask(request)
        elif request["kind"] in COORDINATED or request["set"] != 0:
            self.mark()
            self._do.ask(request)
        elif self.rank == 0:
            self._kept.append(request)
            if request["fuse"] is None or self._running < AHEAD:
                self._add_kept()
        else:
            self._add(Entry(request))

    def receive(self, rank: int, epoch: int, line: Line) -> None:
        """Another rank has added to its log."""
        if epoch < self.epoch or (epoch == self.epoch and not self.open):
            if self.rank == 0:
                self._do.left([(rank, None if line is None else line.request)], None)
            return
        self._log(epoch)[rank].append(line)
        if epoch == self.epoch:
            self._look_at(line)

    def end(self, epoch: int) -> None:
        """On rank 0: let this epoch end, as soon as it has begun here."""
        self._to_end = epoch
        if epoch == self.epoch:
            self.mark()

    def mark(self) -> None:
        """End this rank's log, and with it the epoch."""
        if self.appending:
            self.appending = False
            self._add(None)
            self._give_up_kept()

    def follow(self, message: dict[str, Any]) -> None:
        """The coordinator has said what to do. It speaks when the epoch is over there, which need not be so here."""
        self._told.append(message)
        self._release()

    def done(self, epoch: int) -> None:
        """What was to run has run."""
        if epoch == self.epoch:
            self._running -= 1
            if self.appending and self._running < AHEAD:
                self._add_kept()

    def look(self) -> None:
        """Now and then, on rank 0: end an epoch in which ranks have waited too long for others."""
        waiting = self.open and any(self._log(self.epoch))
        if waiting and time.monotonic() - self._since > PATIENCE:
            self.mark()

    def _log(self, epoch: int) -> list[deque[Line]]:
        return self._logs.setdefault(epoch, [deque() for _ in range(self.size)])

    def _add(self, line: Line) -> None:
        self._do.tell(self.epoch, line)
        self._log(self.epoch)[self.rank].append(line)
        self._look_at(line)

    def _add_kept(self) -> None:
        """Neighbours that can be fused end together."""
        kept, self._kept = self._kept, []
        size = 0
        for place, request in enumerate(kept):
            after = kept[place + 1] if place + 1 < len(kept) else None
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
                self._do.ask(request)

    def _give_up_kept(self) -> None:
        kept, self._kept = self._kept, []
        for request in kept:
            self._do.ask(request)

    def _look_at(self, line: Line) -> None:
        if line is None:
            self.mark()
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
            self._do.run(self.epoch, together)

    def _close(self) -> None:
        self.open = False
        self._run()
        if self.appending:  # rank 0 has to know which entry was the last
            self.appending = False
            self._do.tell(self.epoch, None)
            self._log(self.epoch)[self.rank].append(None)
        if self.rank == 0:
            logs = enumerate(self._log(self.epoch))
            rest = [(rank, line and line.request) for rank, log in logs for line in log]
            self._do.left(rest, self.agreed)
        self._give_up_kept()
        self._release()

    def _release(self) -> None:
        while self._told and not self.open:
            message = self._told.popleft()
            if message["do"] == "begin":
                self._begin(message["epoch"])
            else:
                self._do.follow(message)

    def _begin(self, epoch: int) -> None:
        self._logs.pop(self.epoch, None)
        self.epoch, self.open, self.appending = epoch, True, True
        self.agreed, self._running, self._since = 0, 0, time.monotonic()
        if epoch == self._to_end or any(None in log for log in self._log(epoch)):
            self.mark()
        self._compare()


@dataclass
class _Announcement:
    round: int
    mixed: int
    request: Request
    payload: bytes


class Delivered(NamedTuple):
    """An operation that every member has announced, or has joined before: what to do and with what, or the problem."""

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


class Parcels:
    """Announcements with payload, of this rank and of others. A rank may announce a key again as soon as the operation
    has ended there: others then hold two of its announcements."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._joins = [0] * size
        #: How many of each rank have come.
        self.heard = [0] * size
        self._waiting: dict[str, _Waiting] = {}
        #: Announcements still to come that the coordinator has dealt with.
        self._dealt: dict[tuple[str, int], int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def announce(
        self, rank: int, round: int, mixed: int, members: Sequence[int], request: Request, payload: bytes
    ) -> Iterator[Delivered]:
        """A rank is ready for an operation; `round` counts the times that it had joined before, and `mixed` those that
        it had heard from the coordinator of this key, because others had announced it without payload."""
        key = request["key"]
        self.heard[rank] += 1
        if self._dealt.get((key, rank)):
            self._dealt[key, rank] -= 1
            if not self._dealt[key, rank]:
                del self._dealt[key, rank]
            return
        waiting = self._waiting.setdefault(key, _Waiting(tuple(members)))
        waiting.queues.setdefault(rank, deque()).append(_Announcement(round, mixed, request, payload))
        yield from self._settle(key)

    def join(self, rank: int) -> Iterator[Delivered]:
        """A rank has joined: until all have, it announces nothing."""
        self._joins[rank] += 1
        for key in list(self._waiting):
            yield from self._settle(key)

    def deal(self, key: str, ranks: Sequence[int]) -> None:
        """Forget these ranks' first announcements of a key: the coordinator has dealt with them."""
        for rank in ranks:
            if not self._take(key, rank):
                self._dealt[key, rank] = self._dealt.get((key, rank), 0) + 1

    def surrender(self, key: str, ranks: Mapping[int, int]) -> list[tuple[int, Request]]:
        """On rank 0: what ranks have announced with payload of a key that the coordinator deals with.

        Args:
            ranks: of which it has heard, and how much of what is here each had announced before. Until that has come
                and ended, what there is of the key may belong to it.
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
        """Whether operations of a process set are waiting."""
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


class Texts:
    """Requests that a rank repeats travel as the number of a slot in which the others keep them: Horovod's response
    cache. The sender chooses the slot, so that both ends have the same in it.

    Args:
        capacity: number of slots; 0: every request travels whole.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._known: dict[tuple[int, int], Request] = {}

    def outgoing(self, text: str) -> tuple[int, str | None]:
        """The slot for a request, and its text where the others do not have it yet; slot -1 is not kept."""
        if text in self._slots:
            self._slots.move_to_end(text)
            return self._slots[text], None
        if self._capacity <= 0:
            return -1, text
        slot = len(self._slots)
        if slot >= self._capacity:
            _, slot = self._slots.popitem(last=False)
        self._slots[text] = slot
        return slot, text

    def incoming(self, rank: int, slot: int, request: Request | None) -> Request:
        """What a rank means by a slot."""
        if request is None:
            return self._known[rank, slot]
        if slot >= 0:
            self._known[rank, slot] = request
        return request
