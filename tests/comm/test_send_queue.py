"""Messages in the queue leave by priority, and others at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
from gradwire.hooks.comm.ports import WaitAll
from gradwire.hooks.comm.send_queue import Overtaking, SendQueue
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


def queued(queue: SendQueue, priority: int, sends: list[Callable[[], Message]]) -> list[Any]:
    """The works of a first stage that starts these messages."""
    works: list[Any] = []

    def stages() -> Generator[Any, None, None]:
        works.extend(queue.send(sends))
        yield WaitAll(works)

    first = next(queue.in_turn(priority, stages()))
    assert isinstance(first, Overtaking) == bool(sends)
    return works


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
        works += queued(queue, priority, [message.start for message in messages])
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
        works += queued(queue, priority, [call])
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


def test_only_the_first_stage_waits_and_of_its_thread_alone() -> None:
    queue, started = SendQueue(), list[Any]()
    first, second, other = (Message(name, started) for name in ("first", "second", "other thread"))

    def stages() -> Generator[Any, None, None]:
        thread = threading.Thread(target=lambda: queue.send([other.start]))
        thread.start()
        thread.join()
        (work,) = queue.send([first.start])
        yield work
        (work,) = queue.send([second.start])
        yield work

    task = queue.in_turn(1, stages())
    assert isinstance(next(task), Overtaking)
    assert queue.send([other.start]) == [other]
    assert next(task) is second
    assert started == ["other thread", "other thread", "second"]
    with pytest.raises(StopIteration):
        next(task)


def test_errors_and_the_end_reach_the_stages() -> None:
    queue, heard = SendQueue(), list[type]()

    def stages() -> Generator[Any, None, None]:
        try:
            yield Message("", [])
        except BaseException as error:
            heard.append(type(error))
            raise ValueError("told") from error

    task = queue.in_turn(1, stages())
    next(task)
    with pytest.raises(ValueError, match="told"):
        task.throw(RuntimeError("the peer is gone"))
    task = queue.in_turn(1, stages())
    next(task)
    with pytest.raises(ValueError, match="told"):
        task.close()
    assert heard == [RuntimeError, GeneratorExit]
    nothing: list[Any] = []
    assert list(queue.in_turn(1, (work for work in nothing))) == []


def test_a_message_for_nobody_does_not_end_the_queue() -> None:
    queue, started = SendQueue(), list[Any]()
    message = Message("for somebody", started)
    message.free.set()
    assert queued(queue, 1, []) == []
    (work,) = queued(queue, 1, [message.start])
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

    works = queued(queue, 0, [fails if when == "start" else bad.start, good.start])
    thread = running(queue)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        works[0].wait()
    works[1].wait()
    queue.put(None)
    thread.join(10)
