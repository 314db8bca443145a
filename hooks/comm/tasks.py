"""The items of a pipeline, and its failure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .ports import Stages

#: Times a phase: "encode", up to the first messages; "exchange", waiting; or "decode", after the first messages.
Clock = Callable[[str], AbstractContextManager[None]]
Job = Callable[[], Any]
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
    #: Its messages in flight have a thread of their own that waits for them.
    apart: bool = False


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
