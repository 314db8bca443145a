"""Time for what has been sent to arrive, before connections close with a step unfinished.

Where both sides of a TCP connection have written when one closes it, the kernel may reset it, and a reset drops what is
still in flight. Gloo does not wake a receive that had taken in a part of its message by then. So a rank that leaves in
the middle of a step, since something has raised, sees to it first that all it has written has been acknowledged; the
others then get an error in place of what it has not sent.
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

#: For how long, and how often to look, in seconds.
LINGER_SECONDS, LOOK_SECONDS = 5.0, 0.01


def unacknowledged() -> int:
    """Bytes that this process's TCP sockets have been given and the other ends have not acknowledged."""
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
    """Wait until all that has been sent has been acknowledged, or so long."""
    deadline = time.monotonic() + seconds
    while unacknowledged() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def linger_with(*connections: object) -> None:
    """Hold these meanwhile, in a thread."""
    threading.Thread(target=_hold, args=connections, name="gradwire-linger", daemon=True).start()


def _hold(*connections: object) -> None:
    linger()
