"""The meeting point and its clients over real sockets, on loopback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from gradwire.hooks.comm.sockets import connect
from gradwire.hooks.local_sgd.meeting import server
from gradwire.hooks.local_sgd.meeting.client import (
    Client,
    Event,
    Lost,
    Proposed,
    Refused,
    Void,
    Welcome,
    Whole,
)
from gradwire.hooks.local_sgd.meeting.options import Meeting
from gradwire.hooks.local_sgd.meeting.server import MeetingPoint
from loopback import every_loopback

SECONDS = 10.0
E = TypeVar("E", bound=Event)


class Member:
    """A client that keeps its events, and connects to nobody: it says at once that a proposal stands."""

    def __init__(
        self, address: str, *, secret: str = "", answers: bool = True, patience: float = 600.0, **options: Any
    ):
        self.events: list[Event] = []
        self.there = threading.Condition()
        self.answers = answers
        self.ready = threading.Event()
        description = {"min_replicas": 1, "wait_for": 1, "codec": "onebit"} | options
        self.client = Client(address, description, secret=secret, patience=patience, events=self.hear)
        self.ready.set()

    def hear(self, event: Event) -> None:
        self.ready.wait()
        with self.there:
            self.events.append(event)
            if isinstance(event, Proposed):
                self.members = event.members
                if self.answers:
                    self.client.connected(event.number)
            if isinstance(event, Whole):
                self.client.entered(event.number, self.members, (event.number, 0))
            self.there.notify_all()

    def wait(self, kind: type[E], check: Callable[[E], bool] = lambda event: True, after: int = 0) -> E:
        """The last event of a kind, once there is one that passes."""

        def found() -> list[E]:
            return [event for event in self.events[after:] if isinstance(event, kind) and check(event)]

        with self.there:
            assert self.there.wait_for(found, SECONDS), (kind, self.events)
            return found()[-1]

    def in_view_of(self, count: int, after: int = 0) -> int:
        """The number of a whole view of so many members."""
        proposed = self.wait(Proposed, lambda event: len(event.members) == count, after)
        return self.wait(Whole, lambda event: event.number >= proposed.number).number


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def group(count: int, dead_after: float = 0.5, secret: str = "") -> Iterator[tuple[MeetingPoint, list[Member]]]:
    """A meeting point that is past its start, and members in one view."""
    members: list[Member] = []
    with MeetingPoint(secret=secret, dead_after=dead_after) as point:
        point._membership.dead_after = 4.0  # the start is over soon, and members beat once a second
        try:
            members += [Member(point.address, secret=secret, wait_for=count) for _ in range(count)]
            for member in members:
                member.in_view_of(count)
            yield point, members
        finally:
            for member in members:
                member.client.leave()


@every_loopback
def test_a_member_comes_by_ipv4_or_ipv6(host: str) -> None:
    said: list[str] = []
    named = f"[{host}]" if ":" in host else host
    with MeetingPoint(report=said.append, dead_after=0.5) as point:
        point._membership.dead_after = 4.0  # as in `group`
        member = Member(f"{named}:{point.port}")
        member.in_view_of(1)
        member.client.leave()
    assert any(re.fullmatch(rf"member 0 has joined, from {re.escape(named)}:\d+", line) for line in said), said


def test_members_meet_lose_each_other_and_leave() -> None:
    with group(3) as (point, members):
        assert sorted(member.wait(Welcome).member for member in members) == [0, 1, 2]
        first, second, third = members
        number = first.in_view_of(3)
        assert first.members == tuple(sorted(first.members))
        start = time.monotonic()
        connection = third.client._connection
        assert connection is not None
        connection.end.shutdown(socket.SHUT_RDWR)  # as if it had died
        third.client._loop.put(None)
        for member in (first, second):
            assert (
                f"member {third.client.member} is lost" in member.wait(Void, lambda event: event.number == number).why
            )
            member.in_view_of(2)
        assert time.monotonic() - start < 2
        newcomer = Member(point.address, wait_for=3)
        members.append(newcomer)
        number = newcomer.in_view_of(3)
        first.wait(Whole, lambda event: event.number == number)
        assert newcomer.client.member == 3
        seen = len(first.events)
        newcomer.client.leave()
        assert "has left" in first.wait(Void, after=seen).why
        first.in_view_of(2, after=seen)
        with pytest.raises(RuntimeError, match="void"):
            newcomer.client.board(number)


def test_rounds_outlive_the_meeting_point_and_nothing_changes_when_it_is_back() -> None:
    with group(2) as (point, members):
        numbers = [member.in_view_of(2) for member in members]
        seen = [len(member.events) for member in members]
        point.close()
        until(lambda: all(member.client.lost_for > 0 for member in members))
        with MeetingPoint(point.port) as again:
            until(lambda: all(member.client.lost_for == 0 for member in members))
            newcomer = Member(again.address, wait_for=2)
            members.append(newcomer)
            newcomer.in_view_of(3)
            assert newcomer.client.member > 1
            for member, number, before in zip(members, numbers, seen, strict=False):
                assert member.in_view_of(3, after=before) > number
                assert not [event for event in member.events[before:] if isinstance(event, Void)]
            assert members[0].client.lost_for == 0
            for member in members:
                member.client.leave()


def test_a_view_that_failed_while_the_meeting_point_was_down_is_void_when_it_is_back() -> None:
    with group(2) as (point, members):
        number = members[0].in_view_of(2)
        point.close()
        until(lambda: members[0].client.lost_for > 0)
        members[0].client.failed(number, "a message did not come")
        seen = [len(member.events) for member in members]
        with MeetingPoint(point.port):
            for member, before in zip(members, seen, strict=True):
                member.wait(Void, lambda event: event.number == number)
                assert member.in_view_of(2, after=before) > number
            for member in members:
                member.client.leave()


def test_a_proposal_is_void_as_soon_as_the_meeting_point_is_gone() -> None:
    with MeetingPoint(dead_after=0.1) as point:
        point._membership.dead_after = 4.0
        member = Member(point.address, answers=False, patience=0.2)
        number = member.wait(Proposed).number
        board = member.client.board(number)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(board.get, "never")
            point.close()
            with pytest.raises(RuntimeError, match="out of reach"):
                waiting.result(SECONDS)
    assert "out of reach" in member.wait(Void).why
    assert member.wait(Lost).seconds > 0.2
    with pytest.raises(RuntimeError, match="out of reach"):
        board.set("a", b"b")
    member.client.leave()


@pytest.mark.parametrize("wrong", ["", "other"])
def test_another_secret_is_refused(wrong: str) -> None:
    with group(1, secret="key") as (point, _):
        member = Member(point.address, secret=wrong)
        assert "GRADWIRE_MEETING_SECRET" in member.wait(Refused).why
        member.client._thread.join(SECONDS)
        assert not member.client._thread.is_alive()


def framed(text: bytes) -> bytes:
    return struct.pack("!I", len(text)) + text


def test_rubbish_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither from strangers nor from those who know the secret; who says nothing is dropped."""
    monkeypatch.setattr(server, "GREETING_SECONDS", 0.05)
    with group(2, secret="key") as (point, members):
        number, ends = members[0].in_view_of(2), []
        for rubbish in (
            b"",
            b"GET / HTTP/1.0\r\n\r\n" * 100,
            framed(b"{}"),
            framed(b"[" * 100),
            b"\xff" * 12,
            framed(b"x")[:9],
        ):
            ends.append(socket.create_connection(("127.0.0.1", point.port)))
            ends[-1].sendall(rubbish)
        friends = [connect("127.0.0.1", point.port, "key", SECONDS) for _ in range(5)]
        said: tuple[dict[str, Any], ...] = ({}, {"join": 1}, {"join": {}, "view": "x"}, {"post": 1})
        for friend, message in zip(friends[1:], said, strict=True):
            friend.send(message)
        for friend in friends:
            with pytest.raises(OSError):
                friend.receive()
            friend.close()
        assert point._thread.is_alive()
        newcomer = Member(point.address, secret="key", wait_for=2)
        members.append(newcomer)
        assert newcomer.in_view_of(3) > number
        assert not [event for event in members[0].events if isinstance(event, Void)]
        for end in ends:
            end.close()


