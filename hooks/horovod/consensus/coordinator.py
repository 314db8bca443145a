"""Rank 0's connections to all ranks: they announce their operations to it, and it tells them what to run next.

Rank 0 listens; every rank, rank 0 too, holds one connection to it. The address and a secret go through the store in
which the ranks meet: a caller that does not know it is not let in, and an answer of somebody else is not believed.
Nobody polls, but that rank 0 looks for stalls four times a second. The end of a process ends its connection: rank 0
sees that at once and tells the others.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from typing import Any

import torch.distributed as dist

from ...comm.socket_loop import SocketLoop
from ...comm.sockets import Connection, dial, listen
from ...timeouts import END_SECONDS
from .addresses import addresses
from .negotiation import Negotiator

log = logging.getLogger("gradwire.horovod")

#: Seconds between two looks for ranks that wait for others.
_LOOK_SECONDS = 0.25


def connect(store: dist.Store, hello: dict[str, Any], seconds: float) -> tuple[Connection, dict[str, Any]]:
    """Connect this rank to rank 0; the connection, and rank 0's answer, which comes once all ranks have come.

    The store may still hold the address of a rank 0 that is gone, where a launcher restarts workers: that leads
    nowhere, or to one that has all its ranks, and is read again.

    Raises:
        ConnectionError: rank 0 cannot be reached, or not all ranks came within `seconds`.
    """
    try:
        return dial(
            lambda: json.loads(store.get("control")),
            hello,
            lambda answer: "session" in answer,
            seconds,
        )
    except ConnectionError as error:
        raise ConnectionError(
            f"rank {hello['rank']} did not meet all ranks within {seconds:.0f} s (rank 0 is said to be at {error}): "
            "start every rank, and set GLOO_SOCKET_IFNAME to the network interface that joins the hosts"
        ) from error


class Coordinator:
    """Rank 0's side: a thread that hears all ranks and tells them what the negotiator decides.

    Args:
        store: takes the address.
        negotiator: decides.
        stall_seconds: warn once some ranks have waited for others for so long; 0: never.
        stall_shutdown_seconds: give up after so long; 0: never.
    """

    def __init__(
        self, store: dist.Store, negotiator: Negotiator, stall_seconds: float, stall_shutdown_seconds: float
    ) -> None:
        self._negotiator = negotiator
        self._stall, self._stall_shutdown = stall_seconds, stall_shutdown_seconds
        listener = listen(backlog=max(128, negotiator.size))
        secret, self._session = secrets.token_hex(16), secrets.token_hex(16)
        place = {"hosts": addresses(), "port": listener.getsockname()[1], "secret": secret}
        store.set("control", json.dumps(place))
        self._loop = SocketLoop(listener, secret)
        self._peers: dict[int, Connection] = {}
        self._hosts: dict[int, str] = {}
        #: The rank that has left in good order, and the time at which to give up those that have not heard of it.
        self._leaving: int | None = None
        self._ending: float | None = None
        self.thread = threading.Thread(target=self._run, name="gradwire-coordinator", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while self._ending is None or (self._loop.connections and time.monotonic() < self._ending):
                for connection in self._loop.poll(_LOOK_SECONDS):
                    if connection is not None:
                        self._read(connection)
                self._decide()
                self._look_for_stalls()
        finally:
            self._loop.close()

    def _read(self, peer: Connection) -> None:
        """Take a rank's messages. A connection that breaks, or says what nobody can read, is a rank that is gone."""
        try:
            for message in peer.messages():
                if peer.rank < 0:
                    self._greet(peer, message)
                elif "done" in message:
                    self._negotiator.done(message["done"])
                elif "bye" in message:
                    self._leaving = peer.rank
                elif "failed" in message:
                    self._end(f"rank {peer.rank}: {message['failed']}", clean=False)
                else:
                    self._negotiator.announce(peer.rank, message)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._loop.drop(peer)
            if peer.rank >= 0:
                self._end(f"rank {peer.rank} is gone ({error or 'its connection ended'})", clean=False)

    def _greet(self, peer: Connection, message: dict[str, Any]) -> None:
        rank = int(message["rank"])
        if rank in self._peers:
            raise ValueError("a rank that is here already: of a later start")
        peer.rank = rank
        self._peers[rank], self._hosts[rank] = peer, message["host"]
        if len(self._peers) == self._negotiator.size:
            hosts = [self._hosts[rank] for rank in sorted(self._hosts)]
            for other in self._peers.values():
                self._loop.send(other, {"session": self._session, "hosts": hosts})

    def _decide(self) -> None:
        if self._ending is not None or len(self._peers) < self._negotiator.size:
            return
        for members, message in self._negotiator.decisions():
            for rank in members:
                self._loop.send(self._peers[rank], message)
        if self._leaving is not None and self._negotiator.drained:
            self._end(f"rank {self._leaving} has shut down", clean=True)

    def _end(self, message: str, clean: bool) -> None:
        if self._ending is not None:
            return
        self._ending = time.monotonic() + END_SECONDS
        for peer in self._peers.values():
            self._loop.send(peer, {"do": "stop", "clean": clean, "message": message})

    def _look_for_stalls(self) -> None:
        if len(self._peers) < self._negotiator.size or self._ending is not None:
            return
        if self._stall > 0:
            for key, waiting, missing, seconds in self._negotiator.overdue(self._stall):
                log.warning(
                    "ranks %s have waited %.0f s in %s for ranks %s: does every rank call it, under the same name?",
                    waiting, seconds, key, missing,
                )  # fmt: skip
        if self._stall_shutdown > 0:
            for key, _, missing, seconds in self._negotiator.overdue(self._stall_shutdown, again=True):
                self._end(f"{key} has waited {seconds:.0f} s for ranks {missing}", clean=False)
