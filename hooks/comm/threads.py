"""Threads that end before the interpreter does, as a thread that is inside torch then aborts the process."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from ..timeouts import STOP_SECONDS
from .group import abort_all
from .linger import linger
from .untraced import untraced


class Inbox(Protocol):
    """A queue, or anything else that tells a thread to end when it is given None."""

    def put(self, item: None, /) -> None: ...


#: Running threads, and the inbox in which None ends them; threads without one are ended by another thread.
_threads: weakref.WeakKeyDictionary[threading.Thread, Inbox | None] = weakref.WeakKeyDictionary()


def start_thread(
    name: str, target: Callable[[], None], inbox: Inbox | None, owner: object | None = None
) -> threading.Thread:
    """Start a daemon thread. None is put in its inbox when its owner is collected, or the interpreter ends."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    _threads[thread] = inbox
    if owner is not None and inbox is not None:
        # A collector may run in compiled code. At exit `_stop_all` sees to it.
        weakref.finalize(owner, untraced(stop_thread), inbox, thread).atexit = False
    return thread


def stop_thread(inbox: Inbox, thread: threading.Thread) -> None:
    """End a thread and wait for it, without an import of Dynamo, as signal handlers call this."""
    inbox.put(None)
    if threading.current_thread() not in _threads:  # a job on one of our threads may hold the last reference
        thread.join(STOP_SECONDS)


@atexit.register
def _stop_all() -> None:
    """End all threads.

    A pipeline's threads may outlive it: nobody waits for them if the last job held the last reference to it. A task may
    also wait for a rank that does not come, after an error on either side. Last, sent data gets time to arrive: the
    process may end within a step, and its network with it, as in a container.
    """
    told = set[threading.Thread]()
    for seconds in (STOP_SECONDS, 1.0):
        deadline = time.monotonic() + seconds
        while (running := _running()) and time.monotonic() < deadline:
            for thread in running - told:  # the others may start some until they have ended
                inbox = _threads.get(thread)
                if inbox is not None:
                    inbox.put(None)
            told |= running
            for thread in running:
                thread.join(max(0.0, deadline - time.monotonic()))
        if running:
            abort_all()
    linger()


def _running() -> set[threading.Thread]:
    threads = [reference() for reference in _threads.keyrefs()]
    return {thread for thread in threads if thread is not None and thread.is_alive()}
