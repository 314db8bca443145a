"""Framed messages over TCP: the one socket stack, of Horovod's interface and of the meeting point.

A message is four bytes of length and a JSON text. Before any other message each end proves to the other that
it knows a secret, which itself is never sent: the end that was called says a nonce, the caller one of its own and
HMAC-SHA256 of both under the secret, and the first end its own HMAC. The traffic after that is not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

#: Length of the text.
_HEAD = struct.Struct("!I")
#: The longest message, in bytes, from a peer that has not proved to know the secret, and the seconds that it gets.
GREETING_BYTES, GREETING_SECONDS = 512, 5.0
#: Seconds until a silent host counts as gone: TCP probes it from the fifth second on.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
#: Seconds to wait for one host to accept a connection.
CONNECT_SECONDS = 3.0

#: Sockets that forked children, such as data loaders, must not keep open.
OPEN: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for end in list(OPEN):
        with contextlib.suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_close_in_child)


def listen(backlog: int, port: int = 0) -> socket.socket:
    """A listening socket of all interfaces, of IPv4 and, where the host has it, IPv6, at a free port unless one is
    named."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    end = socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)
    OPEN.add(end)
    return end


class Connection:
    """One end of a connection: one thread reads, any thread may send.

    It blocks until it is given to a `SocketLoop`; from then on neither reading nor sending waits.

    Args:
        secret: known to both ends. The empty one keeps nobody out.
        dialled: this end has called the other.
        limit: the longest message to take, in bytes.

    Attributes:
        rank: of the other end, once it has said so.
        trusted: the other end has proved to know the secret; until then long messages are refused.
        open: false after `close`.
        born: time of construction, by `time.monotonic`.
    """

    def __init__(self, end: socket.socket, secret: str, dialled: bool = False, limit: int = 1 << 62) -> None:
        self.end, self.trusted, self.open = end, False, True
        self.rank, self.born = -1, time.monotonic()
        self._secret, self._dialled, self._limit = secret, dialled, limit
        self._nonce, self._both = secrets.token_hex(16), ""
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._head, self._filled = bytearray(_HEAD.size), 0
        self._body: bytearray | None = None  # once the head is here
        OPEN.add(end)
        if end.family in (socket.AF_INET, socket.AF_INET6):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                end.setsockopt(socket.IPPROTO_TCP, option, value)
        if not dialled:
            self.send({"nonce": self._nonce})

    def __str__(self) -> str:
        """Address of the other end."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            host, port = self.end.getpeername()[:2]
            host = host.removeprefix("::ffff:")  # IPv4, at a socket of both
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return "a closed connection"

    def greet(self) -> None:
        """Prove to know the secret, and have the other end prove it, on a connection that blocks.

        Raises:
            OSError, ValueError: it does not; `PermissionError` if it says that this end does not.
        """
        while not self.trusted:
            self._greet(self._next())

    def _greet(self, text: dict[str, Any]) -> None:
        """Take the other end's next word of the greeting."""
        if "refused" in text and self._dialled:
            raise PermissionError("it knows another secret")
        if not self._both:
            self._both = f"{text.get('nonce')} {self._nonce}" if self._dialled else f"{self._nonce} {text.get('nonce')}"
            if self._dialled:
                self.send({"nonce": self._nonce, "proof": self._proof("dialled")})
                return
        expected = self._proof("listens" if self._dialled else "dialled")
        if not hmac.compare_digest(str(text.get("proof")).encode(), expected.encode()):
            self.send({"refused": "another secret"})
            raise ValueError("a stranger")
        self.trusted = True
        if not self._dialled:
            self.send({"proof": self._proof("listens")})

    def _proof(self, role: str) -> str:
        # The role keeps an end from returning the other's own proof.
        return hmac.new(self._secret.encode(), f"{role} {self._both}".encode(), hashlib.sha256).hexdigest()

    def send(self, text: dict[str, Any]) -> bool:
        """Send a message, or begin to; true if something is left for `flush`.

        A connection that breaks raises for its reader only; one that is closed takes nothing.
        """
        message = json.dumps(text).encode()
        with self._sending:
            if not self.open:
                return False
            waiting = bool(self._unsent)
            self._unsent += _HEAD.pack(len(message)) + message
            return False if waiting else self._flush()

    @property
    def blocked(self) -> bool:
        """True while a message waits for `flush`."""
        return bool(self._unsent) and self.open

    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent."""
        with self._sending:
            return len(self._unsent)

    def flush(self) -> bool:
        """Send as much as can be sent; true if something is left."""
        with self._sending:
            return self._flush()

    def _flush(self) -> bool:
        try:
            while self._unsent:
                del self._unsent[: self.end.send(self._unsent)]
        except BlockingIOError:
            return True
        except OSError:  # which the reader hears of
            return False
        return False

    def receive(self) -> dict[str, Any]:
        """The next message, from an end that has proved to know the secret.

        Raises:
            BlockingIOError: in a `SocketLoop`, if it has not come whole.
            ConnectionError: the connection has ended.
            ValueError: a stranger, too long a message, or no JSON object.
        """
        while True:
            proved = self.trusted
            text = self._next()
            if proved:
                return text
            self._greet(text)

    def _next(self) -> dict[str, Any]:
        while True:
            target = self._head if self._body is None else self._body
            count = self.end.recv_into(memoryview(target)[self._filled :])
            if not count:
                raise ConnectionError("its connection ended")
            self._filled += count
            if self._filled < len(target):
                continue
            self._filled = 0
            if self._body is None:
                (length,) = _HEAD.unpack(self._head)
                if not 0 < length <= (self._limit if self.trusted else GREETING_BYTES):
                    raise ValueError(f"a message of {length} bytes" if self.trusted else "a stranger")
                self._body = bytearray(length)
            else:
                message, self._body = self._body, None
                try:
                    text = json.loads(message)
                except RecursionError as error:
                    raise ValueError("a message that is nested too deeply") from error
                if not isinstance(text, dict):
                    raise ValueError("no JSON object")
                return text

    def messages(self) -> Iterator[dict[str, Any]]:
        """Every message that has come whole. Raises as `receive`, after the last one."""
        with contextlib.suppress(BlockingIOError):
            while True:
                yield self.receive()

    def close(self, seconds: float = 0.0) -> None:
        """End the connection, and wake whoever reads from it.

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
            self._unsent.clear()
        self.end.close()


