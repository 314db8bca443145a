"""The time of a training step with communication: a simulation of one rank's queues, without ranks or messages.

Backward makes one bucket ready after the other. Each then goes through a job: it is encoded, moves and travels, in one
stage or several, and is decoded. One thread encodes and decodes, what moves queues for the link, and what travels waits
for the distance together: over Gloo all of gradwire's jobs, and of PyTorch's own all-reduces two at a time. When
backward is done, DDP copies the buckets back into the gradients, each as soon as it has arrived, and the optimizer
steps.

Whatever computes at the same time shares the rank's processors fairly: where there are enough, communication hides
behind backward; where there are not, the codec's work and the network stack's adds to it. On a GPU the kernels of a
side stream share it with those of backward in the same way, as one processor.

Nothing here is measured, and nothing depends on a machine: `measurement` and `prediction` bring the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

#: A step that communication lengthens by less than this share waits for the model.
NEGLIGIBLE = 0.05

#: Possible bottlenecks, and the fields of a job that belong to each.
PARTS = {
    "latency": ("latency",),
    "transfer": ("transfer", "processor"),
    "encode": ("inline", "encode"),
    "decode": ("decode",),
}


@dataclass(frozen=True)
class Profile:
    """One training step without communication, in seconds.

    Attributes:
        numels: elements of each of DDP's buckets, in the order in which they become ready.
        forward: up to the start of backward.
        ready: when each bucket is, counted from there; the last ends backward.
        copy_back: what DDP takes to copy each bucket back into the gradients.
        optimizer: the optimizer's step.
    """

    numels: tuple[int, ...]
    forward: float
    ready: tuple[float, ...]
    copy_back: tuple[float, ...]
    optimizer: float

    @property
    def floor(self) -> float:
        """The step without communication."""
        return self.forward + self.ready[-1] + sum(self.copy_back) + self.optimizer


@dataclass(frozen=True)
class Job:
    """The parts of one bucket's way, in seconds.

    Attributes:
        inline: on backward's own thread, as soon as the bucket is ready.
        encode, decode: of a processor, before and after the bytes move.
        latency: waiting, of all stages together.
        transfer: of the link, likewise.
        processor: what moving the bytes takes of a processor, meanwhile.
        stages: in how many parts it waits and moves.
    """

    inline: float = 0.0
    encode: float = 0.0
    latency: float = 0.0
    transfer: float = 0.0
    processor: float = 0.0
    decode: float = 0.0
    stages: int = 1

    @property
    def moving(self) -> float:
        return max(self.transfer, self.processor)

    def without(self, fields: Sequence[str]) -> Job:
        """The same, if some of it took no time."""
        nothing: dict[str, Any] = dict.fromkeys(fields, 0.0)
        return replace(self, **nothing)

    @property
    def seconds(self) -> float:
        return self.inline + self.encode + self.latency + self.moving + self.decode


@dataclass(frozen=True)
class Processors:
    """The processors of a rank: cores, and the threads of each computation. A GPU counts as one core.

    Attributes:
        waking: seconds that a message waits, besides its latency, for a core on which others compute.
    """

    cores: float = 1.0
    threads: int = 1
    waking: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Of one way to exchange gradients.

    Attributes:
        step, floor: seconds of a step, and of one without communication.
        communication: seconds that all jobs take one after the other.
        bottleneck: a key of `PARTS`, or "backward": what would have to be faster.
    """

    step: float
    floor: float
    communication: float
    bottleneck: str

    @property
    def tax(self) -> float:
        return self.step - self.floor

    @property
    def hidden(self) -> float:
        """The share of communication that hides behind the model's own work."""
        return 1.0 - min(1.0, self.tax / self.communication) if self.communication else 1.0


