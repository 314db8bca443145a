"""The meeting point of one replica's ranks: to them it is a meeting point, to the real one they are one member."""

from __future__ import annotations

import base64
import socket
from collections import defaultdict
from typing import Any

from ...comm.group import Group
from ...comm.socket_loop import SocketLoop
from ...comm.sockets import Connection, listen
from ...comm.threads import start_thread, stop_thread
from .client import Client
from .events import Event, Lost, Proposed, Refused, Void, Waiting, Welcome, Whole
from .options import Meeting
from .server import LONGEST_MESSAGE

#: Keys of a board that all ranks of all replicas share begin so; others are of the ranks that hold the same shard.
COMMON = "all "


def meet_inside(inside: Group | None, meeting: Meeting, description: dict[str, Any]) -> tuple[Relay | None, str]:
    """The address at which a rank meets the others: the meeting point's, or for a replica of several ranks that of a
    relay in its first one. A collective of these."""
    if inside is None:
        return None, meeting.address
    relay = Relay(meeting, description | {"ranks": inside.size}, inside.size) if inside.rank == 0 else None
    name = socket.gethostname()
    words = inside.all_gather_object([name, 0 if relay is None else relay.port])
    host, port = words[0]
    return relay, f"{'127.0.0.1' if host == name else host}:{port}"


class Relay:
    """In the first rank of a replica, between its ranks and the meeting point. It leaves once a rank does.

    Args:
        meeting: where replicas meet.
        description: the replica's.
        ranks: of the replica.

    Attributes:
        port: at which it listens for the ranks.
    """

    def __init__(self, meeting: Meeting, description: dict[str, Any], ranks: int) -> None:
        listener = listen(ranks)
        self.port = int(listener.getsockname()[1])
        self._meeting, self._description, self._ranks = meeting, description, ranks
        self._loop = SocketLoop(listener, meeting.key, LONGEST_MESSAGE)
        self._shards: dict[Connection, int] = {}
        self._connected: dict[int, set[int]] = defaultdict(set)
        self._above: Client | None = None
        self._thread = start_thread("gradwire-relay", self._run, self._loop)

    def close(self) -> None:
        """End it; the replica leaves."""
        stop_thread(self._loop, self._thread)

    # -- this replica's ranks ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._loop.ending:
                for connection in self._loop.poll(1.0):
                    if connection is not None:
                        self._read(connection)
        finally:
            if self._above is not None:
                self._above.leave()
            self._loop.close()

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection.messages():
                self._said(connection, message)
        except (OSError, ValueError, KeyError):
            self._loop.drop(connection)
            if connection in self._shards:  # without one of its ranks a replica cannot go on
                self._loop.put(None)

    def _said(self, connection: Connection, message: dict[str, Any]) -> None:
        if "join" in message:
            self._shards[connection] = message["join"]["shard"]
            if len(self._shards) == self._ranks:
                meeting = self._meeting
                self._above = Client(
                    meeting.address, self._description, secret=meeting.key, patience=meeting.patience,
                    events=self._heard, posts=self._posted,
                )  # fmt: skip
            return
        shard, above = self._shards[connection], self._above
        if "beat" in message:
            self._loop.send(connection, message)
        elif above is None:
            raise ValueError("a rank speaks before all have joined")
        elif "connected" in message:
            ready = self._connected[message["connected"]]
            ready.add(shard)
            if len(ready) == self._ranks:
                above.connected(message["connected"])
        elif "failed" in message:
            above.failed(message["failed"], message["why"])
        elif "entered" in message:
            above.entered(message["entered"], message["members"], tuple(message["name"]))
        elif "post" in message:
            self._post(above, shard, message)
        elif "leave" in message:
            self._loop.put(None)

    @staticmethod
    def _post(above: Client, shard: int, message: dict[str, Any]) -> None:
        key: str = message["key"]
        try:
            board = above.board(message["post"])
            board.post(key if key.startswith(COMMON) else f"{shard} {key}", base64.b64decode(message["value"]))
        except RuntimeError:
            return  # void by now, which the ranks hear

    # -- the meeting point -------------------------------------------------------------------------------------------

    def _posted(self, number: int, key: str, value: bytes) -> None:
        text = {"post": number, "value": base64.b64encode(value).decode()}
        shard, _, rest = key.partition(" ")
        for connection, of in list(self._shards.items()):
            if key.startswith(COMMON) or shard == str(of):
                self._loop.send(connection, {**text, "key": key if key.startswith(COMMON) else rest})

    def _heard(self, event: Event) -> None:
        message: dict[str, Any] | None = None
        if isinstance(event, Welcome):
            message = {"welcome": event.member, "next": 0}
        elif isinstance(event, Proposed):
            self._connected.clear()
            message = {"view": event.number, "members": list(event.members), "next": 0}
        elif isinstance(event, Whole):
            message = {"go": event.number}
        elif isinstance(event, Void):
            message = {"void": event.number, "why": event.why}
        elif isinstance(event, Refused):
            message = {"refused": event.why}
        elif isinstance(event, Waiting):
            message = {"waiting": event.text}
        elif isinstance(event, Lost):
            message = {"waiting": f"the meeting point {self._meeting.address} has been out of reach"}
        if message is not None:
            for connection in list(self._shards):
                self._loop.send(connection, message)
