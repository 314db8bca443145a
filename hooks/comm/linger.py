"""Waits for sent data to arrive before connections close in the middle of a step.

If one side closes a TCP connection on which both have written, the kernel may reset it, and a reset drops data in
flight. Gloo does not wake a receive that has got a part of its message by then. So a rank that leaves in the middle of
a step, after an error, first waits until all that it has written is acknowledged; the others then get an error for the
messages that it has not sent.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import termios
import threading
import time

from ..timeouts import LINGER_SECONDS

#: Seconds between polls.
LOOK_SECONDS = 0.01


def unacknowledged() -> int:
    """Bytes written to this process's TCP sockets that the other ends have not acknowledged."""
    total, count = 0, array.array("i", [0])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, no socket, or one that listens
            borrowed = socket.socket(fileno=int(name))
            try:
                if borrowed.family in (socket.AF_INET, socket.AF_INET6):
                    fcntl.ioctl(borrowed, termios.TIOCOUTQ, count)
                    total += count[0]
            finally:
                borrowed.detach()
    return total


def linger(seconds: float = LINGER_SECONDS) -> None:
    """Wait until all sent bytes are acknowledged, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while unacknowledged() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def linger_with(*connections: object) -> None:
    """Hold these objects in a thread while it lingers."""
    threading.Thread(target=_hold, args=connections, name="gradwire-linger", daemon=True).start()


def _hold(*connections: object) -> None:
    linger()
