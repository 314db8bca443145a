"""A connection between every two ranks, for announcements and for small tensors.

A message goes out at once and waits at its receiver until it is asked for: one way and no more. Gloo sends a tensor
only when it has heard that the receiver waits for it, which is two.
"""

from __future__ import annotations

import collections
import contextlib
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..consensus.coordinator import addresses, let_go_in_children, tune

#: Lengths of what follows: text, then bytes.
_HEAD = struct.Struct("!IQ")
_GREETING_BYTES = 4096

#: What to do with a message: sender, text, bytes.
Receiver = Callable[[int, dict[str, Any], bytearray], None]
#: Where a tensor comes from: rank, process set, tag.
Place = tuple[int, int, int]


class _Waited:
    """As a message of Gloo's: `is_success` matters once it has completed, and one that has failed here never does."""

    def is_success(self) -> bool:
        return True


class Sent(_Waited):
    """A message on its way out."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.error: str | None = None

    def wait(self, timeout: Any = None) -> None:
        """Until its memory may change."""
        self.gone.wait(None if timeout is None else timeout.total_seconds())
        if self.error is not None or not self.gone.is_set():
            raise RuntimeError(self.error or "the message was not taken in time")

    def is_completed(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.gone.is_set() and self.error is None


class Received(_Waited):
    """A message that is asked for."""

    def __init__(self, mesh: Mesh, place: Place, tensor: Tensor) -> None:
        self._mesh, self._place, self._tensor = mesh, place, tensor
        self._number = mesh.expect(place)
        self._there = False

    def wait(self, timeout: Any = None) -> None:
        """Until it is in the tensor, as Gloo's: what is shorter fills its beginning."""
        data = self._mesh.take(self._place, self._number, None if timeout is None else timeout.total_seconds())
        memory = self._tensor.view(-1).view(torch.uint8)
        if len(data) > memory.numel():
            raise RuntimeError(f"rank {self._place[0]} sent {len(data)} bytes, not {memory.numel()}")
        if data:
            memory[: len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
        self._there = True

    def is_completed(self) -> bool:
        """Whether it has been waited for."""
        return self._there


class Mesh:
    """This rank's end of its connections to all others. Making it is a collective, in two parts: `place` is known
    after the constructor; `connect` takes those of all ranks.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._listener = socket.create_server(("", 0), backlog=128)
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._here = threading.Condition()
        # Messages of one place come and are asked for in the same order, but need not be waited for in it.
        self._arrived: dict[tuple[Place, int], bytearray] = {}
        self._counts: collections.Counter[tuple[Place, str]] = collections.Counter()
        self._why: str | None = None
        self._wake, self._waker = socket.socketpair()
        self._thread: threading.Thread | None = None
        let_go_in_children(self._forget)

    @property
    def place(self) -> dict[str, Any]:
        """Where this rank listens; anything that JSON can carry."""
        return {"hosts": addresses(), "port": self._listener.getsockname()[1]}

    def connect(self, places: Sequence[dict[str, Any]], secret: str, seconds: float) -> None:
        """Meet all ranks: this one calls those before it, and is called by those after it.

        Raises:
            ConnectionError: not all came within `seconds`.
        """
        deadline = time.monotonic() + seconds
        with contextlib.closing(self._listener):
            for peer in range(self.rank):
                self._peers[peer] = self._call(peer, places[peer], secret, deadline)
            while len(self._peers) < len(places) - 1:
                self._listener.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    end, _ = self._listener.accept()
                    self._answer(end, secret)
                except TimeoutError as error:
                    missing = [rank for rank in range(len(places)) if rank not in (*self._peers, self.rank)]
                    raise ConnectionError(f"rank {self.rank} was not called by ranks {missing}") from error

    def start(self, receiver: Receiver) -> None:
        """From now on hand over what comes; but what is for `take` waits for it."""
        self._receiver = receiver
        for peer in self._peers.values():
            peer.end.setblocking(False)
            self._selector.register(peer.end, selectors.EVENT_READ, peer)
        self._wake.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="gradwire-mesh", daemon=True)
        self._thread.start()

    def send(self, rank: int, text: dict[str, Any], data: Any = b"") -> Sent:
        """Start sending to a rank; `data` must stay as it is until that is done. One that is gone gets nothing."""
        message, sent = json.dumps(text).encode(), Sent()
        if self._why is not None:
            sent.error = self._why
            sent.gone.set()
        elif self._peers[rank].send([memoryview(_HEAD.pack(len(message), len(data)) + message), data], sent):
            self._interrupt()
        return sent

    def expect(self, place: Place) -> int:
        """Ask for the next tensor of a place; its number."""
        with self._here:
            return self._count(place, "expected")

    def take(self, place: Place, number: int, seconds: float | None = None) -> bytearray:
        """Wait for a tensor's bytes.

        Raises:
            RuntimeError: it will not come, or did not come in time.
        """
        with self._here:
            self._here.wait_for(lambda: (place, number) in self._arrived or self._why is not None, seconds)
            if (place, number) not in self._arrived:
                raise RuntimeError(self._why or f"rank {place[0]} has sent nothing in time")
            return self._arrived.pop((place, number))

    def _count(self, place: Place, what: str) -> int:
        self._counts[place, what] += 1
        return self._counts[place, what]

    def close(self, why: str = "the connections to the other ranks are closed") -> None:
        """End every connection, and every wait by an error that says why."""
        with self._here:
            self._why = self._why or why
            self._here.notify_all()
        self._interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _forget(self) -> None:
        for end in (self._listener, self._wake, self._waker, *(peer.end for peer in self._peers.values())):
            with contextlib.suppress(OSError):
                end.close()

    def _call(self, rank: int, place: dict[str, Any], secret: str, deadline: float) -> _Peer:
        tried: list[str] = []
        while time.monotonic() < deadline:
            for host in place["hosts"]:
                try:
                    end = socket.create_connection((host, place["port"]), timeout=3.0)
                    end.settimeout(max(1.0, deadline - time.monotonic()))
                    peer = _Peer(rank, end)
                    peer.say({"rank": self.rank, "to": rank, "secret": secret})
                    if peer.listen() == {"rank": rank}:
                        return peer
                    end.close()
                    tried.append(f"{host}: somebody else")
                except (OSError, ValueError) as error:
                    tried.append(f"{host}: {error}")
            time.sleep(0.05)
        raise ConnectionError(
            f"rank {self.rank} did not reach rank {rank} ({'; '.join(tried[-4:])}): set GLOO_SOCKET_IFNAME to the "
            "network interface that joins the hosts"
        )

    def _answer(self, end: socket.socket, secret: str) -> None:
        end.settimeout(3.0)
        peer = _Peer(-1, end)
        try:
            greeting = peer.listen()
            known = secrets.compare_digest(str(greeting.get("secret")), secret) and greeting.get("to") == self.rank
            rank = int(greeting["rank"]) if known else -1
            if rank <= self.rank or rank in self._peers:
                raise ValueError("a stranger")
            peer.say({"rank": self.rank})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            end.close()
            return
        peer.rank = rank
        self._peers[rank] = peer

    def _run(self) -> None:
        while self._why is None:
            for key, events in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._wake.recv(1 << 12)
                    for peer in self._peers.values():
                        if peer.unsent and peer.open:
                            self._selector.modify(peer.end, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
                    continue
                peer = key.data
                try:
                    if events & selectors.EVENT_WRITE and not peer.flush():
                        self._selector.modify(peer.end, selectors.EVENT_READ, peer)
                    if events & selectors.EVENT_READ:
                        for text, data in peer.messages():
                            self._hand_over(peer.rank, text, data)
                except (OSError, ValueError) as error:
                    # That the rank is gone rank 0 says to all (`control`), if it is.
                    self._selector.unregister(peer.end)
                    peer.close(f"rank {peer.rank} is gone ({error})")
                    self._receiver(peer.rank, {"last": True}, bytearray())
        for peer in self._peers.values():
            peer.flush_last()
            peer.close(self._why or "")
        self._selector.close()
        for end in (self._wake, self._waker):
            end.close()

    def _hand_over(self, rank: int, text: dict[str, Any], data: bytearray) -> None:
        if "tag" in text:
            with self._here:
                place = (rank, text["set"], text["tag"])
                self._arrived[place, self._count(place, "arrived")] = data
                self._here.notify_all()
        else:
            self._receiver(rank, text, data)


class _Peer:
    """A connection: one thread reads, any may send, none waits."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.rank, self.end, self.open = rank, end, True
        tune(end)
        self.unsent: collections.deque[tuple[Any, Sent | None]] = collections.deque()
        self._sending = threading.Lock()
        self._head, self._body, self._filled = bytearray(_HEAD.size), bytearray(), 0
        self._lengths: tuple[int, int] | None = None

    def say(self, text: dict[str, Any]) -> None:
        """Before anything else, and waited for."""
        data = json.dumps(text).encode()
        self.end.sendall(_HEAD.pack(len(data), 0) + data)

    def listen(self) -> Any:
        """Before anything else, and waited for."""
        length, _ = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > _GREETING_BYTES:
            raise ValueError("a stranger")
        return json.loads(self._exactly(length))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.end.recv(size - len(data))
            if not part:
                raise ConnectionError("it hung up")
            data += part
        return bytes(data)

    def send(self, parts: Sequence[Any], sent: Sent) -> bool:
        """Whether something is left for `flush`."""
        with self._sending:
            if not self.open:
                sent.gone.set()
                return False
            waiting = bool(self.unsent)
            self.unsent.extend((memoryview(part), None) for part in parts[:-1])
            self.unsent.append((memoryview(parts[-1]), sent))
            return False if waiting else self._flush()

    def flush(self) -> bool:
        """Send what can be sent; whether something is left."""
        with self._sending:
            return self._flush()

    def _flush(self) -> bool:
        try:
            while self.unsent:
                part, sent = self.unsent[0]
                done = self.end.send(part) if len(part) else 0
                if done < len(part):
                    self.unsent[0] = (part[done:], sent)
                    continue
                self.unsent.popleft()
                if sent is not None:
                    sent.gone.set()
        except BlockingIOError:
            return True
        except OSError:  # the thread that reads from it hears of that
            return False
        return False

    def flush_last(self) -> None:
        """What was said before the end goes out, if that takes no time."""
        with contextlib.suppress(OSError), self._sending:
            self.end.settimeout(0.2)
            self._flush()

    def messages(self) -> list[tuple[dict[str, Any], bytearray]]:
        """All that have come whole.

        Raises:
            ConnectionError: the connection has ended, and nothing came before.
        """
        found: list[tuple[dict[str, Any], bytearray]] = []
        try:
            while True:
                target = self._head if self._lengths is None else self._body
                count = self.end.recv_into(memoryview(target)[self._filled :])
                if not count:
                    if found:
                        break
                    raise ConnectionError("its connection ended")
                self._filled += count
                if self._filled < len(target):
                    continue
                self._filled = 0
                if self._lengths is None:
                    self._lengths = _HEAD.unpack(self._head)
                    self._body = bytearray(sum(self._lengths))
                else:
                    length, _ = self._lengths
                    found.append((json.loads(self._body[:length]), self._body[length:]))
                    self._lengths = None
        except BlockingIOError:
            pass
        return found

    def close(self, why: str) -> None:
        with self._sending:
            self.open = False
            for _, sent in self.unsent:
                if sent is not None:
                    sent.error = why
                    sent.gone.set()
            self.unsent.clear()
        self.end.close()


class Carrier:
    """A process group's interface for messages of CPU tensors, over a mesh; its collectives are the backend's.

    Args:
        backend: of the same ranks.
        set_id: the process set.
        ranks: global ranks of the members.
    """

    def __init__(self, mesh: Mesh, backend: Any, set_id: int, ranks: Sequence[int]) -> None:
        self._mesh, self._backend, self._set_id, self._ranks = mesh, backend, set_id, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        memory = tensor.view(-1).view(torch.uint8).numpy()
        return self._mesh.send(self._ranks[rank], {"set": self._set_id, "tag": tag}, memory)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        return Received(self._mesh, (self._ranks[rank], self._set_id, tag), tensor)
