"""Connections that one thread serves."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from .sockets import GREETING_SECONDS, OPEN, Connection


class SocketLoop:
    """Connections that one thread serves. Other threads may send on them, and wake it.

    Attributes:
        connections: those that it serves.
        ending: `put` has asked its thread to end.

    Args:
        listener: whose new connections join. Whoever has not greeted after some seconds is dropped.
        secret, limit: as of `Connection`, of those.
    """

    def __init__(self, listener: socket.socket | None = None, secret: str = "", limit: int = 1 << 62) -> None:
        self.connections: set[Connection] = set()
        self.ending = False
        self._secret, self._limit = secret, limit
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            OPEN.add(end)
        for source in [self._wake] if listener is None else [self._wake, listener]:
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ)

    def add(self, connection: Connection) -> None:
        """Serve a connection."""
        connection.end.setblocking(False)
        self._selector.register(connection.end, selectors.EVENT_READ, connection)
        self.connections.add(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection and serve it no more."""
        self.connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.end)
        connection.close()

    def send(self, connection: Connection, text: dict[str, Any]) -> None:
        """Send a message; the loop's thread goes on with what does not go out at once."""
        if connection.send(text):
            self.wake()

    def put(self, item: None) -> None:
        """Ask the thread that serves it to end: a loop is that thread's inbox (`threads.start_thread`)."""
        self.ending = True
        self.wake()

    def wake(self) -> None:
        """Let `poll` return."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def poll(self, seconds: float | None = None) -> Iterator[Connection | None]:
        """Wait; then each connection that has something to read, and None after `wake`."""
        for connection in [c for c in self.connections if not c.trusted]:
            if time.monotonic() > connection.born + GREETING_SECONDS:
                self.drop(connection)
        for key, events in self._selector.select(seconds):
            connection = key.data
            if connection is None and key.fileobj is self._listener:
                self._accept(key.fileobj)
            elif connection is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(1 << 12)
                for other in self.connections:
                    if other.blocked:
                        self._selector.modify(other.end, selectors.EVENT_READ | selectors.EVENT_WRITE, other)
                yield None
            elif connection.open:
                if events & selectors.EVENT_WRITE and not connection.flush():
                    self._selector.modify(connection.end, selectors.EVENT_READ, connection)
                if events & selectors.EVENT_READ:
                    yield connection

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self.add(Connection(listener.accept()[0], self._secret, limit=self._limit))

    def close(self, seconds: float = 0.0) -> None:
        """Close every connection, the listener and the loop. `seconds`: as of `Connection.close`, for each."""
        self._selector.close()
        for connection in self.connections:
            connection.close(seconds)
        for end in (self._listener, self._wake, self._waker):
            if end is not None:
                end.close()