def connect(host: str, port: int, secret: str, seconds: float) -> Connection:
    """Connect, and greet; the connection then waits up to `seconds` for each message.

    Raises:
        OSError, ValueError: nobody is there, or somebody else; `PermissionError`: with another secret.
    """
    connection = Connection(socket.create_connection((host, port), timeout=CONNECT_SECONDS), secret, dialled=True)
    connection.end.settimeout(seconds)
    try:
        connection.greet()
    except (OSError, ValueError):
        connection.close()
        raise
    return connection


def dial(
    place: Callable[[], dict[str, Any]],
    greeting: dict[str, Any],
    expected: Callable[[dict[str, Any]], bool],
    seconds: float,
) -> tuple[Connection, dict[str, Any]]:
    """Connect, greet, and wait for the expected answer; try every host again until `seconds` have passed.

    Args:
        place: hosts, port and secret, read anew before each round.
        greeting: to say at a place.
        expected: takes an answer; false for one of somebody else.

    Raises:
        ConnectionError: nobody gave the expected answer; the text says what each host did.
    """
    deadline, tried = time.monotonic() + seconds, list[str]()
    while True:
        there = place()
        for host in there["hosts"]:
            connection = None
            try:
                left = max(1.0, deadline - time.monotonic())
                connection = connect(host, there["port"], there["secret"], left)
                connection.send(greeting)
                answer = connection.receive()
                if expected(answer):
                    connection.end.settimeout(None)
                    return connection, answer
                tried.append(f"{host}: somebody else")
            except (OSError, ValueError) as error:
                tried.append(f"{host}: {error}")
            if connection is not None:
                connection.close()
        if time.monotonic() > deadline:
            raise ConnectionError(f"port {there['port']} of {'; '.join(dict.fromkeys(tried[-8:]))}")
        time.sleep(0.05)
