"""The pipeline: one thread computes, others wait for messages, and every bucket of a step is in flight at once.

A task is a generator, its *stages*: it yields its messages in flight, and is resumed when they have arrived. The
computing thread begins tasks in the order of submission, and resumes each as soon as its own messages are there. So
a step takes one latency for each stage, whatever the number of buckets.

One thread waits for the first messages of all tasks, in the order of submission. That cannot deadlock, as no rank needs
to have waited before it sends them. Later messages depend on what other ranks have waited for, in their own order:
queueing them behind one waiter could deadlock, so each gets a thread of its own. So do first messages that may overtake
others.

Messages are matched by tags (`comm.group`), so tasks may be resumed in any order. Collectives have no tags: a task
starts one at the latest when it is resumed for the first time, and first resumptions follow the order of submission on
all ranks.

On a GPU the stages' kernels run on two streams of the pipeline's own, beside backward's: one up to the first messages,
the other after them. NCCL's collectives do not block the host, so tasks run to their end where they are submitted,
without threads. Collectives that block, on a GPU's tensors, run task by task.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .between_steps import undivided
from .ports import Stages, Work
from .send_queue import Overtaking
from .tasks import STOPPED, Arrived, Barrier, Clock, Failure, Job, Task
from .threads import start_thread, stop_thread


class Completion:
    """An event that a signal's handler may wait for, whatever wait it has interrupted: it has no lock. If a handler
    interrupts a thread that holds the lock of `threading.Event`, the thread that sets the event blocks, and a handler
    that waits for that thread blocks with it."""

    def __init__(self) -> None:
        self._done = False
        self._waiting: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        return self._done

    def set(self) -> None:
        """Wake all that wait. Called by one thread, once or again."""
        self._done = True
        while self._waiting:
            self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `set`; False if it does not come within `timeout` seconds."""
        if self._done:
            return True
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        return self._done or mine.acquire(timeout=-1 if timeout is None else timeout)


def no_clock(phase: str) -> AbstractContextManager[None]:
    """A clock that times nothing."""
    return nullcontext()


