"""The meeting point's process: connections of replicas, on one thread, around `Membership`, which decides."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...comm.socket_loop import SocketLoop
from ...comm.sockets import GREETING_SECONDS, Connection, listen
from ...comm.threads import start_thread, stop_thread
from ...timeouts import DEAD_SECONDS
from .decisions import Membership

log = logging.getLogger("gradwire.meeting")

#: The longest message of a replica, and as much as may wait for one that does not read, in bytes.
LONGEST_MESSAGE, LONGEST_BACKLOG = 1 << 24, 1 << 26
#: Seconds that a replica gets to read why it was refused.
FAREWELL_SECONDS = 1.0


class MeetingPoint:
    """A meeting point in a thread of this process.

    Args:
        port: to listen at, on all interfaces; 0: a free one.
        secret: that replicas must know. The empty one keeps nobody out.
        dead_after: seconds of silence after which a replica is lost.
        report: takes a line for each decision.

    Attributes:
        port: at which it listens.
    """

    def __init__(
        self,
        port: int = 0,
        secret: str = "",
        dead_after: float = DEAD_SECONDS,
        report: Callable[[str], None] = log.info,
    ) -> None:
        listener = listen(128, port)
        self.port = int(listener.getsockname()[1])
        self._loop = SocketLoop(listener, secret, LONGEST_MESSAGE)
        self._membership = Membership(time.monotonic(), dead_after)
        self._report = report
        self._leaving: dict[Connection, float] = {}
        self._thread = start_thread("gradwire-meet", self._run, self._loop)

    @property
    def address(self) -> str:
        """Host and port for the processes of this machine."""
        return f"127.0.0.1:{self.port}"

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def close(self) -> None:
        """End it. Replicas go on, and look for another one at its address."""
        stop_thread(self._loop, self._thread)

    def __enter__(self) -> MeetingPoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._loop.ending:
                now = time.monotonic()
                due = self._membership.deadline(now)
                for connection in self._loop.poll(1.0 if due is None else min(1.0, due - now)):
                    if connection is not None:
                        self._read(connection)
                # After all that has come, as this process may have been stopped for longer than `dead_after`.
                self._membership.tick(time.monotonic())
                self._send()
                self._drop_the_silent()
        finally:
            self._loop.close()

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection.messages():
                if connection not in self._leaving:
                    self._membership.said(connection, message, time.monotonic())
        except (OSError, ValueError) as error:
            self._drop(connection, str(error))

    def _drop(self, connection: Connection, why: str) -> None:
        self._loop.drop(connection)
        self._leaving.pop(connection, None)
        self._membership.closed(connection, time.monotonic(), why)

    def _send(self) -> None:
        outbox: list[tuple[Any, dict[str, Any] | None]] = self._membership.outbox
        while outbox:
            connection, message = outbox.pop(0)
            if connection not in self._loop.connections or connection in self._leaving:
                continue
            if message is None:
                self._leaving[connection] = time.monotonic() + FAREWELL_SECONDS
                continue
            self._loop.send(connection, message)
            if connection.backlog > LONGEST_BACKLOG:
                self._drop(connection, "it does not read")
        for line in self._membership.news:
            self._report(" ".join(line.split()))
        self._membership.news.clear()

    def _drop_the_silent(self) -> None:
        """Drop whoever has been told to go, or knows the secret and does not join."""
        now = time.monotonic()
        for connection in list(self._loop.connections):
            joined = not connection.trusted or self._membership.knows(connection)
            until = self._leaving.get(connection, now if joined else connection.born + 2 * GREETING_SECONDS)
            if now > until:
                self._drop(connection, "it has not joined")


def command() -> argparse.ArgumentParser:
    """The command `gradwire-meet`."""
    parser = argparse.ArgumentParser(
        "gradwire-meet", description="Decide which replicas train together. They ask only when one joins or dies."
    )
    parser.add_argument("--port", type=int, default=29400, help="to listen at, on all interfaces (29400)")
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="holds what replicas must know; else GRADWIRE_MEETING_SECRET",
    )
    parser.add_argument(
        "--dead-after",
        type=float,
        default=DEAD_SECONDS,
        metavar="SECONDS",
        help="of silence, after which a replica is lost (4)",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="append each decision to it too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = command()
    options = parser.parse_args(arguments)
    if options.dead_after < 2:
        parser.error(f"--dead-after {options.dead_after:g}: at least 2, as replicas speak once a second")
    secret = os.environ.get("GRADWIRE_MEETING_SECRET", "")

    def report(line: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}"
        print(line, flush=True)
        if options.log is not None:
            with options.log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    try:
        if options.secret_file is not None:
            secret = options.secret_file.read_text("utf-8").strip()
        point = MeetingPoint(options.port, secret, options.dead_after, report)
    except (OSError, ValueError, OverflowError) as error:
        parser.error(f"cannot listen at port {options.port} with this secret: {error}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: point.close())
    known = "with a secret" if secret else "without a secret: whoever reaches it can join"
    report(f"listens at port {point.port}, {known}")
    point.join()
    return 0
