"""The connections to rank 0, over which ranks announce what they do not agree on by themselves (`ahead`), and are told
what to run next.

Rank 0 listens; every rank, rank 0 too, holds one connection to it. A message is four bytes of length, then JSON. The
address and two secrets go through the store in which the ranks meet: who does not know the one is not let in, and who
does not answer with the other is not believed. Nobody polls: an idle job costs nothing, and the end of a process ends
its connection, which rank 0 sees at once and tells the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from .epoch_coordinator import Desk
from .negotiation import REMOVE, Negotiator

log = logging.getLogger("gradwire.horovod")

_LENGTH = struct.Struct("!I")
#: The longest message from somebody who has not shown the secret.
_GREETING_BYTES = 4096
#: Seconds after which a silent host counts as gone: TCP probes it from the fifth second on.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
#: After the end has been said: how long to wait until the others have heard it.
_FAREWELL_SECONDS = 5.0
#: How often to look for ranks that wait for others.
_LOOK_SECONDS = 0.25


class Connection:
    """One end, for one reading thread and any number of writing ones."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()
        end.settimeout(None)
        tune(end)
        let_go_in_children(self._forget)

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            self._end.close()

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._sending:
            self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> dict[str, Any] | None:
        """The next message, or None once the connection has ended."""
        try:
            length = self._read(_LENGTH.size)
            data = None if length is None else self._read(_LENGTH.unpack(length)[0])
        except OSError:
            return None
        return None if data is None else json.loads(data)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            part = self._end.recv(min(size - len(data), 1 << 20))
            if not part:
                return None
            data += part
        return bytes(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def tune(end: socket.socket) -> None:
    if end.family in (socket.AF_INET, socket.AF_INET6):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            end.setsockopt(socket.IPPROTO_TCP, option, value)


def let_go_in_children(close: Callable[[], None]) -> None:
    """Call this method in forked children, such as data loaders: they must not keep the connections of their parent
    open. Its object is not kept alive by this, as it would be by `os.register_at_fork`, and the whole engine with it.
    """
    reference = weakref.WeakMethod(close)

    def after() -> None:
        found = reference()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=after)


def addresses() -> list[str]:
    """Where other hosts may reach this one, likeliest first."""
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