class Pipeline:
    """Runs tasks and jobs; ends when it is collected. It refers to its owner only through unfinished tasks.

    After a failure everything in flight fails, and so does everything submitted later, as the ranks no longer agree on
    what comes next.

    Args:
        name: of the threads.
        device: of tensors.
        threaded: run on threads, which waiting that blocks requires; else inside `start` and `submit`.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu", threaded: bool = True) -> None:
        device = torch.device(device)
        self.threaded = threaded
        self._device = device if device.type == "cuda" else None
        self._failure, overlapped = Failure(), threaded and self._device is None
        self._scheduler = scheduler = Scheduler(self._failure, self._device, overlapped, name)
        self._thread = start_thread(name, scheduler.compute, scheduler.inbox, owner=self) if threaded else None

    def start(
        self,
        stages: Stages,
        result: Tensor | None = None,
        clock: Clock = no_clock,
        future: torch.futures.Future[Tensor] | None = None,
    ) -> torch.futures.Future[Tensor]:
        """Begin a task. The future, one of `new_future` or a new one, gets `result` when the stages have ended, or
        their exception.

        On a GPU the stages run after the work that the current stream holds now, and later work of a stream that waits
        for the future runs after them. Tensors that they use are the caller's to `record_stream`.
        """
        future = self.new_future() if future is None else future
        self._put(Task(stages, self._scheduler.nothing if result is None else result, future, clock, self._ready()))
        return future

    def submit(self, job: Job) -> torch.futures.Future[Any]:
        """Run a job when everything before it has ended; everything after it waits."""
        future = self.new_future()
        self._put(Barrier(job, future, self._ready()))
        return future

    def new_future(self, kind: type[torch.futures.Future[Any]] = torch.futures.Future) -> torch.futures.Future[Any]:
        """A future for a task that is submitted later."""
        return kind(devices=None if self._device is None else [self._device])

    def _ready(self) -> torch.cuda.Event | None:
        """An event after the work that the current stream holds now."""
        return None if self._device is None else torch.cuda.current_stream(self._device).record_event()

    def _put(self, item: Task | Barrier) -> None:
        scheduler = self._scheduler
        if not self.threaded:
            scheduler.take(item)
        else:
            scheduler.inbox.put(item)

    @property
    def failed(self) -> bool:
        """True after a failure: everything later fails too."""
        return self._failure.text is not None

    def check(self) -> None:
        """Raise the exception of a task or job that failed; from the second time on another error that quotes it."""
        failure, unseen = self._failure, self._failure.unseen
        if failure.text is None:
            return
        if unseen is None:
            raise RuntimeError(f"{STOPPED}: {failure.text}") from RuntimeError(failure.text)
        failure.unseen = None  # its traceback refers to the owner of this pipeline
        try:
            raise unseen
        finally:
            del unseen

    def wait(self) -> None:
        """Wait for everything submitted so far. Raises as `check` does."""
        self.idle()
        self.check()

    def idle(self, seconds: float | None = None) -> bool:
        """Wait until everything submitted so far has ended, well or not; False if that takes longer than `seconds`."""
        if not self.threaded:
            return True
        done = Completion()
        self._scheduler.inbox.put(done)
        return done.wait(seconds)

    def flush(self) -> None:
        """As `idle`; on a GPU, until its kernels have ended too."""
        self.idle()
        self._scheduler.synchronize()

    def fail(self, error: Exception) -> None:
        """End everything in flight by an error, and everything submitted later, without a wait for messages: Gloo does
        not wake a thread that waits for one of which a part has come, so such threads stay until it times out."""
        self._scheduler.inbox.put(error)

    def end(self) -> None:
        """End the threads, which may still refer to their last task, and wait for that. Call it once idle."""
        if self._thread is not None:
            stop_thread(self._scheduler.inbox, self._thread)


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

    def __post_init__(self) -> None:
        self.streams = None if self.device is None else (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
        #: In the place of no result: a wait for a future orders only the devices of tensors in its result.
        self.nothing = torch.empty(0, device=self.device or "cpu")

    # -- the computing thread ----------------------------------------------------------------------------------------

    def compute(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)  # a new thread begins at device 0
        while self.begin():
            item = self.inbox.get()
            if isinstance(item, Arrived):
                self.waits -= item.task.apart
                self.resume(item.task, item.error)
            elif isinstance(item, Exception):
                if self.failure.text is None:
                    self.failure.text, self.failure.unseen = str(item), item
                    self._end_in_flight()
            else:
                self.submitted.append(item)
            del item  # it refers to its owner, which must not live on while this thread waits
        self._end()

    def begin(self) -> bool:
        """Begin what can begin; False: there will be no more."""
        submitted = self.submitted
        while submitted and (isinstance(submitted[0], Task) or not self.in_flight):
            item = submitted.popleft()
            if item is None:
                return False
            self.take(item)
        return True

    @undivided  # where it runs on a user's thread
    def take(self, item: Task | Barrier | Completion) -> None:
        """Begin a submitted item."""
        if isinstance(item, Completion):
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
        task.apart = task.stage > 1 or isinstance(work, Overtaking)
        self.waits += task.apart
        inbox, threads = (self.later, self.waiting[1]) if task.apart else (self.first, self.waiting[0])
        if len(threads) < (self.waits if task.apart else 1):
            name = f"{self.name}-messages-{sum(map(len, self.waiting))}"
            try:
                threads.append(start_thread(name, partial(self.wait, inbox), None))
            except RuntimeError as error:  # with fewer threads than waits ranks might deadlock
                del self.in_flight[task]
                self.failure.left.append(work)
                self._fail(error, task)
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
                result = barrier.job()
                barrier.future.set_result(self.nothing if result is None else result)
            except Exception as error:
                self._fail(error, barrier)

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
            self._fail(failed, task)
            if not isinstance(failed, Exception):  # of a signal's handler, on a user's thread
                raise
        return None

    def _fail(self, error: BaseException, item: Task | Barrier) -> None:
        failure, future = self.failure, item.future
        del item.future  # the error's traceback refers to the item, and Python does not see what torch's futures hold
        if isinstance(error, Exception):
            failure.text, failure.unseen = str(error), error
            future.set_exception(error)
        else:  # it is raised on its own thread
            failure.text = repr(error)
            future.set_exception(failure.follow_up())
        self._end_in_flight()

    def _end_in_flight(self) -> None:
        for task in self.in_flight:
            task.stages.close()
            task.future.set_exception(self.failure.follow_up())
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
    def _wait(task: Task, work: Work) -> Exception | None:
        """The error of waiting, if any."""
        try:
            with task.clock("exchange"):
                work.wait()
        except Exception as error:
            return error
        return None
