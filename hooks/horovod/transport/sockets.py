"""Framed messages over TCP: the one socket stack, of the coordinator's connections and of the mesh.

A message is twelve bytes of lengths, a JSON text and bytes. Ranks dial an address that they were told, show a secret,
and take only the answer that they expect.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

#: Lengths of text and bytes.
_HEAD = struct.Struct("!IQ")
#: The longest message, in bytes, from a peer that has not shown the secret.
GREETING_BYTES = 4096
#: Seconds until a silent host counts as gone: TCP probes it from the fifth second on.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
#: Seconds to wait for one host to accept a connection.
CONNECT_SECONDS = 3.0

#: A text and the bytes that came with it.
Message = tuple[dict[str, Any], bytearray]

#: Sockets that forked children, such as data loaders, must not keep open.
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for end in list(_open):
        with contextlib.suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_close_in_child)


def listen(backlog: int) -> socket.socket:
    """A listening socket at a free port of all interfaces."""
    end = socket.create_server(("", 0), backlog=backlog)
    _open.add(end)
    return end


def addresses() -> list[str]:
    """Addresses at which other hosts may reach this one, likeliest first."""
    found: list[str] = []
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        with contextlib.suppress(OSError):
            found.append(_interface_address(interface.split(",")[0]))
    # Connecting a datagram socket sends nothing; it only chooses the interface that leads there.
    for host in (os.environ.get("MASTER_ADDR"), "192.0.2.1"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if host:
                probe.connect((host, 9))
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _interface_address(name: str) -> str:
    import fcntl

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        packed = fcntl.ioctl(end.fileno(), siocgifaddr, struct.pack("256s", name[:15].encode()))
    return socket.inet_ntoa(packed[20:24])


class Sent:
    """A message on its way out, as Gloo's work. One that has failed never completes, so that all that do succeed."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.error: str | None = None

    def fail(self, error: str) -> None:
        """End every wait by an error."""
        self.error = error
        self.gone.set()

    def wait(self, timeout: Any = None) -> None:
        """Wait until its memory may change."""
        self.gone.wait(None if timeout is None else timeout.total_seconds())
        if self.error is not None or not self.gone.is_set():
            raise RuntimeError(self.error or "the message was not taken in time")

    def is_completed(self) -> bool:
        """True once there is nothing to wait for."""
        return self.gone.is_set() and self.error is None

    def is_success(self) -> bool:
        return True


class Connection:
    """One end of a connection: one thread reads, any thread may send.

    It blocks until it is given to a `SocketLoop`; from then on neither reading nor sending waits.

    Attributes:
        rank: of the other end, once it has said so.
        trusted: the other end has shown the secret; until then long messages are refused.
        open: false after `close`.
    """

    def __init__(self, end: socket.socket, trusted: bool = False) -> None:
        self.end, self.trusted, self.open = end, trusted, True
        self.rank = -1
        self._unsent: collections.deque[tuple[memoryview, Sent | None]] = collections.deque()
        self._sending = threading.Lock()
        self._head, self._body, self._filled = bytearray(_HEAD.size), bytearray(), 0
        self._lengths: tuple[int, int] | None = None
        _open.add(end)
        if end.family in (socket.AF_INET, socket.AF_INET6):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                end.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, text: dict[str, Any], data: Any = b"", sent: Sent | None = None) -> bool:
        """Send a message, or begin to; true if something is left for `flush`.

        A connection that breaks raises for its reader only; one that is closed takes nothing.

        Args:
            data: bytes, which must not change until `sent` has gone.
        """
        message = json.dumps(text).encode()
        with self._sending:
            if not self.open:
                if sent is not None:
                    sent.gone.set()
                return False
            waiting = bool(self._unsent)
            self._unsent.append((memoryview(_HEAD.pack(len(message), len(data)) + message), None))
            self._unsent.append((memoryview(data), sent))
            return False if waiting else self._flush()

    @property
    def blocked(self) -> bool:
        """True while a message waits for `flush`."""
        return bool(self._unsent) and self.open

    def flush(self) -> bool:
        """Send as much as can be sent; true if something is left."""
        with self._sending:
            return self._flush()

    def _flush(self) -> bool:
        try:
            while self._unsent:
                part, sent = self._unsent[0]
                done = self.end.send(part) if len(part) else 0
                if done < len(part):
                    self._unsent[0] = (part[done:], sent)
                    continue
                self._unsent.popleft()
                if sent is not None:
                    sent.gone.set()
        except BlockingIOError:
            return True
        except OSError:  # which the reader hears of
            return False
        return False

    def receive(self) -> Message:
        """The next message.

        Raises:
            BlockingIOError: in a `SocketLoop`, if it has not come whole.
            ConnectionError: the connection has ended.
            ValueError: a stranger sends too much, or no JSON object.
        """
        while True:
            target = self._head if self._lengths is None else self._body
            count = self.end.recv_into(memoryview(target)[self._filled :])
            if not count:
                raise ConnectionError("its connection ended")
            self._filled += count
            if self._filled < len(target):
                continue
            self._filled = 0
            if self._lengths is None:
                lengths = self._lengths = _HEAD.unpack(self._head)
                if not self.trusted and sum(lengths) > GREETING_BYTES:
                    raise ValueError("a stranger")
                self._body = bytearray(sum(lengths))
            else:
                (length, _), self._lengths = self._lengths, None
                text = json.loads(self._body[:length])
                if not isinstance(text, dict):
                    raise ValueError("a stranger")
                return text, self._body[length:]

    def messages(self) -> Iterator[Message]:
        """Every message that has come whole. Raises as `receive`, after the last one."""
        with contextlib.suppress(BlockingIOError):
            while True:
                yield self.receive()

    def close(self, why: str = "the connection is closed", seconds: float = 0.0) -> None:
        """End the connection, wake whoever reads from it, and fail what was not sent.

        Args:
            seconds: time for what was not sent yet to go out.
        """
        if seconds:
            with contextlib.suppress(OSError), self._sending:
                self.end.settimeout(seconds)
                self._flush()
        self.open = False
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        with self._sending:
            for _, sent in self._unsent:
                if sent is not None:
                    sent.fail(why)
            self._unsent.clear()
        self.end.close()


