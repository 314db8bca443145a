"""The pipeline: one thread computes, others wait for messages, and every bucket of a step is in flight at once.

A task is a generator, its *stages*: it yields its messages in flight, and is resumed when they have arrived. The
computing thread begins tasks in the order of submission, and resumes each as soon as its own messages are there. So
a step takes one latency for each stage, whatever the number of buckets.

One thread waits for the first messages of all tasks, in the order of submission. That cannot deadlock, as no rank needs
to have waited before it sends them. Later messages depend on what other ranks have waited for, in their own order:
queueing them behind one waiter could deadlock, so each gets a thread of its own.

Messages are matched by tags (`comm.group`), so tasks may be resumed in any order. Collectives have no tags: a task
starts one at the latest when it is resumed for the first time, and first resumptions follow the order of submission on
all ranks.

Waking threads takes longer than the computation of a small model's step. Such a step can be *deferred*: the thread that
submits a task begins it, and the thread that waits for all of them also waits for their first messages, in the order of
submission, and resumes them. Threads take over when a later message would have to queue behind others, and when another
pipeline begins a step meanwhile, as ranks may wait for the two in different orders. At most one pipeline has deferred
work.

On a GPU the stages' kernels run on two streams of the pipeline's own, beside backward's: one up to the first messages,
the other after them. NCCL's collectives do not block the host, so tasks run to their end where they are submitted,
without threads. Collectives that block, on a GPU's tensors, run task by task.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from .ports import Stages
from .scheduler import STOPPED, Barrier, Clock, Failure, Job, Scheduler, Task
from .threads import start_thread, stop_thread

#: Threads add to the same numbers.
_adding = threading.Lock()
#: The name of a bucket's phase in profilers.
RANGE = "gradwire:{phase} bucket {bucket}"
#: Environment variables that Nsight and other tools for NVTX's ranges set for the programs that they start.
NVTX_TOOLS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")


def no_clock(phase: str) -> AbstractContextManager[None]:
    """A clock that times nothing."""
    return nullcontext()


def clock(seconds: dict[str, float], bucket: int, device: torch.device) -> Clock:
    """A bucket's clock: adds each phase's wall time to `seconds`, and shows it to profilers."""
    nvtx = device.type == "cuda" and any(name in os.environ for name in NVTX_TOOLS)
    return partial(_Phase, seconds, bucket, nvtx)


class _Phase:
    """Adds the time spent inside to `seconds`. Opens a profiler range only while somebody profiles, as on small models
    that takes as long as the phase.

    Args:
        nvtx: a tool reads NVTX's ranges; torch.profiler's become such only under `emit_nvtx`.
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
        result: Tensor,
        clock: Clock = no_clock,
        future: torch.futures.Future[Tensor] | None = None,
    ) -> torch.futures.Future[Tensor]:
        """Begin a task. The future, one of `new_future` or a new one, gets `result` when the stages have ended, or
        their exception.

        On a GPU the stages run after the work that the current stream holds now, and whoever waits for the future sees
        their results.
        """
        future = self.new_future() if future is None else future
        self._put(Task(stages, result, future, clock, self._ready()))
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
        elif not scheduler.put_here(item):
            scheduler.inbox.put(item)

    def defer(self, deferred: bool) -> None:
        """From now on begin tasks in `start`, and resume them in `wait`, `idle` or `flush`; or have threads do both.
        Deferred futures complete only there: wait for none before. Call it while nothing is in flight. If another
        pipeline has deferred work in flight, threads run both."""
        # Worth 4 to 6 % of a step of 9,000 to 208,000 parameters, and two waits of three (bfloat16 and TopK by gather,
        # two ranks with a core each, idle machine). On busy cores such steps take longer than on threads.
        self._scheduler.defer(deferred)

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
        """Wait for everything submitted so far if threads run it. Raises as `check` does."""
        self.idle()
        self.check()

    def idle(self, seconds: float | None = None) -> bool:
        """Wait until everything submitted so far has ended, well or not; False if that takes longer than `seconds`."""
        if not self.threaded or (seconds is None and self._scheduler.finish_here()):
            return True
        # Threads finish deferred tasks too, as waiting here could exceed `seconds`.
        done = threading.Event()
        self._scheduler.inbox.put(done)
        return done.wait(seconds)

    def flush(self) -> None:
        """As `idle`; on a GPU, until its kernels have ended too."""
        self.idle()
        self._scheduler.synchronize()

    def end(self) -> None:
        """End the threads, which may still refer to their last task, and wait for that. Call it once idle."""
        if self._thread is not None:
            stop_thread(self._scheduler.inbox, self._thread)
