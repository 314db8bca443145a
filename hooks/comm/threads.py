"""What must have ended before the interpreter does: a thread that is inside torch then aborts the process."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .group import cut_all

#: The threads that run, and what tells them to end, None in a queue; without one another thread does. None is held
#: longer than it runs.
_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any] | None] = weakref.WeakKeyDictionary()

#: Collectives whose end calls into Python from a thread of the backend's.
_called_back: set[object] = set()

#: How long to wait for a thread that ends: a message that never comes must not keep the process.
STOP_SECONDS = 10.0


def start_thread(
    name: str, target: Callable[[], None], inbox: queue.SimpleQueue[Any] | None, owner: object | None = None
) -> None:
    """Start a daemon that None in its inbox ends: when its owner is collected, or the interpreter ends."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    _threads[thread] = inbox
    if owner is not None and inbox is not None:
        weakref.finalize(owner, _stop, inbox, thread).atexit = False  # `_stop_all` sees to it


def outcome(work: Any) -> torch.futures.Future[Tensor]:
    """What an all-reduce of one tensor gives, as a future that Python has seen, as DDP wants it."""
    token = object()
    _called_back.add(token)

    def first(future: torch.futures.Future[Any]) -> Tensor:
        try:
            tensor: Tensor = future.value()[0]
            return tensor
        finally:
            _called_back.discard(token)

    found: torch.futures.Future[Tensor] = work.get_future().then(first)
    return found


def _stop(inbox: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    inbox.put(None)
    if thread is not threading.current_thread():  # the last job may hold the last reference
        thread.join(STOP_SECONDS)


@atexit.register
def _stop_all() -> None:
    """Let all threads end.

    A pipeline may be gone by now and its threads not: where the last job holds the last reference, nobody has waited.
    And a unit may wait for a rank that does not come, as the main thread has raised something, here or there; or a
    collective of a step in which all is dense.
    """
    threads = list(_threads.items())
    for _, inbox in threads:
        if inbox is not None:
            inbox.put(None)
    for seconds in (STOP_SECONDS, 1.0):
        deadline = time.monotonic() + seconds
        for thread, _ in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        while _called_back and time.monotonic() < deadline:
            time.sleep(0.001)
        if _called_back or any(thread.is_alive() for thread, _ in threads):
            cut_all()
