"""What is under way between ranks, and what starts it time after time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """Something under way, as `dist.Work` is."""

    def wait(self) -> Any: ...


class Sends(Protocol):
    """What messages need of a group: see `Group`."""

    rank: int

    @property
    def named(self) -> bool: ...

    def naming(self, peer: int) -> contextlib.AbstractContextManager[None]: ...

    def _pairwise(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work: ...

    def _receive(self, received: Sequence[Tensor]) -> list[tuple[int, dist.Work]]: ...

    def _send(self, received: Sequence[Tensor], sent: Sequence[Tensor], works: list[tuple[int, dist.Work]]) -> Work: ...


class Messages:
    """Messages between this rank and the others: under way together, and waited for together.

    Where all ranks send and receive at once, each link carries both ways at its full rate; Gloo's own all-to-all and
    all-gather reach that on no more than every other call, and else take up to twice as long.
    """

    def __init__(self, works: Iterable[tuple[int, dist.Work]], group: Sends, timeout: timedelta | None) -> None:
        self._works, self._group, self._timeout = list(works), group, timeout

    def wait(self) -> None:
        works, self._works = self._works, []
        for peer, work in works:
            with self._group.naming(peer):
                work.wait() if self._timeout is None else work.wait(self._timeout)


class Together:
    """Several things under way, waited for as one."""

    def __init__(self, works: Iterable[Work]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Port:
    """Messages between all ranks whose sizes never change, time after time: one stage of an exchange.

    Gloo lets a message go only once its receiver has announced itself. `post` does so ahead, so that the message takes
    one latency and not two: twice ahead, as what is announced at the end of a step that is shorter than a latency comes
    too late for the next one.

    Args:
        group: a channel, or else messages are received only when they are sent.
        received, sent: of each rank and for each rank; what is empty goes nowhere. What arrives is there once it has
            been waited for.
        ahead: how many times to announce ahead. With one, messages arrive in `received` itself, between `post` and the
            end of waiting; else in memory of their own.
    """

    def __init__(self, group: Sends, received: Sequence[Tensor], sent: Sequence[Tensor], ahead: int = 2) -> None:
        self._group, self._received, self._sent = group, received, sent
        apart = ahead > 1 and group.named
        self._free: list[Sequence[Tensor]]
        self._free = [[torch.empty_like(part) for part in received] if apart else received for _ in range(ahead)]
        self._posted: deque[tuple[Sequence[Tensor], list[tuple[int, dist.Work]]]] = deque()

    def post(self) -> None:
        """Announce the next messages. With one ahead, nothing may read what the last ones brought any more."""
        with contextlib.suppress(RuntimeError):  # a rank that has gone, maybe as all is done; `start` would say so
            while self._group.named and self._free:
                self._post()

    def _post(self) -> None:
        self._posted.append((self._free[-1], self._group._receive(self._free[-1])))
        self._free.pop()

    def start(self) -> Work:
        """Send; the messages of the other ranks, of as many starts, arrive meanwhile. Wait for them before the next."""
        if not self._group.named:
            return self._group._pairwise(self._received, self._sent)
        if not self._posted:
            self._post()
        place, works = self._posted.popleft()
        return _Arriving(self, place, self._group._send(self._received, self._sent, works))

    def arrived(self, place: Sequence[Tensor]) -> None:
        """Messages have arrived at a place, and are moved to where they are wanted."""
        if place is not self._received:
            for source, (part, target) in enumerate(zip(place, self._received, strict=True)):
                if source != self._group.rank:
                    target.copy_(part)
        self._free.append(place)


class _Arriving:
    """Messages that a port receives."""

    def __init__(self, port: Port, place: Sequence[Tensor], messages: Work) -> None:
        self._port, self._messages = port, messages
        self._place: Sequence[Tensor] | None = place

    def wait(self) -> None:
        self._messages.wait()
        place, self._place = self._place, None
        if place is not None:
            self._port.arrived(place)


class Collective:
    """What a `Port` is, of a collective that needs no announcing."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self.start = start

    def post(self) -> None:
        """Nothing."""


class Padded:
    """An all-gather of rows of which only the beginnings count.

    Args:
        work: it, of `row`, into `rows`.
        parts: where the beginnings are wanted.
    """

    def __init__(self, work: Work, row: Tensor, rows: Tensor, parts: Sequence[Tensor]) -> None:
        self._work, self._row, self._rows, self._parts = work, row, rows, parts

    def wait(self) -> None:
        """The current stream waits, and copies what counts to where it is wanted."""
        self._work.wait()
        # That may be another stream than the one that they were made on, which would use their memory again too early.
        for memory in (self._row, self._rows):
            memory.record_stream(torch.cuda.current_stream(memory.device))
        used = [(part, row) for part, row in zip(self._parts, self._rows, strict=True) if part.numel()]
        torch._foreach_copy_([part for part, _ in used], [row[: part.numel()] for part, row in used])
