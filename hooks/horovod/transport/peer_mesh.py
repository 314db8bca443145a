"""A connection between every two ranks, for the messages of compressed exchanges.

A message goes out at once and waits at its receiver until it is asked for, so it takes one latency. Gloo takes two: it
sends a tensor only after its receiver has announced itself.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm.socket_loop import SocketLoop
from ...comm.sockets import CONNECT_SECONDS, Connection, Sent, dial, listen
from .addresses import addresses

#: Source of a tensor: rank, process set, tag.
Place = tuple[int, int, int]
#: Seconds for the last messages to go out before connections are closed.
_LAST_SECONDS = 0.2


class Received:
    """A message that is asked for, as Gloo's work."""

    def __init__(self, mesh: PeerMesh, place: Place, tensor: Tensor) -> None:
        self._mesh, self._place, self._tensor = mesh, place, tensor
        self._number = mesh.expect(place)
        self._there = False

    def wait(self, timeout: Any = None) -> None:
        """Wait until it is in the tensor. A shorter message fills its beginning, as with Gloo."""
        data = self._mesh.take(self._place, self._number, None if timeout is None else timeout.total_seconds())
        memory = self._tensor.view(-1).view(torch.uint8)
        if len(data) > memory.numel():
            raise RuntimeError(f"rank {self._place[0]} sent {len(data)} bytes, not {memory.numel()}")
        if data:
            memory[: len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
        self._there = True

    def is_completed(self) -> bool:
        """True after `wait`."""
        return self._there

    def is_success(self) -> bool:
        return True


class PeerMesh:
    """This rank's end of its connections to all others.

    Making it is a collective in two parts: `place` is known after the constructor; `connect` takes those of all ranks.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._listener = listen(backlog=128)
        self._peers: dict[int, Connection] = {}
        self._loop = SocketLoop()
        self._here = threading.Condition()
        # Messages of one place come and are asked for in the same order, but need not be waited for in it.
        self._arrived: dict[tuple[Place, int], bytearray] = {}
        self._counts: collections.Counter[tuple[Place, str]] = collections.Counter()
        self._why: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def place(self) -> dict[str, Any]:
        """Hosts and port at which this rank listens; JSON can carry it."""
        return {"hosts": addresses(), "port": self._listener.getsockname()[1]}

    def connect(self, places: Sequence[dict[str, Any]], secret: str, seconds: float) -> None:
        """Meet all ranks: this one dials those before it, and those after it dial this one.

        Raises:
            ConnectionError: not all came within `seconds`.
        """
        deadline = time.monotonic() + seconds
        with contextlib.closing(self._listener):
            for peer in range(self.rank):
                self._peers[peer] = self._dial(peer, places[peer], secret, deadline - time.monotonic())
            while len(self._peers) < len(places) - 1:
                self._listener.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    self._answer(self._listener.accept()[0], secret)
                except TimeoutError as error:
                    missing = [rank for rank in range(len(places)) if rank not in (*self._peers, self.rank)]
                    raise ConnectionError(f"rank {self.rank} was not called by ranks {missing}") from error

    def _dial(self, rank: int, place: dict[str, Any], secret: str, seconds: float) -> Connection:
        there, greeting = {**place, "secret": secret}, {"rank": self.rank, "to": rank}
        try:
            connection, _ = dial(lambda: there, greeting, lambda answer: answer == {"rank": rank}, seconds)
        except ConnectionError as error:
            raise ConnectionError(
                f"rank {self.rank} did not reach rank {rank} ({error}): set GLOO_SOCKET_IFNAME to the network "
                "interface that joins the hosts"
            ) from error
        connection.rank = rank
        return connection

    def _answer(self, end: socket.socket, secret: str) -> None:
        """Take a caller in that knows the secret; hang up on others."""
        end.settimeout(CONNECT_SECONDS)
        connection = Connection(end, secret)
        try:
            greeting, _ = connection.receive()
            rank = int(greeting["rank"]) if greeting.get("to") == self.rank else -1
            if rank <= self.rank or rank in self._peers:
                raise ValueError("a stranger")
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        connection.send({"rank": self.rank})
        connection.rank = rank
        self._peers[rank] = connection

    def start(self) -> None:
        """Take messages from now on, for `take`."""
        for connection in self._peers.values():
            self._loop.add(connection)
        self._thread = threading.Thread(target=self._run, name="gradwire-mesh", daemon=True)
        self._thread.start()

    def send(self, rank: int, text: dict[str, Any], data: Any = b"") -> Sent:
        """Start sending to a rank; `data` must not change until that is done. A rank that is gone gets nothing."""
        sent = Sent()
        if self._why is not None:
            sent.fail(self._why)
        else:
            self._loop.send(self._peers[rank], text, data, sent)
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

    def _count(self, place: Place, event: str) -> int:
        self._counts[place, event] += 1
        return self._counts[place, event]

    def close(self, why: str = "the connections to the other ranks are closed") -> None:
        """End every connection, and every wait by an error that says why."""
        with self._here:
            self._why = self._why or why
            self._here.notify_all()
        self._loop.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        while self._why is None:
            for connection in self._loop.poll():
                if connection is None:
                    continue
                try:
                    for text, data in connection.messages():
                        self._arrive(connection.rank, text, data)
                except (OSError, ValueError) as error:
                    # Rank 0 tells all ranks if this one is gone (`coordinator`).
                    self._loop.drop(connection, f"rank {connection.rank} is gone ({error})")
        self._loop.close(self._why, _LAST_SECONDS)

    def _arrive(self, rank: int, text: dict[str, Any], data: bytearray) -> None:
        with self._here:
            place = (rank, text["set"], text["tag"])
            self._arrived[place, self._count(place, "arrived")] = data
            self._here.notify_all()


class MeshGroup:
    """A process group whose point-to-point messages of CPU tensors take a mesh; its collectives are the backend's.

    Args:
        backend: of the same ranks.
        set_id: the process set.
        ranks: global ranks of the members.
    """

    def __init__(self, mesh: PeerMesh, backend: Any, set_id: int, ranks: Sequence[int]) -> None:
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
