"""An event that a signal's handler may wait for, whatever wait it has interrupted."""

from __future__ import annotations

import threading
from collections import deque


class Completion:
    """An event without a lock. `threading.Event` has one: if a handler interrupts a thread that holds it, the thread
    that sets the event blocks, and a handler that waits for that thread blocks with it."""

    def __init__(self) -> None:
        self._done = False
        self._waiting: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        return self._done

    def set(self) -> None:
        """Wake all that wait. Called by one thread, once or again."""
        self._done = True
        while self._waiting:
            self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`; False if it does not come within `timeout` seconds."""
        if self._done:
            return True
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        return self._done or mine.acquire(timeout=-1 if timeout is None else timeout)
