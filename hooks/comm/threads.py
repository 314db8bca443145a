"""What must have ended before the interpreter does: a thread that is inside torch then aborts the process."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from .group import abort_all
from .linger import linger
from .untraced import untraced

#: The threads that run, and what tells them to end, None in a queue; without one another thread does. None is held
#: longer than it runs.
_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any] | None] = weakref.WeakKeyDictionary()

#: How long to wait for a thread that ends: a message that never comes must not keep the process.
STOP_SECONDS = 10.0


def start_thread(
    name: str, target: Callable[[], None], inbox: queue.SimpleQueue[Any] | None, owner: object | None = None
) -> threading.Thread:
    """Start a daemon that None in its inbox ends: when its owner is collected, or the interpreter ends."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    _threads[thread] = inbox
    if owner is not None and inbox is not None:
        weakref.finalize(owner, stop_thread, inbox, thread).atexit = False  # `_stop_all` sees to it
    return thread


@untraced
def stop_thread(inbox: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    inbox.put(None)
    if threading.current_thread() not in _threads:  # what one of ours ran may hold the last reference
        thread.join(STOP_SECONDS)


@atexit.register
def _stop_all() -> None:
    """Let all threads end.

    A pipeline may be gone by now and its threads not: where the last job holds the last reference, nobody has waited.
    And a unit may wait for a rank that does not come, as the main thread has raised something, here or there. Last,
    what has been sent is let arrive: a process may end within a step, or be the last one of its network, as in a
    container.
    """
    threads = list(_threads.items())
    for _, inbox in threads:
        if inbox is not None:
            inbox.put(None)
    for seconds in (STOP_SECONDS, 1.0):
        deadline = time.monotonic() + seconds
        for thread, _ in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread, _ in threads):
            abort_all()
    linger()
