"""Messages in a queue leave by priority, and those outside of turns at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from gradwire.hooks.comm.send_queue import SendQueue
from hypothesis import given
from hypothesis import strategies as st


class Message:
    """Notes when it is started, and is there once it is let go."""

    def __init__(self, name: Any, started: list[Any]) -> None:
        self.name, self._started, self.free = name, started, threading.Event()
        self.error: Exception | None = None

    def start(self) -> Message:
        self._started.append(self.name)
        return self

    def wait(self) -> None:
        assert self.free.wait(10)
        if self.error is not None:
            raise self.error


def running(queue: SendQueue) -> threading.Thread:
    thread = threading.Thread(target=queue.run, daemon=True)
    thread.start()
    return thread


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=12))
def test_the_most_urgent_leaves_first_and_equal_ones_in_turn(groups: list[tuple[int, int]]) -> None:
    queue, started = SendQueue(), list[Any]()
    works = []
    for place, (priority, peers) in enumerate(groups):
        messages = [Message((priority, place, peer), started) for peer in range(peers)]
        for message in messages:
            message.free.set()
        with queue.turn(priority) as turn:
            works += queue.send([message.start for message in messages])
        assert turn.used
    thread = running(queue)
    for work in works:
        work.wait()
    queue.put(None)
    thread.join(10)
    assert not thread.is_alive()
    assert started == sorted(started, key=lambda name: (-name[0], name[1], name[2]))


def test_the_next_one_waits_for_the_last() -> None:
    queue, started = SendQueue(), list[Any]()
    first, low, high = (Message(name, started) for name in ("first", "low", "high"))
    begun = threading.Event()

    def start() -> Message:
        begun.set()
        return first.start()

    thread = running(queue)
    works = []
    starts: list[tuple[int, Callable[[], Message]]] = [(0, start), (1, low.start), (2, high.start)]
    for priority, call in starts:
        with queue.turn(priority):
            works += queue.send([call])
        assert begun.wait(10)
    assert started == ["first"]
    assert not works[0].is_completed()
    for message in (first, low, high):
        message.free.set()
    for work in works:
        work.wait()
    assert started == ["first", "high", "low"]
    queue.put(None)
    thread.join(10)


def test_outside_of_a_turn_nothing_waits() -> None:
    queue, started = SendQueue(), list[Any]()
    message = Message("now", started)
    with queue.turn(None) as turn:
        assert queue.send([message.start]) == [message]
    assert not turn.used
    with queue.turn(1):
        other = threading.Thread(target=lambda: queue.send([Message("other thread", started).start]))
        other.start()
        other.join()
    assert started == ["now", "other thread"]


def test_a_message_for_nobody_does_not_end_the_queue() -> None:
    queue, started = SendQueue(), list[Any]()
    message = Message("for somebody", started)
    message.free.set()
    with queue.turn(1):
        assert queue.send([]) == []
        (work,) = queue.send([message.start])
    thread = running(queue)
    work.wait()
    queue.put(None)
    thread.join(10)
    assert started == ["for somebody"]


@pytest.mark.parametrize("when", ["start", "wait"])
def test_a_message_that_fails_tells_who_waits_for_it(when: str) -> None:
    queue, started = SendQueue(), list[Any]()
    bad, good = Message("bad", started), Message("good", started)
    bad.free.set()
    good.free.set()
    bad.error = RuntimeError("the peer is gone")

    def fails() -> Message:
        raise RuntimeError("the peer is gone")

    with queue.turn(0):
        works = queue.send([fails if when == "start" else bad.start, good.start])
    thread = running(queue)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        works[0].wait()
    works[1].wait()
    queue.put(None)
    thread.join(10)