def test_a_member_that_does_not_read_stalls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost once too much waits for it; the others hear everything meanwhile."""
    monkeypatch.setattr(server, "LONGEST_BACKLOG", 1 << 20)
    with group(2) as (point, members):
        deaf = connect("127.0.0.1", point.port, "", SECONDS)
        description = {"min_replicas": 1, "wait_for": 2, "codec": "onebit"}
        state = {"member": None, "view": 0, "members": [], "seen": 0, "next": 0, "name": [0, 0], "token": "deaf"}
        deaf.send({"join": description, **state})
        while "view" not in (message := deaf.receive()):
            pass
        deaf.send({"connected": message["view"]})
        number = members[0].in_view_of(3)
        boards = [member.client.board(number) for member in members]
        with contextlib.suppress(RuntimeError):  # void, once the deaf one is lost
            for i in range(200):
                boards[0].post(str(i), b"x" * 50_000)
                boards[1].wait([str(i)])
        assert "does not read" in members[0].wait(Void, lambda event: event.number == number).why
        members[1].in_view_of(2)
        deaf.close()


def gloo(member: Member, number: int) -> torch.Tensor:
    """A group over a view's board, and a message around its ring."""
    board = member.client.board(number)
    rank, size = member.members.index(member.client.member), len(member.members)
    mesh: Any = dist.ProcessGroupGloo(board, rank, size, timedelta(seconds=SECONDS))
    got = torch.zeros(3)
    work = mesh.recv([got], (rank - 1) % size, 7)
    mesh.send([torch.full((3,), float(rank))], (rank + 1) % size, 7).wait()
    work.wait()
    return got