def predict(profile: Profile, jobs: Sequence[Job], processors: Processors, at_once: int) -> Prediction:
    """Simulate one step.

    Args:
        jobs: one for each bucket of the profile.
        at_once: how many jobs may be moving or travelling; the next one waits for the first of them.
    """
    step = simulate(profile, jobs, processors, at_once)
    bottleneck = "backward"
    if step - profile.floor > NEGLIGIBLE * step:
        without = {
            part: simulate(profile, [job.without(fields) for job in jobs], processors, at_once)
            for part, fields in PARTS.items()
        }
        bottleneck = min(without, key=without.__getitem__)
    return Prediction(step, profile.floor, sum(job.seconds for job in jobs), bottleneck)


@dataclass(frozen=True)
class Task:
    """`seconds` of work for `load` cores, once the tasks `after` have ended and `uses` is free, which one task has at a
    time: of those that wait the lowest `priority`, first come first served; `waking` more if no core is free then."""

    seconds: float
    load: float
    after: tuple[int, ...]
    waking: float = 0.0
    uses: str = ""
    priority: int = 0


def simulate(profile: Profile, jobs: Sequence[Job], processors: Processors, at_once: int) -> float:
    """Seconds of one step."""
    tasks: list[Task] = []

    def add(seconds: float, load: float, *after: int, waking: float = 0.0, uses: str = "") -> int:
        tasks.append(Task(seconds, load, after, waking, uses))
        return len(tasks) - 1

    busy = float(processors.threads)
    main = add(profile.forward, busy)
    done: list[int] = []  # each job's last task
    arrived: list[int] = []  # and its last message
    for job, (before, ready) in zip(jobs, pairwise((0.0, *profile.ready)), strict=True):
        main = add(ready - before, busy, main)
        main = add(job.inline, busy, main)
        load = min(1.0, job.processor / job.moving) if job.moving else 0.0
        waking = processors.waking if job.moving else 0.0
        last = add(job.encode, busy, main, uses="thread")
        turn = [arrived[-at_once]] if len(arrived) >= at_once else []
        for _ in range(job.stages):
            last = add(job.moving / job.stages, load, last, *turn, uses="link")
            last = add(job.latency / job.stages, 0.0, last, waking=waking / job.stages)
        arrived.append(last)
        done.append(add(job.decode, busy, last, uses="thread"))
    for last, copying in zip(done, profile.copy_back, strict=True):
        main = add(copying, busy, main, last)
    main = add(profile.optimizer, busy, main)
    return run(tasks, processors.cores)[main]


def run(tasks: Sequence[Task], cores: float) -> list[float]:
    """The end of each task, if those that run at the same time share the cores fairly."""
    left, ends = [task.seconds for task in tasks], [0.0] * len(tasks)
    unmet = [len(set(task.after)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for j in set(task.after):
            followers[j].append(i)
    waiting = [i for i, count in enumerate(unmet) if not count]  # for what they use alone, first come first served
    active: list[int] = []
    used: set[str] = set()
    now = 0.0
    while waiting or active:
        begun = []
        for i in sorted(waiting, key=lambda i: tasks[i].priority):
            if tasks[i].uses not in used:
                begun.append(i)
                used |= {tasks[i].uses} - {""}
        waiting = [i for i in waiting if i not in begun]
        active += begun
        if sum(tasks[i].load for i in active) >= cores:
            for i in begun:
                left[i] += tasks[i].waking
        rates = share([tasks[i].load for i in active], cores)
        first = min(left[i] / rate for i, rate in zip(active, rates, strict=True))
        now += first
        for i, rate in zip(active, rates, strict=True):
            left[i] -= first * rate
        for i in [i for i in active if left[i] <= 1e-12]:
            active.remove(i)
            used.discard(tasks[i].uses)
            ends[i] = now
            for j in followers[i]:
                unmet[j] -= 1
                if not unmet[j]:
                    waiting.append(j)
    return ends


def share(loads: Sequence[float], cores: float) -> list[float]:
    """The speed of each task, 1 being full speed: who asks for little gets it, the others equal parts of the rest."""
    rates = [1.0] * len(loads)
    waiting = sorted(range(len(loads)), key=loads.__getitem__)
    for place, i in enumerate(waiting):
        fair = cores / (len(waiting) - place)
        if loads[i] > fair:
            rates[i] = fair / loads[i]
        cores -= loads[i] * rates[i]
    return rates