def connect(store: dist.Store, hello: dict[str, Any], seconds: float) -> tuple[Connection, dict[str, Any]]:
    """This rank's connection to rank 0, and what that said: it answers once all ranks have come.

    The store may still hold the address of a rank 0 that is gone, where a launcher restarts workers: that leads
    nowhere, or to one that has all its ranks, and is read again.

    Raises:
        ConnectionError: it cannot be reached, or not all ranks came within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        place = json.loads(store.get("control"))
        tried: list[str] = []
        for host in place["hosts"]:
            try:
                connection, answer = _try(host, place, hello, deadline)
            except OSError as error:
                tried.append(f"{host}: {error}")
                continue
            if answer is not None and secrets.compare_digest(str(answer.get("answer")), place["answer"]):
                return connection, answer
            connection.close()
            tried.append(f"{host}: no answer")
        if time.monotonic() > deadline:
            raise ConnectionError(
                f"rank {hello['rank']} did not meet all ranks within {seconds:.0f} s (rank 0 is said to be at port "
                f"{place['port']}; {'; '.join(tried)}): start every rank, and set GLOO_SOCKET_IFNAME to the network "
                "interface that joins the hosts"
            )
        time.sleep(0.05)


def _try(
    host: str, place: dict[str, Any], hello: dict[str, Any], deadline: float
) -> tuple[Connection, dict[str, Any] | None]:
    end = socket.create_connection((host, place["port"]), timeout=3.0)
    connection = Connection(end)
    connection.send({**hello, "secret": place["secret"]})
    end.settimeout(max(1.0, deadline - time.monotonic()))
    answer = connection.receive()
    end.settimeout(None)
    return connection, answer


class Coordinator:
    """Rank 0's side: a thread that hears all ranks and tells them what the negotiator decides.

    Args:
        store: where the address is written.
        negotiator: decides.
        stall_seconds: after how long to warn that some ranks wait for others.
        stall_shutdown_seconds: after how long to give up; 0: never.
    """

    def __init__(
        self, store: dist.Store, negotiator: Negotiator, stall_seconds: float, stall_shutdown_seconds: float
    ) -> None:
        self.desk = Desk(negotiator)
        self._size = negotiator.size
        self._stall, self._stall_shutdown = stall_seconds, stall_shutdown_seconds
        self._listener = socket.create_server(("", 0), backlog=max(128, self._size))
        self._secret, self._answer, self._session = (secrets.token_hex(16) for _ in range(3))
        place = {
            "hosts": addresses(),
            "port": self._listener.getsockname()[1],
            "secret": self._secret,
            "answer": self._answer,
        }
        store.set("control", json.dumps(place))
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[int, _Peer] = {}
        self._connected: set[_Peer] = set()
        self._ending: float | None = None
        #: What this process's other threads have for this one.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        let_go_in_children(self._forget)
        self.thread = threading.Thread(target=self._run, name="gradwire-coordinator", daemon=True)
        self.thread.start()

    def _forget(self) -> None:
        for end in (self._listener, self._wake, self._waker, *(peer.end for peer in self._connected)):
            with contextlib.suppress(OSError):
                end.close()

    def _run(self) -> None:
        try:
            while self._ending is None or (self._connected and time.monotonic() < self._ending):
                for key, events in self._selector.select(timeout=_LOOK_SECONDS):
                    # First what this process has said before it said anything on its connection.
                    self._read_inbox()
                    if key.fileobj is self._listener:
                        self._accept()
                    elif events & selectors.EVENT_WRITE:
                        self._guarded(key.data, key.data.flush)
                    if key.data is not None and events & selectors.EVENT_READ:
                        self._guarded(key.data, partial(self._read, key.data))
                self._read_inbox()
                self._decide()
                self._look_for_stalls()
        finally:
            self._forget()
            self._selector.close()

    def _guarded(self, peer: _Peer, action: Callable[[], None]) -> None:
        """A connection that breaks, or says what nobody can read, is a rank that is gone."""
        try:
            action()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._lost(peer, error)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            end, _ = self._listener.accept()
            tune(end)
            end.setblocking(False)
            peer = _Peer(end, self._selector)
            self._connected.add(peer)

    def _read(self, peer: _Peer) -> None:
        for message in peer.messages():
            if peer.rank is None:
                self._greet(peer, message)
            elif "done" in message:
                self.desk.negotiator.done(message["done"])
            elif "failed" in message:
                self._end(f"rank {peer.rank}: {message['failed']}", clean=False)
            else:
                self.desk.hear(peer.rank, message)

    def ask(self, request: dict[str, Any]) -> None:
        """From rank 0 itself: announce an operation. For any thread, as are the next three."""
        self._put(partial(self.desk.hear, 0, request))

    def take_over(self, left: list[tuple[int, dict[str, Any] | None]], agreed: int | None) -> None:
        """See `Actions.left`."""
        self._put(partial(self.desk.take_over, left, agreed))

    def look_at(self, key: str) -> None:
        """A rank has announced a key with its payload, which others may have announced without."""
        if key in self.desk.negotiator or REMOVE in self.desk.negotiator:
            self._put(partial(self.desk.collect, key))

    def done(self, set_id: int) -> None:
        """Rank 0 has carried out a decision for this process set."""
        self._put(partial(self.desk.negotiator.done, set_id))

    def _put(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _read_inbox(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(1 << 12)
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _greet(self, peer: _Peer, message: dict[str, Any]) -> None:
        if not secrets.compare_digest(str(message.get("secret")), self._secret):
            raise ValueError("a stranger")
        if int(message["rank"]) in self._peers:
            raise ValueError("a rank that is here already: of a later start")
        peer.rank, peer.hello = int(message["rank"]), message
        self._peers[peer.rank] = peer
        if len(self._peers) == self._size:
            hellos = [self._peers[rank].hello for rank in range(self._size)]
            told = {key: [hello[key] for hello in hellos] for key in ("host", "place")}
            for other in self._peers.values():
                other.send({"answer": self._answer, "session": self._session, **told})

    def _decide(self) -> None:
        if self._ending is not None or len(self._peers) < self._size:
            return
        for decision in self.desk.decisions():
            for rank in decision.members:
                message = decision.message
                if decision.acknowledge == rank:
                    message = {**message, "acknowledge": True}
                self._guarded(self._peers[rank], partial(self._peers[rank].send, message))
        if self.desk.leaving is not None:
            self._end(f"rank {self.desk.leaving} has shut down", clean=True)

    def _lost(self, peer: _Peer, error: Exception) -> None:
        self._connected.discard(peer)
        peer.close()
        if peer.rank is not None:
            self._end(f"rank {peer.rank} is gone ({error or 'its connection ended'})", clean=False)

    def _end(self, message: str, clean: bool) -> None:
        if self._ending is not None:
            return
        self._ending = time.monotonic() + _FAREWELL_SECONDS
        for peer in list(self._peers.values()):
            if peer in self._connected:
                self._guarded(peer, partial(peer.send, {"do": "stop", "clean": clean, "message": message}))

    def _look_for_stalls(self) -> None:
        if len(self._peers) < self._size or self._ending is not None:
            return
        self.desk.look()
        if self._stall > 0:
            for key, waiting, missing, seconds in self.desk.overdue(self._stall):
                log.warning(
                    "ranks %s have waited %.0f s in %s for ranks %s: does every rank call it, under the same name?",
                    waiting, seconds, key, missing,
                )  # fmt: skip
        if self._stall_shutdown > 0:
            for key, _, missing, seconds in self.desk.overdue(self._stall_shutdown, again=True):
                self._end(f"{key} has waited {seconds:.0f} s for ranks {missing}", clean=False)


class _Peer:
    """A connection as the coordinator sees it: never waited for."""

    def __init__(self, end: socket.socket, selector: selectors.BaseSelector) -> None:
        self.end, self._selector = end, selector
        self.rank: int | None = None
        self.hello: dict[str, Any] = {}
        self._received, self._unsent = bytearray(), bytearray()
        selector.register(end, selectors.EVENT_READ, self)

    def messages(self) -> list[dict[str, Any]]:
        part = None
        while True:
            try:
                part = self.end.recv(1 << 16)
            except BlockingIOError:
                break
            if not part:
                break
            self._received += part
            if self.rank is None and len(self._received) > _GREETING_BYTES:
                raise ValueError("a stranger")
        found = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            found.append(json.loads(self._received[_LENGTH.size : end]))
            del self._received[:end]
        if part == b"" and not found:  # what was said before the end comes first
            raise ConnectionError("its connection ended")
        return found

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._unsent += _LENGTH.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.end.send(self._unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self.end, events, self)

    def close(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self.end)
        self.end.close()