def test_a_board_is_a_store_to_connect_by() -> None:
    with group(3) as (_, members):
        number = members[0].in_view_of(3)
        with ThreadPoolExecutor(3) as pool:
            got = list(pool.map(lambda member: gloo(member, number), members))
        assert sorted(float(tensor[0]) for tensor in got) == [0, 1, 2]


def test_boards_tell_all_members_and_a_void_view_interrupts() -> None:
    with group(3) as (_, members):
        number = members[0].in_view_of(3)
        boards = [member.client.board(number) for member in members]
        boards[0].multi_set(["a", "b"], [b"\x00\xff", "text"])
        for board in boards:
            assert board.multi_get(["a", "b"]) == [b"\x00\xff", b"text"]
            assert board.check(["a"])
            assert not board.check(["a", "c"])
            assert board.wait_for(lambda board=board: board.values.get("b"), 1) == b"text"  # type: ignore[misc]
        with pytest.raises(RuntimeError, match=r"not all was said within 0\.01 s"):
            boards[1].wait(["c"], timedelta(seconds=0.01))
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(board.get, "c") for board in boards[:2]]
            members[2].client.leave()
            for future in waiting:
                with pytest.raises(RuntimeError, match="has left"):
                    future.result(SECONDS)


def test_a_member_that_is_cut_off_comes_back_with_its_number() -> None:
    with group(2) as (_, members):
        number, member = members[1].in_view_of(2), members[1].client.member
        connection = members[1].client._connection
        assert connection is not None
        seen = [len(member.events) for member in members]
        connection.end.shutdown(socket.SHUT_RDWR)
        for one, before in zip(members, seen, strict=True):
            one.wait(Void, lambda event: event.number == number)
            assert one.in_view_of(2, after=before) > number
        assert members[1].client.member == member


START = """
import sys, threading
from gradwire.hooks.local_sgd.meeting.client import Client, Proposed
there = threading.Event()
def hear(event):
    if isinstance(event, Proposed):
        client.connected(event.number)
        there.set()
client = Client(sys.argv[1], {"min_replicas": 1, "wait_for": 1}, secret="key", events=hear)
there.wait()
"""


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Any) -> None:
    """And a script that ends without a goodbye does not hang."""
    (tmp_path / "secret").write_text("key\n")
    arguments = [
        "--port",
        "0",
        "--secret-file",
        str(tmp_path / "secret"),
        "--dead-after",
        "2",
        "--log",
        str(tmp_path / "log"),
    ]
    command = [sys.executable, "-m", "gradwire.meet", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        port = int(first.partition("port ")[2].partition(",")[0])
        done = subprocess.run([sys.executable, "-c", START, f"127.0.0.1:{port}"], timeout=60, check=False)
        assert done.returncode == 0
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(SECONDS) == 0
    said = "".join([first, *lines, rest])
    assert "member 0 has joined, from 127.0.0.1:" in said
    assert "view 1 of 1 replicas is in use: members [0]" in said
    assert "member 0 is lost: its connection ended" in said
    assert (tmp_path / "log").read_text() == said


def test_the_command_ends_at_once() -> None:
    """An import of Dynamo in the signal's handler would take seconds."""
    script = "import os, signal, sys, threading; from gradwire.hooks.local_sgd.meeting.server import main\n"
    script += "sys.modules['torch._dynamo'] = None\n"
    script += "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    script += "assert main(['--port', '0']) == 0"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_options_name_the_value_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_MEETING", raising=False)
    assert Meeting.of(None) is None
    assert Meeting.of("head:29400") == Meeting("head:29400")
    monkeypatch.setenv("GRADWIRE_MEETING", "[::1]:5")
    monkeypatch.setenv("GRADWIRE_MEETING_SECRET", "key")
    given = Meeting.of(None)
    assert given is not None
    assert (given.address, given.key, given.first) == ("[::1]:5", "key", 1)
    assert Meeting("a:1", min_replicas=2).first == 2


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (Meeting("head"), ValueError, "address='head': pass"),
        (Meeting("head:0"), ValueError, "head:0"),
        (Meeting("head:99999"), ValueError, "99999"),
        (Meeting(":1"), ValueError, "':1'"),
        (3, TypeError, "meeting=3: pass"),
        (Meeting("a:1", min_replicas=0), ValueError, "min_replicas=0: pass at least 1"),
        (Meeting("a:1", min_replicas=1.5), TypeError, "min_replicas=1.5"),  # type: ignore[arg-type]
        (Meeting("a:1", min_replicas=2, wait_for=1), ValueError, "wait_for=1 is less than min_replicas=2"),
        (Meeting("a:1", patience=0), ValueError, "patience=0"),
        (Meeting("a:1", patience=float("nan")), ValueError, "patience=nan"),
        (Meeting("a:1", patience="x"), TypeError, "patience='x'"),  # type: ignore[arg-type]
        (Meeting("a:1", secret=b"x"), TypeError, "secret is a bytes"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_wrong_options_are_refused(wrong: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        Meeting.of(wrong)
    assert text in str(caught.value)
