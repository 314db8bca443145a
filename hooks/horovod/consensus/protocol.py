"""One rank's agreement with the others on what to run: from rank to rank if it can be, else through rank 0."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..transport.peer_mesh import PeerMesh
from .eager_payloads import Delivered, EagerPayloads
from .epoch_log import Entry, EpochLog, Line, LogCallbacks
from .negotiation import Overdue, Ready, Request
from .request_cache import RequestCache


class ProtocolCallbacks(NamedTuple):
    """Actions of an `Agreement`."""

    #: To the coordinator: a message.
    ask: Callable[[dict[str, Any]], None]
    #: Carry out a decision; decisions come in the order in which all ranks must carry them out.
    follow: Callable[[dict[str, Any]], None]
    #: End an operation for which all have sent their payload.
    deliver: Callable[[Delivered], None]
    #: On rank 0: see `LogCallbacks.hand_over`.
    hand_over: Callable[[list[tuple[int, Request | None]], int | None], None]
    #: On rank 0: a key has been announced with its payload.
    announced: Callable[[str], None]


class Agreement:
    """One rank's side. For any thread.

    Args:
        mesh: connects the ranks.
        size: of the world.
        fusion_bytes: the most bytes of reductions that share a buffer.
        callbacks: called under the lock of this object, except by rank 0's coordinator itself.

    Attributes:
        counts: messages sent to every other rank, and those of them with a request in full.
        joins: number of times that this rank has joined.
    """

    def __init__(self, mesh: PeerMesh, size: int, fusion_bytes: int, callbacks: ProtocolCallbacks) -> None:
        self._mesh, self._callbacks = mesh, callbacks
        self._rank, self._others = mesh.rank, [rank for rank in range(size) if rank != mesh.rank]
        self._lock = threading.RLock()
        self.joins = 0
        #: Ranks that may still announce something.
        self._talking = set(self._others)
        self._silent = threading.Event()
        if not self._talking:
            self._silent.set()
        self._mixed: Counter[str] = Counter()
        self._cache = RequestCache(int(os.environ.get("HOROVOD_CACHE_CAPACITY") or 1024))
        self._eager = EagerPayloads(mesh.rank, size)
        log_callbacks = LogCallbacks(self._tell, self._ask, self._run, callbacks.follow, callbacks.hand_over)
        self._epoch_log = EpochLog(mesh.rank, size, fusion_bytes, log_callbacks)
        self.counts = {"messages": 0, "full_requests": 0}

    def submit(self, request: Request, members: Sequence[int], payload: bytes | None) -> None:
        """Announce an operation that this rank is ready for; others need nothing more of it if `payload` is given."""
        with self._lock:
            if payload is not None:
                self._announce(request, members, payload)
                return
            if request["kind"] == "join":
                self._send(self._others, {"join": True})
                self.joins += 1
                self._deliver(self._eager.join(self._rank))
            self._epoch_log.submit(request)

    def receive(self, rank: int, message: dict[str, Any], payload: bytearray) -> None:
        """Take a message of another rank."""
        with self._lock:
            if "last" in message:
                self._talking.discard(rank)
                if not self._talking:
                    self._silent.set()
                return
            if "join" in message:
                self._deliver(self._eager.join(rank))
                return
            request = None
            if "slot" in message:
                request = self._cache.incoming(rank, message["slot"], message.get("request"))
            if "epoch" in message:
                line = None if request is None else Entry(request, message["ends"])
                self._epoch_log.receive(rank, message["epoch"], line)
            elif request is not None:
                where = (message["round"], message["mixed"], message["members"])
                self._deliver(self._eager.announce(rank, *where, request, bytes(payload)))
                if self._rank == 0:
                    self._callbacks.announced(request["key"])

    def follow(self, message: dict[str, Any]) -> None:
        """Take a decision of the coordinator."""
        with self._lock:
            self._epoch_log.follow(message)

    def discard(self, key: str, ranks: Sequence[int]) -> None:
        """Drop these ranks' announcements of a key: the coordinator has dealt with it, as others announced it without
        payload."""
        with self._lock:
            self._mixed[key] += 1
            if self._rank:  # rank 0's were taken when the coordinator counted them
                self._eager.discard(key, ranks)

    def done(self, epoch: int) -> None:
        """Count operations of this epoch as done."""
        with self._lock:
            self._epoch_log.done(epoch)

    def farewell(self, seconds: float) -> None:
        """Say that this rank announces no more, and wait until all others have said so, at most `seconds`.

        By then everything that others had announced has been delivered here.
        """
        with self._lock:
            self._send(self._others, {"last": True})
        self._silent.wait(seconds)

    # -- for rank 0's coordinator ------------------------------------------------------------------------------------

    def end(self, epoch: int) -> None:
        """See `EpochLog.end`."""
        with self._lock:
            self._epoch_log.end(epoch)

    def look(self) -> None:
        """See `EpochLog.look`."""
        with self._lock:
            self._epoch_log.look()

    def release(self, key: str, ranks: Mapping[int, int]) -> list[tuple[int, Request]]:
        """See `EagerPayloads.release`."""
        with self._lock:
            return self._eager.release(key, ranks)

    def overdue(self, seconds: float, again: bool = False) -> list[Overdue]:
        """See `Negotiator.overdue`."""
        with self._lock:
            return list(self._eager.overdue(seconds, again))

    def busy(self, set_id: int) -> bool:
        """See `EagerPayloads.busy`."""
        with self._lock:
            return self._eager.busy(set_id)

    def behind(self, rank: int, announced: int) -> bool:
        """True if fewer of a rank's announcements with payload have come here."""
        with self._lock:
            return self._eager.heard[rank] < announced

    # -- inside ------------------------------------------------------------------------------------------------------

    def _announce(self, request: Request, members: Sequence[int], payload: bytes) -> None:
        joins, mixed = self.joins, self._mixed.get(request["key"], 0)
        message = {"round": joins, "mixed": mixed, "members": list(members), **self._spoken(request)}
        # Rank 0 warns of operations that some ranks wait for, in every process set.
        targets = [rank for rank in self._others if rank in members or rank == 0]
        self._send(targets, message, payload)
        self._deliver(self._eager.announce(self._rank, joins, mixed, members, request, payload))
        if self._rank == 0:
            self._callbacks.announced(request["key"])

    def _deliver(self, found: Iterator[Delivered]) -> None:
        for delivered in found:
            if self._rank in delivered.payloads:
                self._callbacks.deliver(delivered)

    def _tell(self, epoch: int, line: Line) -> None:
        message: dict[str, Any] = {"epoch": epoch}
        if line is not None:
            message |= {"ends": line.ends, **self._spoken(line.request)}
        self._send(self._others, message)

    def _ask(self, request: Request) -> None:
        # It takes another way than announcements with payload, and may overtake them.
        self._callbacks.ask({**request, "after": self._eager.heard[self._rank]})

    def _run(self, epoch: int, ready: list[Ready]) -> None:
        ops = [{"key": request["key"], "info": info} for request, info in ready]
        self._callbacks.follow({"do": "run", "set": 0, "ops": ops, "epoch": epoch})

    def _spoken(self, request: Request) -> dict[str, Any]:
        slot, text = self._cache.outgoing(json.dumps(request))
        if text is None:
            return {"slot": slot}
        self.counts["full_requests"] += 1
        return {"slot": slot, "request": request}

    def _send(self, ranks: Sequence[int], message: dict[str, Any], payload: bytes = b"") -> None:
        self.counts["messages"] += 1
        for rank in ranks:
            self._mesh.send(rank, message, payload)
