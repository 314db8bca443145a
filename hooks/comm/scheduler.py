"""The scheduler of a pipeline: begins tasks, waits for what they have in flight, and resumes them."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .ports import Stages, Work
from .threads import start_thread

#: Times a phase: "encode", up to the first messages; "exchange", waiting; or "decode", after the first messages.
Clock = Callable[[str], AbstractContextManager[None]]
Job = Callable[[], Any]
#: Schedulers that may have deferred work; at most one has any.
_deferring: weakref.WeakSet[Scheduler] = weakref.WeakSet()
_choosing = threading.Lock()
#: Begins the errors of everything that comes after a failure.
STOPPED = "gradwire stopped after an earlier error"


@dataclass(eq=False)
class Task:
    stages: Stages
    result: Tensor
    future: torch.futures.Future[Any]
    clock: Clock
    ready: torch.cuda.Event | None
    #: Stages that it has begun to wait for.
    stage: int = 0


@dataclass(eq=False)
class Barrier:
    """A job that runs when every task before it has ended; those after it wait."""

    job: Job
    future: torch.futures.Future[Any]
    ready: torch.cuda.Event | None


@dataclass(eq=False)
class Arrived:
    task: Task
    error: Exception | None


class Failure:
    """The first failure of a task or job."""

    text: str | None = None
    #: The exception, until it has been raised.
    unseen: Exception | None = None
    #: Messages that were in flight, whose memory other ranks may still write to.
    left: list[Any]

    def __init__(self) -> None:
        self.left = []

    def follow_up(self) -> RuntimeError:
        return RuntimeError(f"{STOPPED}: {self.text}")


@dataclass(eq=False)
class Scheduler:
    """The state that threads share. It does not refer to its pipeline, which ends when nobody does."""

    failure: Failure
    device: torch.device | None
    overlapped: bool
    name: str
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    first: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    later: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    #: Threads that wait for messages of `first`, at most one, and of `later`.
    waiting: tuple[list[threading.Thread], list[threading.Thread]] = field(default_factory=lambda: ([], []))
    #: Messages of `later` that have not been handled.
    waits: int = 0
    in_flight: dict[Task, None] = field(default_factory=dict)
    #: Items that have not begun.
    submitted: deque[Any] = field(default_factory=deque)
    #: Users' threads do the computing thread's work, one at a time; it does nothing meanwhile.
    deferred: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    #: Deferred tasks, and the messages that they wait for.
    pending: deque[tuple[Task, Work]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.streams = None if self.device is None else (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))

    # -- the computing thread ----------------------------------------------------------------------------------------

    def compute(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)  # a new thread begins at device 0
        while self.begin_next():
            item = self.inbox.get()
            if isinstance(item, Arrived):
                self.waits -= item.task.stage > 1
                self.resume(item.task, item.error)
            else:
                self._take_over()
                self.submitted.append(item)
            del item  # it refers to its owner, which must not live on while this thread waits
        self._end()

    def begin_next(self) -> bool:
        """`begin` under the lock, as another thread may begin tasks once `idle` has returned."""
        with self.lock:
            return self.begin()

    def begin(self) -> bool:
        """Begin what can begin; False: there will be no more."""
        submitted = self.submitted
        while submitted and (isinstance(submitted[0], Task) or not self.in_flight):
            item = submitted.popleft()
            if item is None:
                return False
            self.take(item)
        return True

    def _take_over(self) -> None:
        """Continue deferred tasks on threads."""
        if self.deferred:
            with self.lock:
                self.deferred = False
                while self.pending:
                    self._await(*self.pending.popleft())

    def take(self, item: Task | Barrier | threading.Event) -> None:
        """Begin a submitted item."""
        if isinstance(item, threading.Event):
            item.set()
        elif self.failure.text is not None:
            if isinstance(item, Task):
                item.stages.close()
            item.future.set_exception(self.failure.follow_up())
        elif isinstance(item, Barrier):
            self._run(item)
        else:
            self.in_flight[item] = None
            with self._stream(0, item.ready):
                work = self._advance(item)
            if self.streams is not None:
                self.streams[1].wait_stream(self.streams[0])
            with self._stream(1):
                while work is not None:
                    if self.overlapped:
                        self._await(item, work)
                        return
                    work = self._advance(item, self._wait(item, work))

    def resume(self, task: Task, error: Exception | None) -> None:
        """Continue a task whose messages have arrived, or failed."""
        if task in self.in_flight:
            work = self._advance(task, error)
            if work is not None:
                self._await(task, work)

    def _await(self, task: Task, work: Work) -> None:
        """Have a thread wait for these messages."""
        if self.deferred:
            self.pending.append((task, work))
            return
        begins = task.stage == 1
        self.waits += not begins
        inbox, threads = (self.first, self.waiting[0]) if begins else (self.later, self.waiting[1])
        if len(threads) < (1 if begins else self.waits):
            name = f"{self.name}-messages-{sum(map(len, self.waiting))}"
            try:
                threads.append(start_thread(name, partial(self.wait, inbox), None))
            except RuntimeError as error:  # with fewer threads than waits ranks might deadlock
                del self.in_flight[task]
                self.failure.left.append(work)
                self._fail(error, task.future)
                return
        inbox.put((task, work))

    def _end(self) -> None:
        for inbox, threads in zip((self.first, self.later), self.waiting, strict=True):
            for _ in threads:
                inbox.put(None)
        if self.failure.text is None:  # else one may wait for messages that never come
            for thread in (*self.waiting[0], *self.waiting[1]):
                thread.join()

    def _run(self, barrier: Barrier) -> None:
        if self.streams is not None:
            self.streams[0].wait_stream(self.streams[1])
        with self._stream(0, barrier.ready):
            try:
                barrier.future.set_result(barrier.job())
            except Exception as error:
                self._fail(error, barrier.future)
        if self.streams is not None:
            self.streams[1].wait_stream(self.streams[0])

    def _advance(self, task: Task, error: Exception | None = None) -> Work | None:
        """Run the task's next stage; None: it has ended, well or not."""
        phase = "decode" if task.stage else "encode"
        try:
            with task.clock(phase):
                work = next(task.stages) if error is None else task.stages.throw(error)
            task.stage += 1
            return work
        except StopIteration:
            del self.in_flight[task]
            task.future.set_result(task.result)
        except BaseException as failed:
            del self.in_flight[task]
            self._fail(failed, task.future)
            if not isinstance(failed, Exception):  # of a signal's handler, on a user's thread
                raise
        return None

    def _fail(self, error: BaseException, future: torch.futures.Future[Any]) -> None:
        failure = self.failure
        if isinstance(error, Exception):
            failure.text, failure.unseen = str(error), error
            future.set_exception(error)
        else:  # it is raised on its own thread
            failure.text = repr(error)
            future.set_exception(failure.follow_up())
        for task in self.in_flight:
            task.stages.close()
            task.future.set_exception(failure.follow_up())
        self.in_flight.clear()

    def _stream(self, number: int, ready: torch.cuda.Event | None = None) -> AbstractContextManager[Any]:
        if self.streams is None:
            return nullcontext()
        if ready is not None:
            self.streams[number].wait_event(ready)
        return torch.cuda.stream(self.streams[number])

    def synchronize(self) -> None:
        for stream in self.streams or ():
            stream.synchronize()

    # -- users' threads ----------------------------------------------------------------------------------------------

    def defer(self, deferred: bool) -> None:
        with _choosing:
            for other in set(_deferring) - {self}:
                if other.pending:
                    other.inbox.put(threading.Event())
                    deferred = False
            self.deferred = deferred and self.overlapped
            if self.deferred:
                _deferring.add(self)

    def put_here(self, item: Task | Barrier) -> bool:
        """Begin an item on this thread if work is deferred; False: it is not."""
        if self.deferred:
            with self.lock:
                if self.deferred:  # still
                    self.submitted.append(item)
                    return self.begin()
        return False

    def finish_here(self) -> bool:
        """Run everything to its end on this thread if work is deferred; False: threads have to do the rest."""
        if self.deferred:
            with self.lock:
                while self.pending:
                    if len(self.in_flight) > 1 and any(task.stage > 1 for task, _ in self.pending):
                        return False
                    task, work = self.pending[0]
                    error = self._wait(task, work, RuntimeError) if self.failure.text is None else None
                    self.pending.popleft()  # not before: after an exception of a signal's handler threads continue
                    if self.failure.text is not None:
                        self.failure.left.append(work)
                    else:
                        self.resume(task, error)
                    del task, work
                    self.begin()
                return self.deferred
        return False

    # -- threads that wait -------------------------------------------------------------------------------------------

    def wait(self, inbox: queue.SimpleQueue[Any]) -> None:
        while (item := inbox.get()) is not None:
            task, work = item
            if self.failure.text is not None:
                self.failure.left.append(work)
            else:
                self.inbox.put(Arrived(task, self._wait(task, work)))
            del item, task, work

    @staticmethod
    def _wait(task: Task, work: Work, expected: type[Exception] = Exception) -> Exception | None:
        """The error of waiting, if of the expected kind: on a user's thread others may be a signal handler's."""
        try:
            with task.clock("exchange"):
                work.wait()
        except expected as error:
            return error
        return None
