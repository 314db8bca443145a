"""Messages that wait for the link, so that a more urgent one need not wait for those before it."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from .sockets import Sent

#: Starts a message, and returns its work.
Send = Callable[[], Any]


class SendQueue:
    """Sends one after the other what is started in a turn, the highest priority first, from a thread of its own: what
    has been given to Gloo is sent in that order, so everything else waits here. It gives the next one to Gloo when the
    kernel has taken the last. Outside of turns nothing waits.

    Only first messages of a bucket may have a turn, and only those whose receives are posted ahead. Their receivers do
    not need other messages of the step to receive them, so the first in the queue cannot wait for one behind it.

    Attributes:
        ordered: if False, nobody asks for a turn.
    """

    def __init__(self) -> None:
        self.ordered = False
        self._waiting: queue.PriorityQueue[tuple[float, int, list[tuple[Send, Sent]]]] = queue.PriorityQueue()
        self._number = count()
        self._turn = _Turn()

    def put(self, item: None) -> None:
        """End `run` when the queue is empty."""
        self._waiting.put((math.inf, next(self._number), []))

    @contextlib.contextmanager
    def turn(self, priority: int | None) -> Iterator[_Turn]:
        """What this thread starts meanwhile waits in the queue, if this is not None; the result tells whether anything
        does."""
        turn = self._turn
        turn.priority, turn.used = priority, False
        try:
            yield turn
        finally:
            turn.priority = None

    def send(self, sends: Sequence[Send]) -> list[Any]:
        """Start messages that leave together: works to wait for, by one thread each."""
        turn = self._turn
        if turn.priority is None or not sends:  # none at all would end `run`
            return [send() for send in sends]
        turn.used = True
        sent = [(send, Sent()) for send in sends]
        self._waiting.put((-turn.priority, next(self._number), sent))
        return [done for _, done in sent]

    def run(self) -> None:
        """Send what waits."""
        while together := self._waiting.get()[2]:
            works = [(_started(send, done), done) for send, done in together]
            for work, done in works:
                if work is not None:
                    _await(work, done)


class _Turn(threading.local):
    """Of the thread that asks."""

    priority: int | None = None
    used = False


def _started(send: Send, done: Sent) -> Any:
    try:
        return send()
    except Exception as error:
        done.fail(str(error))
        return None


def _await(work: Any, done: Sent) -> None:
    try:
        work.wait()
        done.gone.set()
    except Exception as error:
        done.fail(str(error))
