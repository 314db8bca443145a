"""Asynchrony: one thread that computes, others that wait, and every bucket of a step under way at once.

A unit of work is a generator, its *stages*: it yields what it has put under way and goes on when that has arrived. The
computing thread begins units in the order of their submission and resumes each when its own messages are there. So a
message costs a step its latency once for each stage, whatever the number of buckets.

What units have put under way at first is waited for by one thread, in the order of submission: no rank waits for
another's waiting there, as units begin without. What they put under way later hangs on what other ranks have waited
for, in an order of their own, and would close a circle of waits if it had to queue: each has a thread to itself.

Messages find their counterpart by tags (`comm.group`), so the order in which units are resumed, which depends on time,
matters to nobody. Collectives have no tags: a unit starts none later than when it is resumed for the first time, and
for that units follow each other in the order of submission on all ranks.

To wake those threads takes longer than what a small model has to compute, so that its steps can be *deferred*: the
thread that submits a unit begins it, and the one that waits for all of them waits for what they have put under way at
first, in the order of submission, and resumes them. What is put under way later while others still wait must not queue
there either: then threads take over. And so they do where another pipeline begins a step meanwhile, as ranks may come
to wait for the two in another order. One pipeline at most has deferred work, and only on that are ranks made to wait.

On a GPU the stages' kernels run on streams of the pipeline's own, beside backward's: what is encoded on one, the rest
on another. NCCL's collectives do not block the host, so there nothing needs a thread: units are launched to their end
where they are submitted. Collectives that block, on tensors of a GPU, are run unit by unit.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from .ports import Work
from .threads import start_thread, stop_thread

#: What a unit of work yields: messages under way.
Stages = Generator[Work, None, Any]
Job = Callable[[], Any]
#: What times a phase, "encode", "exchange" or "decode": up to the first messages, waiting, and after them.
Clock = Callable[[str], AbstractContextManager[None]]

#: Threads add to the same numbers.
_adding = threading.Lock()
#: How profilers show a bucket's phase.
RANGE = "gradwire:{phase} bucket {bucket}"
#: What Nsight, and other tools that look at NVTX's ranges, set for the programs that they start.
NVTX_TOOLS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
#: Whose work may be deferred; one at most has any.
_deferring: weakref.WeakSet[_Core] = weakref.WeakSet()
_choosing = threading.Lock()
#: What everything is told after one unit has failed.
STOPPED = "gradwire stopped after an earlier error"


def no_clock(phase: str) -> AbstractContextManager[None]:
    """For work that nobody times."""
    return nullcontext()


def clock(seconds: dict[str, float], bucket: int, device: torch.device) -> Clock:
    """For a bucket: adds each phase's wall time to `seconds`, and shows it to profilers."""
    nvtx = device.type == "cuda" and any(name in os.environ for name in NVTX_TOOLS)
    return partial(_Phase, seconds, bucket, nvtx)


class _Phase:
    """Adds the time spent inside to `seconds`. While nobody profiles it opens no range: on small models to enter one
    takes as long as the phase.

    Args:
        nvtx: whether a tool looks at NVTX's ranges; torch.profiler's become such only under `emit_nvtx`.
    """

    __slots__ = ("_bucket", "_nvtx", "_phase", "_ranges", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], bucket: int, nvtx: bool, phase: str) -> None:
        self._seconds, self._bucket, self._nvtx, self._phase = seconds, bucket, nvtx, phase
        self._ranges: ExitStack | None = None

    def __enter__(self) -> None:
        profiled = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        if profiled or self._nvtx:
            name, self._ranges = RANGE.format(phase=self._phase, bucket=self._bucket), ExitStack()
            if profiled:
                self._ranges.enter_context(record_function(name))
            if self._nvtx:
                self._ranges.enter_context(torch.cuda.nvtx.range(name))
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        with _adding:
            self._seconds[self._phase] += time.perf_counter() - self._start
        if self._ranges is not None:
            self._ranges.close()


def drive(stages: Stages) -> Any:
    """Run stages to their end on this thread, waiting for each; returns what they return."""
    try:
        while True:
            next(stages).wait()
    except StopIteration as end:
        return end.value


@dataclass(eq=False)
class _Task:
    stages: Stages
    result: Tensor
    future: torch.futures.Future[Any]
    clock: Clock
    ready: torch.cuda.Event | None
    #: How often it has put something under way.
    stage: int = 0


@dataclass(eq=False)
class _Barrier:
    """A job for when every unit before it has ended; those after it wait."""

    job: Job
    future: torch.futures.Future[Any]
    ready: torch.cuda.Event | None


@dataclass(eq=False)
class _Arrived:
    task: _Task
    error: Exception | None


