"""Order and asynchrony: one thread that runs the buckets' jobs first in, first out.

Collectives that several threads or callbacks start are not ordered across ranks; with two buckets in flight, ranks then
wait for each other for ever, or take each other's data. So everything that talks to the network goes through a lane, in
the order in which DDP submits its buckets, which is the same on every rank, on a process group that nothing else uses.

On a GPU a job's kernels run on a stream of the lane's own, so backward goes on beside them. NCCL's collectives do not
block the host, so there the jobs need no thread either: they are launched where they are submitted.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .group import cut_all

Job = Callable[[], Tensor]

#: The threads that run, and their jobs. None is held longer than it runs.
_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]] = weakref.WeakKeyDictionary()

#: How long to wait for a lane that ends: a job that hangs in the network must not keep the process.
STOP_SECONDS = 10.0
#: What every job is told after one has failed.
STOPPED = "gradwire stopped after an earlier error"


class Lane:
    """A FIFO of jobs, which ends when it is collected. A lane holds its owner only through jobs that have not finished.

    After a job has failed, later ones fail at once with the same cause: the ranks no longer agree on what comes next.

    Args:
        name: of the thread.
        device: where the jobs' tensors are.
        threaded: run the jobs on a thread, as they must where a job waits for the network; else inside `submit`.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu", threaded: bool = True) -> None:
        device = torch.device(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._devices: list[int | str | torch.device] | None = None if self._stream is None else [device]
        jobs: queue.SimpleQueue[Settle | None] = queue.SimpleQueue()
        self._jobs, self._failure = jobs, _Failure()
        self.threaded = threaded
        if threaded:
            arguments = (jobs, self._failure, device if self._stream is not None else None)
            thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
            thread.start()
            _threads[thread] = jobs
            weakref.finalize(self, _stop, jobs, thread).atexit = False  # `_stop_all` sees to it

    def submit(self, job: Job) -> torch.futures.Future[Tensor]:
        """Queue a job; the future gets what it returns, or its exception.

        On a GPU the job sees what the current stream holds now, and whoever waits for the future sees what it wrote.
        """
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices)
        settle = partial(_Failure.settle, job=job, future=future)
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._stream.device).record_event()
            settle = partial(_on_stream, stream=self._stream, ready=ready, settle=settle)
        if self.threaded:
            self._jobs.put(settle)
        else:
            settle(self._failure)
        return future

    @property
    def failed(self) -> bool:
        """Whether a job has failed, and all later ones will."""
        return self._failure.text is not None

    def check(self) -> None:
        """Raise what a job has raised; from the second time on as the cause of another error."""
        failure, unseen = self._failure, self._failure.unseen
        if failure.text is None:
            return
        if unseen is None:
            raise RuntimeError(f"{STOPPED}: {failure.text}") from RuntimeError(failure.text)
        failure.unseen = None  # it holds the frames that it came through, and with them whoever owns this lane
        try:
            raise unseen
        finally:
            del unseen

    def wait(self) -> None:
        """Wait for the jobs submitted so far, where a thread runs them; raises as `check` does."""
        self.idle()
        self.check()

    def idle(self, seconds: float | None = None) -> bool:
        """Wait until the thread, if there is one, has ended every job submitted so far; False if that takes longer."""
        if not self.threaded:
            return True
        done = threading.Event()
        self._jobs.put(lambda failure: done.set())
        return done.wait(seconds)

    def flush(self) -> None:
        """Wait until every job submitted so far has ended, well or not."""
        self.idle()
        if self._stream is not None:
            self._stream.synchronize()


class _Failure:
    """What the first job that failed said."""

    text: str | None = None
    #: The exception itself, until somebody has been told.
    unseen: Exception | None = None

    def settle(self, job: Job, future: torch.futures.Future[Any]) -> None:
        if self.text is not None:
            future.set_exception(RuntimeError(f"{STOPPED}: {self.text}"))
            return
        try:
            future.set_result(job())
        except Exception as error:
            self.text, self.unseen = str(error), error
            future.set_exception(error)


def _stop(jobs: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # the last job may hold the last reference
        thread.join(STOP_SECONDS)


@atexit.register
def _stop_all() -> None:
    """Let the threads of all lanes end before the interpreter does: one that is inside torch then aborts the process.

    A lane may be gone by now and its thread not: where the last job holds the last reference, nobody has waited. And a
    job may wait for a rank that does not come, as the main thread has raised something, here or there.
    """
    threads = list(_threads.items())
    for _, jobs in threads:
        jobs.put(None)
    for seconds in (STOP_SECONDS, 1.0):
        deadline = time.monotonic() + seconds
        for thread, _ in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread, _ in threads):
            cut_all()


#: Runs a job, or does not because an earlier one failed, and gives its future what came of it.
Settle = Callable[[_Failure], None]


def _on_stream(failure: _Failure, stream: torch.cuda.Stream, ready: torch.cuda.Event, settle: Settle) -> None:
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        settle(failure)


def _run(jobs: queue.SimpleQueue[Settle | None], failure: _Failure, device: torch.device | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # a new thread begins at device 0
    while (settle := jobs.get()) is not None:
        settle(failure)
        # A job holds its state; waiting for the next one must not keep it alive.
        del settle
