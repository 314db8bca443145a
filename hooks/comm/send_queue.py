"""Messages that wait for the link, so that a more urgent one need not wait for those before it."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import Any

#: Starts a message, and returns its work.
Send = Callable[[], Any]


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


class SendQueue:
    """Sends one message after the other, the highest priority first, from a thread of its own. Gloo sends in the order
    in which it is given messages, so all but one wait here: it gets the next when the kernel has taken the last.

    Only first messages of a bucket may wait, and only those whose receives are posted ahead. Their receivers do not
    need other messages of the step to receive them, so the first in the queue cannot wait for one behind it.

    Attributes:
        ordered: somebody runs `run`, and calls `in_turn`.
    """

    def __init__(self) -> None:
        self.ordered = False
        self._waiting: queue.PriorityQueue[tuple[float, int, list[tuple[Send, Sent]]]] = queue.PriorityQueue()
        self._number = count()
        self._turn = _Turn()

    def put(self, item: None) -> None:
        """End `run` when the queue is empty."""
        self._waiting.put((math.inf, next(self._number), []))

    def in_turn(self, priority: int, stages: Generator[Any, None, Any]) -> Generator[Any, None, None]:
        """The same stages, the messages of the first of which wait in the queue."""
        turn = self._turn
        turn.priority, turn.used = priority, False
        try:
            work = next(stages, None)
        finally:
            turn.priority = None
        if work is not None:
            try:
                yield Overtaking(work) if turn.used else work
            except BaseException as error:
                stages.throw(error)
            yield from stages

    def send(self, sends: Sequence[Send]) -> list[Any]:
        """Start messages that leave together, at once or, in a turn of this thread, from the queue; returns works, each
        for one thread to wait for."""
        turn = self._turn
        if turn.priority is None or not sends:  # none at all would end `run`
            return [send() for send in sends]
        turn.used = True
        sent = [(send, Sent()) for send in sends]
        self._waiting.put((-turn.priority, next(self._number), sent))
        return [done for _, done in sent]

    def run(self) -> None:
        """Send the messages in the queue, until `put`."""
        while together := self._waiting.get()[2]:
            works = [(_started(send, done), done) for send, done in together]
            for work, done in works:
                if work is not None:
                    _await(work, done)


class Overtaking:
    """Messages that may arrive before others that were started earlier."""

    def __init__(self, messages: Any) -> None:
        self.wait = messages.wait


class _Turn(threading.local):
    """The turn of the thread that asks."""

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
