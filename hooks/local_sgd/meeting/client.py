"""A replica's side of the meeting point: one thread that keeps the connection, and tells what it hears."""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ...comm.socket_loop import SocketLoop
from ...comm.sockets import CONNECT_SECONDS, Connection, connect
from ...comm.threads import start_thread, stop_thread
from ...timeouts import SILENT_SECONDS
from .events import Event, Lost, Proposed, Refused, Void, Waiting, Welcome, Whole
from .options import place

log = logging.getLogger("gradwire.meeting")

#: Seconds between two signs of life, and between two attempts to connect.
BEAT_SECONDS, RETRY_SECONDS = 1.0, 0.5
#: Seconds for the goodbye to go out.
GOODBYE_SECONDS = 0.2

T = TypeVar("T")


class Client:
    """A replica's connection to the meeting point. All methods may be called by any thread.

    Args:
        address: "head:29400".
        description: JSON values that must be equal in all replicas, with "min_replicas" and "wait_for".
        secret: that the meeting point was given.
        patience: seconds out of reach until `Lost`.
        events: takes each event, on the client's thread; it must not wait for another one.
        posts: takes each value of a board, its view's number and its key first.
        silent: seconds without an answer to a sign of life after which the connection counts as lost.

    Attributes:
        member: this replica's number, once welcome; before: -1.
        why: reason of the last failure to connect; "": none.
    """

    def __init__(
        self,
        address: str,
        description: dict[str, Any],
        *,
        secret: str = "",
        patience: float = 600.0,
        events: Callable[[Event], None],
        posts: Callable[[int, str, bytes], None] | None = None,
        silent: float = SILENT_SECONDS,
    ) -> None:
        self._posts, self._silent = posts, silent
        self._place, self._secret, self._patience, self._events = place(address), secret, patience, events
        self._description, self._token = description, secrets.token_hex(8)
        self.member, self.why = -1, ""
        self._next = self._seen = self._view = 0
        self._members: tuple[int, ...] = ()
        self._name = (0, 0)
        self._broken: tuple[int, str] | None = None
        self._boards: dict[int, Board] = {}
        self._here = threading.RLock()
        self._connection: Connection | None = None
        self._lost_at: float | None = time.monotonic()
        self._heard = self._beaten = 0.0
        self._joined = self._lost_said = self._leaving = False
        self._loop = SocketLoop()
        self._thread = start_thread("gradwire-meeting", self._run, self._loop)

    @property
    def lost_for(self) -> float:
        """Seconds since the connection was lost, or first tried; 0 while it stands."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else time.monotonic() - lost_at

    def connected(self, number: int) -> None:
        """Say that this replica is connected to all members of a proposed view."""
        self._send({"connected": number})

    def failed(self, number: int, why: str) -> None:
        """Say that a view, proposed or in use, cannot be used. While out of reach, the latter is said later."""
        with self._here:
            if number == self._view:
                self._broken = number, why
        self._send({"failed": number, "why": why})

    def entered(self, number: int, members: Sequence[int], name: tuple[int, int]) -> None:
        """Remember the view and the state that this replica is in, for a meeting point that is started again."""
        with self._here:
            self._name = name
            if number not in self._boards:  # it is void
                return
            self._view, self._members = number, tuple(members)
            for other in [other for other in self._boards if other < number]:
                self._boards.pop(other).void(f"view {number} has taken its place")
        self._send({"entered": number, "members": self._members, "name": name})

    def board(self, number: int) -> Board:
        """The board of a view.

        Raises:
            RuntimeError: it is void.
        """
        with self._here:
            if number not in self._boards:
                raise RuntimeError(f"view {number} is void")
            return self._boards[number]

    def leave(self) -> None:
        """Say goodbye, and end. Boards are void."""
        self._leaving = True
        stop_thread(self._loop, self._thread)

    def _send(self, message: dict[str, Any]) -> bool:
        """Send a message; false if the meeting point is out of reach."""
        with self._here:
            if self._connection is not None:
                self._loop.send(self._connection, message)
            return self._connection is not None

    def _run(self) -> None:
        try:
            while not self._loop.ending:
                if self._connection is None and not self._connect():
                    list(self._loop.poll(RETRY_SECONDS))
                if self._connection is not None:
                    self._serve(self._connection)
                elif self.lost_for > self._patience and not self._lost_said:
                    self._lost_said = True
                    self._tell(Lost(self.lost_for))
            if self._leaving:
                self._send({"leave": True})
        finally:
            with self._here:
                self._connection, self._lost_at = None, self._lost_at or time.monotonic()
                self._loop.close(GOODBYE_SECONDS)
                for board in self._boards.values():
                    board.void("this replica has left the meeting point")
                self._boards.clear()

    def _tell(self, event: Event) -> None:
        try:
            self._events(event)
        except Exception:
            log.exception("an error on hearing %s", event)

    def _connect(self) -> bool:
        """Try to connect and join."""
        host, port = self._place
        try:
            connection = connect(host, port, self._secret, CONNECT_SECONDS)
        except PermissionError:
            if not self._joined:
                self._loop.put(None)
                why = (
                    f"the meeting point at {host}:{port} knows another secret: set GRADWIRE_MEETING_SECRET, or secret="
                )
                self._tell(Refused(f"{why}, to the same on all machines"))
            return False
        except (OSError, ValueError) as error:
            self.why = str(error)
            return False
        self._heard = self._beaten = time.monotonic()
        self._loop.add(connection)
        with self._here:
            member = self.member if self.member >= 0 else None
            join = {"join": self._description, "member": member, "view": self._view, "token": self._token}
            state = {"members": self._members if self._view else (), "seen": self._seen, "next": self._next}
            self._loop.send(connection, {**join, **state, "name": self._name})
            if self._broken is not None and self._broken[0] == self._view:
                self._loop.send(connection, {"failed": self._broken[0], "why": self._broken[1]})
            self._connection, self._lost_at, self._lost_said = connection, None, False
        self._joined = True
        return True

    def _serve(self, connection: Connection) -> None:
        """Hear what has come, and give a sign of life when it is time."""
        try:
            for source in self._loop.poll(max(0.0, self._beaten + BEAT_SECONDS - time.monotonic())):
                if source is not None:
                    for message in source.messages():
                        self._heard = time.monotonic()
                        self._hear(message)
            now = time.monotonic()
            if now >= self._beaten + BEAT_SECONDS:
                self._beaten = now
                self._send({"beat": True})
            if now > self._heard + self._silent:
                raise ConnectionError(f"nothing heard for {self._silent:g} s")
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._disconnect(connection, f"the meeting point is out of reach: {error}")

    def _disconnect(self, connection: Connection, why: str) -> None:
        self._loop.drop(connection)
        with self._here:
            self._connection, self._lost_at = None, time.monotonic()
            void = [(number, self._boards.pop(number)) for number in list(self._boards) if number != self._view]
        if self._loop.ending:
            return
        for number, board in void:
            board.void(why)
            self._tell(Void(number, why))

    def _hear(self, message: dict[str, Any]) -> None:
        event: Event | None = None
        with self._here:
            self._next = max(self._next, message.get("next", 0))
            if "welcome" in message and message["welcome"] != self.member:
                self.member = message["welcome"]
                event = Welcome(self.member)
            elif "view" in message:
                number = self._seen = message["view"]
                event = Proposed(number, tuple(message["members"]))
                self._boards[number] = Board(number, self._send)
            elif "go" in message and message["go"] in self._boards:
                event = Whole(message["go"])
            elif "void" in message:
                number, why = message["void"], message["why"]
                board = self._boards.pop(number, None)
                if board is not None:
                    board.void(why)
                if board is not None or number == self._view:
                    event = Void(number, why)
                if number == self._view:
                    self._view = 0
            elif "post" in message and message["post"] in self._boards:
                value = base64.b64decode(message["value"])
                self._boards[message["post"]].take(message["key"], value)
                if self._posts is not None:
                    self._posts(message["post"], message["key"], value)
            elif "waiting" in message:
                event = Waiting(message["waiting"])
            elif "refused" in message:
                event = Refused(message["refused"])
                self._loop.put(None)
        if event is not None:
            self._tell(event)


def _nothing(message: dict[str, Any]) -> bool:
    """Send nothing."""
    return False


class Board(dist.Store):
    """Values that the members of a view tell each other through the meeting point; a store to connect groups by.

    It must live as long as a group made with it. A value is there once the meeting point has told it to all.

    Attributes:
        values: by key.
    """

    def __init__(self, number: int, send: Callable[[dict[str, Any]], bool], seconds: float = 30.0) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self._number, self._send, self._seconds = number, send, seconds
        self._why: str | None = None
        self._told = threading.Condition()

    def post(self, key: str, value: bytes) -> None:
        """Tell all members, this one included.

        Raises:
            RuntimeError: the view is void, or the meeting point out of reach.
        """
        message = {"post": self._number, "key": key, "value": base64.b64encode(value).decode()}
        if self._why is not None or not self._send(message):
            raise RuntimeError(self._why or "the meeting point is out of reach")

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until `predicate()` is true, which is asked at each new value; its result.

        Args:
            timeout: in seconds; by default 30.

        Raises:
            RuntimeError: the view is void, or time is over.
        """
        seconds = self._seconds if timeout is None else timeout
        until = time.monotonic() + seconds
        with self._told:
            while not (found := predicate()):
                if self._why is not None or not self._told.wait(until - time.monotonic()):
                    raise RuntimeError(self._why or f"view {self._number}: not all was said within {seconds:g} s")
            return found

    def wake(self) -> None:
        """Have `wait_for` ask again."""
        with self._told:
            self._told.notify_all()

    def take(self, key: str, value: bytes) -> None:
        """Take a value that the meeting point has told."""
        with self._told:
            self.values[key] = value
            self._told.notify_all()

    def void(self, why: str) -> None:
        """End every wait by an error."""
        with self._told:
            self._why, self._send = why, _nothing  # groups hold their store where Python's collector does not see it
            self._told.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        self.post(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.wait_for(lambda: self.check(keys), None if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [self.values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)