def dial(
    place: Callable[[], dict[str, Any]],
    greeting: Callable[[dict[str, Any]], dict[str, Any]],
    expected: Callable[[dict[str, Any], dict[str, Any]], bool],
    seconds: float,
) -> tuple[Connection, dict[str, Any]]:
    """Connect, greet, and wait for the expected answer; try every host again until `seconds` have passed.

    Args:
        place: hosts and port, read anew before each round.
        greeting: to say at a place.
        expected: takes a place and an answer; false for an answer of somebody else.

    Raises:
        ConnectionError: nobody gave the expected answer; the text says what each host did.
    """
    deadline, tried = time.monotonic() + seconds, list[str]()
    while True:
        there = place()
        for host in there["hosts"]:
            try:
                connection = Connection(socket.create_connection((host, there["port"]), timeout=CONNECT_SECONDS), True)
            except OSError as error:
                tried.append(f"{host}: {error}")
                continue
            try:
                connection.end.settimeout(max(1.0, deadline - time.monotonic()))
                connection.send(greeting(there))
                answer, _ = connection.receive()
                if expected(there, answer):
                    connection.end.settimeout(None)
                    return connection, answer
                tried.append(f"{host}: somebody else")
            except (OSError, ValueError) as error:
                tried.append(f"{host}: no answer ({error})")
            connection.close()
        if time.monotonic() > deadline:
            raise ConnectionError(f"port {there['port']} of {'; '.join(dict.fromkeys(tried[-8:]))}")
        time.sleep(0.05)


class SocketLoop:
    """Connections that one thread serves. Other threads may send on them, and wake it.

    Args:
        listener: whose new connections join.
    """

    def __init__(self, listener: socket.socket | None = None) -> None:
        self.connections: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            _open.add(end)
        for source in [self._wake] if listener is None else [self._wake, listener]:
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ)

    def add(self, connection: Connection) -> None:
        """Serve a connection."""
        connection.end.setblocking(False)
        self._selector.register(connection.end, selectors.EVENT_READ, connection)
        self.connections.add(connection)

    def drop(self, connection: Connection, why: str) -> None:
        """Close a connection and serve it no more."""
        self.connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.end)
        connection.close(why)

    def send(self, connection: Connection, text: dict[str, Any], data: Any = b"", sent: Sent | None = None) -> None:
        """Send a message; the loop's thread goes on with what does not go out at once."""
        if connection.send(text, data, sent):
            self.wake()

    def wake(self) -> None:
        """Let `poll` return."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def poll(self, seconds: float | None = None) -> Iterator[Connection | None]:
        """Wait; then each connection that has something to read, and None after `wake`."""
        for key, events in self._selector.select(seconds):
            connection: Connection | None = key.data
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
            self.add(Connection(listener.accept()[0]))

    def close(self, why: str, seconds: float = 0.0) -> None:
        """Close every connection, the listener and the loop. `seconds`: as of `Connection.close`, for each."""
        self._selector.close()
        for connection in self.connections:
            connection.close(why, seconds)
        for end in (self._listener, self._wake, self._waker):
            if end is not None:
                end.close()
