"""A mesh of ranks in one process, with Gloo's messages by tags and without its sockets and threads."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from gradwire.hooks.comm.group import Group
from torch import Tensor

#: From, to, tag, and how many of these came before.
Key = tuple[int, int, int, int]


class Mesh:
    """The messages between the members of a view."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: dict[Key, Tensor] = {}
        self.waiters: dict[Key, threading.Lock] = {}
        self.closed: set[int] = set()

    def put(self, key: Key, message: Tensor) -> None:
        with self.lock:
            self._check(key)
            self.messages[key] = message
            waiter = self.waiters.pop(key, None)
        if waiter is not None:
            waiter.release()

    def take(self, key: Key, seconds: float) -> Tensor:
        with self.lock:
            if key in self.messages and key[1] not in self.closed:
                return self.messages.pop(key)
            self._check(key)
            waiter = self.waiters[key] = threading.Lock()
            waiter.acquire()
        in_time = waiter.acquire(timeout=seconds)
        with self.lock:
            if key in self.messages:
                return self.messages.pop(key)
            self._check(key)
            assert not in_time
            self.waiters.pop(key, None)
            raise RuntimeError(f"no message for {seconds:.0f} s")

    def close(self, rank: int) -> None:
        """End all connections of a rank: what it has sent still arrives."""
        with self.lock:
            self.closed.add(rank)
            ended = [key for key in self.waiters if rank in key[:2]]
            waiters = [self.waiters.pop(key) for key in ended]
        for waiter in waiters:
            waiter.release()

    def _check(self, key: Key) -> None:
        if key[0] in self.closed or key[1] in self.closed:
            raise RuntimeError("Connection closed by peer")


class MemoryGroup:
    """One rank's process group.

    Args:
        before: called with the member's number before each message.
    """

    def __init__(self, mesh: Mesh, members: Sequence[int], rank: int, before: Callable[[int], None]) -> None:
        self.mesh, self.member, self._rank, self._size, self._before = mesh, members[rank], rank, len(members), before
        self._sent, self._received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self._lock, self._seconds = threading.Lock(), 60.0

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Sent:
        self._before(self.member)
        with self._lock:
            number = self._sent[to, tag]
            self._sent[to, tag] += 1
        self.mesh.put((self._rank, to, tag, number), tensors[0].clone())
        return Sent()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Receiving:
        self._before(self.member)
        with self._lock:
            number = self._received[source, tag]
            self._received[source, tag] += 1
        return Receiving(self.mesh, (source, self._rank, tag, number), tensors[0], self._seconds)


class Sent:
    """A message on its way."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Receiving:
    """A posted receive. As with Gloo it is completed once somebody has waited for it."""

    def __init__(self, mesh: Mesh, key: Key, into: Tensor, seconds: float) -> None:
        self._mesh, self._key, self._into, self._seconds = mesh, key, into, seconds
        self._done: bool | None = None

    def is_completed(self) -> bool:
        return self._done is not None

    def is_success(self) -> bool:
        return bool(self._done)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._done is None:
            try:
                seconds = self._seconds if timeout is None else timeout.total_seconds()
                message = self._mesh.take(self._key, seconds)
            except RuntimeError:
                self._done = False
                raise
            self._into.view(-1)[: message.numel()].copy_(message.view(-1))
            self._done = True
        return True


class MemoryMeshes:
    """Stands in for Gloo in `Group`.

    Args:
        before: called with the member's number before each message.
    """

    def __init__(self, before: Callable[[int], None]) -> None:
        self._before, self._lock = before, threading.Lock()
        self._meshes: weakref.WeakValueDictionary[tuple[int, ...], Mesh] = weakref.WeakValueDictionary()

    def over_store(self, store: dist.Store, members: Sequence[int], rank: int, timeout: timedelta) -> Group:
        """In the place of `Group.over_store`: ranks meet in the store as Gloo's do."""
        key = (store._number, *members)  # type: ignore[attr-defined]
        with self._lock:
            mesh = self._meshes.get(key) or Mesh()
            self._meshes[key] = mesh
        store.set(f"address of {rank}", "memory")
        store.wait([f"address of {other}" for other in range(len(members))], timeout)
        return Group(MemoryGroup(mesh, members, rank, self._before), tuple(members))

    @staticmethod
    def cut(group: Group) -> None:
        """In the place of `Group.cut`."""
        group._group.mesh.close(group.rank)