class Pipeline:
    """Runs units of work and jobs; ends when it is collected. It holds its owner only through what has not finished.

    After something has failed, everything under way fails at once, and so does what comes later: the ranks no longer
    agree on what comes next.

    Args:
        name: of the threads.
        device: where tensors are.
        threaded: run on threads, as must be where waiting blocks; else inside `start` and `submit`.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu", threaded: bool = True) -> None:
        device = torch.device(device)
        self.threaded = threaded
        self._device = device if device.type == "cuda" else None
        self._failure = failure = _Failure()
        self._core = core = _Core(failure, self._device, overlapped=threaded and self._device is None, name=name)
        self._thread = start_thread(name, core.compute, core.inbox, owner=self) if threaded else None

    def start(
        self,
        stages: Stages,
        result: Tensor,
        clock: Clock = no_clock,
        future: torch.futures.Future[Tensor] | None = None,
    ) -> torch.futures.Future[Tensor]:
        """Begin a unit of work; the future, from `new_future` if it was handed out already, gets `result` when its
        stages have ended, or their exception.

        On a GPU the stages see what the current stream holds now, and what waits for the future sees what they wrote.
        """
        future = self.new_future() if future is None else future
        self._put(_Task(stages, result, future, clock, self._ready()))
        return future

    def submit(self, job: Job) -> torch.futures.Future[Any]:
        """Run a job when all that came before has ended; what comes after waits for it."""
        future = self.new_future()
        self._put(_Barrier(job, future, self._ready()))
        return future

    def new_future(self, kind: type[torch.futures.Future[Any]] = torch.futures.Future) -> torch.futures.Future[Any]:
        """For the result of something that is submitted later."""
        return kind(devices=None if self._device is None else [self._device])

    def _ready(self) -> torch.cuda.Event | None:
        """When what the current stream holds now has run."""
        return None if self._device is None else torch.cuda.current_stream(self._device).record_event()

    def _put(self, item: _Task | _Barrier) -> None:
        core = self._core
        if not self.threaded:
            core.take(item)
        elif not core.put_here(item):
            core.inbox.put(item)

    def defer(self, deferred: bool) -> None:
        """From now on begin what is submitted where it is submitted, and go on with it in `wait`, `idle` or `flush`; or
        have threads do both. Only they complete futures then: nobody may wait for one before. Call it while nothing is
        under way. Where something of another pipeline is that was deferred, threads do both for the two of them."""
        core = self._core
        with _choosing:
            for other in set(_deferring) - {core}:
                if other.pending:
                    other.inbox.put(threading.Event())
                    deferred = False
            core.deferred = deferred and core.overlapped
            if core.deferred:
                _deferring.add(core)

    @property
    def failed(self) -> bool:
        """Whether something has failed, and everything later will."""
        return self._failure.text is not None

    def check(self) -> None:
        """Raise what a unit or job has raised; from the second time on as the cause of another error."""
        failure, unseen = self._failure, self._failure.unseen
        if failure.text is None:
            return
        if unseen is None:
            raise RuntimeError(f"{STOPPED}: {failure.text}") from RuntimeError(failure.text)
        failure.unseen = None  # it holds the frames that it came through, and with them the owner of this pipeline
        try:
            raise unseen
        finally:
            del unseen

    def wait(self) -> None:
        """Wait for what was submitted so far, where threads run it; raises as `check` does."""
        self.idle()
        self.check()

    def idle(self, seconds: float | None = None) -> bool:
        """Wait until all that was submitted so far has ended, well or not; False if that takes longer."""
        if not self.threaded or (seconds is None and self._core.finish_here()):
            return True
        # Else threads do it, of what was deferred too: here one could wait for longer.
        done = threading.Event()
        self._core.inbox.put(done)
        return done.wait(seconds)

    def flush(self) -> None:
        """As `idle`; on a GPU until its kernels have ended too."""
        self.idle()
        self._core.synchronize()

    def end(self) -> None:
        """Have the threads end, which may still hold what they ran last, and wait for that; to be called once idle."""
        if self._thread is not None:
            stop_thread(self._core.inbox, self._thread)


class _Failure:
    """What the first unit or job that failed said."""

    text: str | None = None
    #: The exception itself, until somebody has been told.
    unseen: Exception | None = None
    #: What was under way: memory that others may still write to.
    left: list[Any]

    def __init__(self) -> None:
        self.left = []

    def follow_up(self) -> RuntimeError:
        return RuntimeError(f"{STOPPED}: {self.text}")


@dataclass(eq=False)
class _Core:
    """What the threads share. It does not know the pipeline, which ends when nobody holds it."""

    failure: _Failure
    device: torch.device | None
    overlapped: bool
    name: str
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    first: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    later: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    #: Threads that wait for what is in `first`, one at most, and for what is in `later`.
    waiting: tuple[list[threading.Thread], list[threading.Thread]] = field(default_factory=lambda: ([], []))
    #: What the latter wait for, or have waited for and not been asked about.
    waits: int = 0
    in_flight: dict[_Task, None] = field(default_factory=dict)
    #: What has not begun.
    submitted: deque[Any] = field(default_factory=deque)
    #: Whether threads of others do what the computing thread else does, one at a time; it does nothing meanwhile.
    deferred: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    #: What they have put under way.
    pending: deque[tuple[_Task, Work]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.streams = None if self.device is None else (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))

    # -- the computing thread ----------------------------------------------------------------------------------------

    def compute(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)  # a new thread begins at device 0
        while self.begin_next():
            item = self.inbox.get()
            if isinstance(item, _Arrived):
                self.waits -= item.task.stage > 1
                self.resume(item.task, item.error)
            else:
                self._take_over()
                self.submitted.append(item)
            del item  # it holds its owner; waiting for the next one must not keep that alive
        self._end()

    def begin_next(self) -> bool:
        """`begin`, which another thread may not do meanwhile, as it may from when it is told that all has ended."""
        with self.lock:
            return self.begin()

    def begin(self) -> bool:
        """Begin what can begin; False: it was all there will be."""
        submitted = self.submitted
        while submitted and (isinstance(submitted[0], _Task) or not self.in_flight):
            item = submitted.popleft()
            if item is None:
                return False
            self.take(item)
        return True

    def _take_over(self) -> None:
        """Have these threads go on with what was deferred."""
        if self.deferred:
            with self.lock:
                self.deferred = False
                while self.pending:
                    self._await(*self.pending.popleft())

    def take(self, item: _Task | _Barrier | threading.Event) -> None:
        """Begin what was submitted."""
        if isinstance(item, threading.Event):
            item.set()
        elif self.failure.text is not None:
            if isinstance(item, _Task):
                item.stages.close()
            item.future.set_exception(self.failure.follow_up())
        elif isinstance(item, _Barrier):
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

    def resume(self, task: _Task, error: Exception | None) -> None:
        """What the unit waited for has arrived, or will not."""
        if task in self.in_flight:
            work = self._advance(task, error)
            if work is not None:
                self._await(task, work)

    def _await(self, task: _Task, work: Work) -> None:
        """Have a thread tell when this has arrived."""
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
            except RuntimeError as error:  # with fewer threads than waits ranks might wait in a circle
                del self.in_flight[task]
                self.failure.left.append(work)
                self._fail(error, task.future)
                return
        inbox.put((task, work))

    def _end(self) -> None:
        for inbox, threads in zip((self.first, self.later), self.waiting, strict=True):
            for _ in threads:
                inbox.put(None)
        if self.failure.text is None:  # else one may wait for what never comes
            for thread in (*self.waiting[0], *self.waiting[1]):
                thread.join()

    def _run(self, barrier: _Barrier) -> None:
        if self.streams is not None:
            self.streams[0].wait_stream(self.streams[1])
        with self._stream(0, barrier.ready):
            try:
                barrier.future.set_result(barrier.job())
            except Exception as error:
                self._fail(error, barrier.future)
        if self.streams is not None:
            self.streams[1].wait_stream(self.streams[0])

    def _advance(self, task: _Task, error: Exception | None = None) -> Work | None:
        """Run the unit's next stage; None: it has ended, well or not."""
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
            if not isinstance(failed, Exception):  # on a user's thread, of a signal's handler
                raise
        return None

    def _fail(self, error: BaseException, future: torch.futures.Future[Any]) -> None:
        failure = self.failure
        if isinstance(error, Exception):
            failure.text, failure.unseen = str(error), error
            future.set_exception(error)
        else:  # it is told where it was raised
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

    # -- threads of others -------------------------------------------------------------------------------------------

    def put_here(self, item: _Task | _Barrier) -> bool:
        """Begin it on this thread, if it may be."""
        if self.deferred:
            with self.lock:
                if self.deferred:  # still
                    self.submitted.append(item)
                    return self.begin()
        return False

    def finish_here(self) -> bool:
        """Run all to its end on this thread, if it may be; False: threads have to do what is left."""
        if self.deferred:
            with self.lock:
                while self.pending:
                    if len(self.in_flight) > 1 and any(task.stage > 1 for task, _ in self.pending):
                        return False
                    task, work = self.pending[0]
                    error = self._wait(task, work, RuntimeError) if self.failure.text is None else None
                    self.pending.popleft()  # not before: what a signal's handler raises leaves it to threads
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
                self.inbox.put(_Arrived(task, self._wait(task, work)))
            del item, task, work

    @staticmethod
    def _wait(task: _Task, work: Work, expected: type[Exception] = Exception) -> Exception | None:
        """What has gone wrong, if it is expected: on a user's thread another may be what a signal's handler raises."""
        try:
            with task.clock("exchange"):
                work.wait()
        except expected as error:
            return error
        return None
