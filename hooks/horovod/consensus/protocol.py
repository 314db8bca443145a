"""How this rank and the others agree on what to run: ahead of the coordinator where they can, else through it."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..transport.peer_mesh import Mesh
from .epoch_log import Actions, Delivered, Entry, Ledger, Line, Parcels, Texts
from .negotiation import Overdue, Ready, Request


class Sinks(NamedTuple):
    """Where what was agreed on goes."""

    #: To the coordinator: a message.
    ask: Callable[[dict[str, Any]], None]
    #: What to do next, in the order in which it must be done on all ranks.
    follow: Callable[[dict[str, Any]], None]
    #: What all have sent for an operation that needs no order.
    deliver: Callable[[Delivered], None]
    #: On rank 0: see `Actions.left`.
    left: Callable[[list[tuple[int, Request | None]], int | None], None]
    #: On rank 0: a key has been announced with its payload.
    parcel: Callable[[str], None]


class Agreement:
    """One rank's side; for any thread.

    Args:
        mesh: connects the ranks.
        size: of the world.
        fusion_bytes: reductions are put together up to this many bytes.
        sinks: are called under the lock of this object, except by rank 0's coordinator itself.

    Attributes:
        counts: messages sent to every other rank, and how many of them had a request in full.
        joins: how often this rank has joined.
    """

    def __init__(self, mesh: Mesh, size: int, fusion_bytes: int, sinks: Sinks) -> None:
        self._mesh, self._sinks = mesh, sinks
        self._rank, self._others = mesh.rank, [rank for rank in range(size) if rank != mesh.rank]
        self._lock = threading.RLock()
        self.joins = 0
        #: Who may still announce something.
        self._talking = set(self._others)
        self._silent = threading.Event()
        if not self._talking:
            self._silent.set()
        self._mixed: Counter[str] = Counter()
        self._texts = Texts(int(os.environ.get("HOROVOD_CACHE_CAPACITY") or 1024))
        self._parcels = Parcels(mesh.rank, size)
        actions = Actions(self._tell, self._ask, self._run, sinks.follow, sinks.left)
        self._ledger = Ledger(mesh.rank, size, fusion_bytes, actions)
        self.counts = {"messages": 0, "texts": 0}

    def submit(self, request: Request, members: Sequence[int], payload: bytes | None) -> None:
        """This rank is ready for an operation, which needs only `payload` of it, if that is given."""
        with self._lock:
            if payload is not None:
                self._announce(request, members, payload)
                return
            if request["kind"] == "join":
                self._send(self._others, {"join": True})
                self.joins += 1
                self._deliver(self._parcels.join(self._rank))
            self._ledger.submit(request)

    def receive(self, rank: int, message: dict[str, Any], payload: bytearray) -> None:
        """Another rank has said something."""
        with self._lock:
            if "last" in message:
                self._talking.discard(rank)
                if not self._talking:
                    self._silent.set()
                return
            if "join" in message:
                self._deliver(self._parcels.join(rank))
                return
            request = None
            if "slot" in message:
                request = self._texts.incoming(rank, message["slot"], message.get("request"))
            if "epoch" in message:
                line = None if request is None else Entry(request, message["ends"])
                self._ledger.receive(rank, message["epoch"], line)
            elif request is not None:
                where = (message["round"], message["mixed"], message["members"])
                self._deliver(self._parcels.announce(rank, *where, request, bytes(payload)))
                if self._rank == 0:
                    self._sinks.parcel(request["key"])

    def follow(self, message: dict[str, Any]) -> None:
        """The coordinator has said something."""
        with self._lock:
            self._ledger.follow(message)

    def deal(self, key: str, ranks: Sequence[int]) -> None:
        """The coordinator has dealt with a key that these ranks have announced with its payload, and others without."""
        with self._lock:
            self._mixed[key] += 1
            if self._rank:  # rank 0's were taken when the coordinator counted them
                self._parcels.deal(key, ranks)

    def done(self, epoch: int) -> None:
        """What was agreed on in this epoch has run."""
        with self._lock:
            self._ledger.done(epoch)

    def farewell(self, seconds: float) -> None:
        """This rank has done all that was agreed on, and announces no more: wait until that is so of every other rank,
        and all that it had announced has been delivered here; or for `seconds`."""
        with self._lock:
            self._send(self._others, {"last": True})
        self._silent.wait(seconds)

    # -- for rank 0's coordinator ------------------------------------------------------------------------------------

    def end(self, epoch: int) -> None:
        """See `Ledger.end`."""
        with self._lock:
            self._ledger.end(epoch)

    def look(self) -> None:
        """Let the epoch end if ranks have waited for others too long."""
        with self._lock:
            self._ledger.look()

    def surrender(self, key: str, ranks: Mapping[int, int]) -> list[tuple[int, Request]]:
        """See `Parcels.surrender`."""
        with self._lock:
            return self._parcels.surrender(key, ranks)

    def overdue(self, seconds: float, again: bool = False) -> list[Overdue]:
        """See `Negotiator.overdue`."""
        with self._lock:
            return list(self._parcels.overdue(seconds, again))

    def busy(self, set_id: int) -> bool:
        """See `Parcels.busy`."""
        with self._lock:
            return self._parcels.busy(set_id)

    def behind(self, rank: int, announced: int) -> bool:
        """Whether a rank has announced more with its payload than has come here."""
        with self._lock:
            return self._parcels.heard[rank] < announced

    # -- inside ------------------------------------------------------------------------------------------------------

    def _announce(self, request: Request, members: Sequence[int], payload: bytes) -> None:
        joins, mixed = self.joins, self._mixed.get(request["key"], 0)
        message = {"round": joins, "mixed": mixed, "members": list(members), **self._spoken(request)}
        # Rank 0 warns of operations that some ranks wait for, in every process set.
        targets = [rank for rank in self._others if rank in members or rank == 0]
        self._send(targets, message, payload)
        self._deliver(self._parcels.announce(self._rank, joins, mixed, members, request, payload))
        if self._rank == 0:
            self._sinks.parcel(request["key"])

    def _deliver(self, found: Iterator[Delivered]) -> None:
        for delivered in found:
            if self._rank in delivered.payloads:
                self._sinks.deliver(delivered)

    def _tell(self, epoch: int, line: Line) -> None:
        message: dict[str, Any] = {"epoch": epoch}
        if line is not None:
            message |= {"ends": line.ends, **self._spoken(line.request)}
        self._send(self._others, message)

    def _ask(self, request: Request) -> None:
        # It goes another way than what is announced with payload, and may overtake that.
        self._sinks.ask({**request, "after": self._parcels.heard[self._rank]})

    def _run(self, epoch: int, ready: list[Ready]) -> None:
        ops = [{"key": request["key"], "info": info} for request, info in ready]
        self._sinks.follow({"do": "run", "set": 0, "ops": ops, "epoch": epoch})

    def _spoken(self, request: Request) -> dict[str, Any]:
        slot, text = self._texts.outgoing(json.dumps(request))
        if text is None:
            return {"slot": slot}
        self.counts["texts"] += 1
        return {"slot": slot, "request": request}

    def _send(self, ranks: Sequence[int], message: dict[str, Any], payload: bytes = b"") -> None:
        self.counts["messages"] += 1
        for rank in ranks:
            self._mesh.send(rank, message, payload)
