"""Order and asynchrony: one thread that runs the buckets' jobs first in, first out.

Collectives that several threads or callbacks start are not ordered across ranks; with two buckets in flight, ranks then
wait for each other for ever, or take each other's data. So everything that talks to the network goes through a lane, in
the order in which DDP submits its buckets, which is the same on every rank, on a process group that nothing else uses.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Job = Callable[[], Tensor]

#: How long to wait for a lane that ends: a job that hangs in the network must not keep the process.
STOP_SECONDS = 10.0


class Lane:
    """A FIFO of jobs with a thread of its own, which ends when the lane is collected. A lane holds its owner only
    through jobs that have not finished.

    After a job has failed, later ones fail at once with the same cause: the ranks no longer agree on what comes next.
    """

    def __init__(self, name: str) -> None:
        jobs: queue.SimpleQueue[tuple[Job, torch.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._jobs = jobs
        thread = threading.Thread(target=_run, args=(jobs,), name=name, daemon=True)
        thread.start()
        # Runs at exit too, before the interpreter goes: a thread that is still inside torch then aborts the process.
        weakref.finalize(self, _stop, jobs, thread)

    def submit(self, job: Job) -> torch.futures.Future[Tensor]:
        """Queue a job; the future gets what it returns, or its exception."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._jobs.put((job, future))
        return future

    def flush(self) -> None:
        """Wait until every job submitted so far has ended, well or not."""
        done = threading.Event()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.add_done_callback(lambda _: done.set())
        self._jobs.put((_nothing, future))
        done.wait()


def _stop(jobs: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # the last job may hold the last reference
        thread.join(STOP_SECONDS)


def _nothing() -> Tensor:
    return torch.empty(0)


def _run(jobs: queue.SimpleQueue[tuple[Job, torch.futures.Future[Any]] | None]) -> None:
    failure: str | None = None
    while (item := jobs.get()) is not None:
        job, future = item
        if failure is not None and job is not _nothing:
            future.set_exception(RuntimeError(f"gradwire stopped after an earlier error: {failure}"))
        else:
            try:
                future.set_result(job())
            except Exception as error:
                failure = str(error)
                future.set_exception(error)
        # A job holds its state; waiting for the next one must not keep it alive.
        del item, job, future
