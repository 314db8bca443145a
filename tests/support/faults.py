"""What ranks do in the soak tests: train, with a checkpoint at each step, until a fault strikes; end in many ways."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gradwire import QSGD, OneBit, TopK
from gradwire.hooks.auto.trial import PLANNED, Trial
from gradwire.hooks.comm import group, threads
from gradwire.hooks.comm.group import Group
from gradwire.hooks.core import discarded
from gradwire.hooks.network import cost, probe
from training import Ledger, digest, perceptron, pretend, residuals_of, train, wrap

#: Seconds that ranks wait for each other: of the process group, and when a state is made.
TIMEOUT, MEETING = 20.0, 20.0

#: All but "auto" keep DDP's buckets as they are: it would build others after the first step of a process, and top-k of
#: other buckets is another result. So a run that goes on from a checkpoint ends as the one that saved it.
CONFIGURATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gather": (TopK(density=0.1), {"exchange": "gather"}),
    "union": (TopK(density=0.1), {"exchange": "union"}),
    "split": (TopK(density=0.1), {"exchange": "split"}),
    "mask": (TopK(density=0.1), {"exchange": "mask"}),
    "two_pass": (OneBit(), {"exchange": "two_pass"}),
    "dense": (QSGD(), {"exchange": "dense"}),
    "auto": (TopK(density=0.1), {"exchange": "auto", "fallback": torch.float32}),
}

# -- processes ---------------------------------------------------------------------------------------------------------

#: A rank that calls a function of this module, and comes to the end of its script.
RANK = """
import json, sys
from pathlib import Path
paths, name, arguments, result = json.loads(sys.argv[1])
sys.path[:0] = paths
Path(result).write_text(json.dumps(getattr(__import__("faults"), name)(*arguments)))
"""


@dataclass
class Ended:
    """What is left of a run: by rank the exit status (negative: the signal), what was printed, what was returned."""

    statuses: list[int]
    printed: list[str]
    results: list[Any]


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, within: float = 300.0) -> Ended:
    """Call `function(rank, store, *args)` in a process for each rank; `store` is where they can meet. All of it travels
    as JSON."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        ranks, folder = [], Path(place)
        for rank in range(world_size):
            own = [str(folder / f"{rank}.json"), str(folder / f"{rank}.log")]
            told = json.dumps([sys.path, function.__name__, [rank, str(folder / "store"), *args], own[0]])
            log = stack.enter_context(open(own[1], "w"))
            command, null = [sys.executable, "-c", RANK, told], subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, stdin=null, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(ranks[-1].kill)
        began, timer = time.monotonic(), threading.Timer(within, stack.close)
        timer.start()
        statuses, end = [process.wait() for process in ranks], time.monotonic()
        timer.cancel()
        printed = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(world_size)]
        assert end - began < within, f"{function.__name__}{args} was not done within {within:.0f} s: {printed}"
        files = [folder / f"{rank}.json" for rank in range(world_size)]
        return Ended(statuses, printed, [json.loads(file.read_text()) if file.exists() else None for file in files])


# -- points in a run, and what strikes there --------------------------------------------------------------------------

CONSTRUCTOR, PROBE, FIRST_STEP = range(3)

#: What the ranks do together: what it is called, and counted by.
COLLECTIVES = ("all_gather_v", "all_to_all_v", "all_reduce")


@dataclass
class Fault:
    """What happens to one rank, and where.

    Args:
        rank: to whom.
        kind: "kill", or "stop" for two seconds.
        phase: CONSTRUCTOR, PROBE, or FIRST_STEP + step.
        count: at which of the phase's collectives, or at the first one of a later phase.
        delay: seconds after that collective has begun.
    """

    rank: int
    kind: str
    phase: int
    count: int
    delay: float

    def strike(self) -> None:
        print(f"{self.kind} at {time.monotonic()}", flush=True)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


class Points:
    """Counts the collectives that this rank begins, and strikes when it is time."""

    def __init__(self, fault: Fault | None) -> None:
        self.fault, self.phase, self.count = fault, CONSTRUCTOR, 0

    def enter(self, phase: int) -> int:
        before, self.phase, self.count = self.phase, phase, 0
        return before

    def pass_by(self) -> None:
        fault = self.fault
        here, self.count = (self.phase, self.count), self.count + 1
        if fault is not None and here >= (fault.phase, fault.count) and fault.phase <= self.phase:
            self.fault = None
            threading.Timer(fault.delay, fault.strike).start() if fault.delay else fault.strike()


@contextmanager
def watched(points: Points) -> Iterator[None]:
    """All collectives pass by `points`. Measuring goes on, but what it measures is pretended, so that runs repeat."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, make: Any) -> None:
            stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))

        def passing(method: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                points.pass_by()
                return method(*args, **options)

            return call

        def calibrate(real: Any) -> Any:
            def call(ranks: Group, device: torch.device) -> cost.Calibration:
                before = points.enter(PROBE)
                real(ranks, device)
                points.enter(before)
                return pretend(2e-8)(ranks, device)

            return call

        def codec_speed(real: Any) -> Any:
            def call(*args: Any) -> cost.CodecSpeed:
                real(*args)
                return cost.CodecSpeed(1e-9, 1e-9, 1e-9)

            return call

        def end_step(real: Any) -> Any:
            return lambda trial, span, *others: real(trial, 1.0 if trial.way == PLANNED else 1.1, *others)

        for name in COLLECTIVES:
            replace(Group, name, passing)
        replace(group.PersistentMessage, "start", passing)  # what exchanges, and other collectives, are made of
        replace(Group, "of_ranks", passing)
        replace(probe, "calibrate", calibrate)
        replace(probe, "codec_speed", codec_speed)
        replace(Trial, "end_step", end_step)
        stack.enter_context(patch.object(group, "HANDSHAKE_TIMEOUT", timedelta(seconds=MEETING)))
        yield


# -- training ---------------------------------------------------------------------------------------------------------


def meet(rank: int, store: str, world_size: int) -> None:
    files = dist.FileStore(store, world_size)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size, timeout=timeout)


def checkpoint(folder: Path, step: int, rank: int) -> Path:
    return folder / f"{step}-{rank}.pt"


def trained(
    rank: int,
    store: str,
    name: str,
    folder: str,
    resume: str | None,
    first: int,
    last: int,
    fault: dict[str, Any] | None,
) -> str:
    """Steps `first` to `last - 1` on three ranks, and a checkpoint in `folder` after each; a digest of what is left.

    Args:
        name: of the configuration.
        resume: a folder with checkpoints, of which the one before `first` is loaded.
    """
    points = Points(Fault(**fault) if fault is not None and fault["rank"] == rank else None)
    try:
        with watched(points):
            meet(rank, store, 3)
            codec, options = CONFIGURATIONS[name]
            model, state = wrap(perceptron(), codec, ddp={"find_unused_parameters": name != "auto"}, **options)
            if resume is not None:
                saved = torch.load(checkpoint(Path(resume), first, rank), weights_only=True)
                model.module.load_state_dict(saved["model"])
                state.load_state_dict(saved["state"])
            for step in range(first, last):
                points.enter(FIRST_STEP + step)
                train(rank, model, range(step, step + 1))
                saved = {"model": model.module.state_dict(), "state": state.state_dict()}
                file = checkpoint(Path(folder), step + 1, rank)
                torch.save(saved, file.with_suffix(".part"))
                file.with_suffix(".part").rename(file)
            return digest([*saved["model"].values(), *residuals_of(saved["state"]).values()])
    except Exception as error:
        print(json.dumps({"failed": str(error), "at": time.monotonic()}), flush=True)
        raise


def saved_digest(folder: Path, step: int) -> list[str]:
    """Of the checkpoints of all ranks."""
    found = []
    for rank in range(3):
        saved = torch.load(checkpoint(folder, step, rank), weights_only=True)
        found.append(digest([*saved["model"].values(), *residuals_of(saved["state"]).values()]))
    return found


# -- ends -------------------------------------------------------------------------------------------------------------

#: Ways to end: with the group destroyed, or not; with the state closed before; by an exception, in the script, in
#: backward on one rank after the first bucket, or on one rank alone while the other waits; with the model and its
#: state in a global, or in a cycle of references; before the first step; and in the middle of one that is not waited
#: for.
ENDS = ("destroy", "leave", "close", "raise", "backward", "alone", "global", "cycle", "unused")
#: Of these, what ends by an exception: on both ranks.
RAISE = ("raise", "backward", "alone")

kept: list[Any] = []


class Raised(Exception):
    pass


def ended(rank: int, store: str, way: str, exchange: str) -> None:
    """Three steps on two ranks, and then an end of some kind."""
    meet(rank, store, 2)
    model, state = wrap(perceptron(), TopK(density=0.1), exchange=exchange, fallback=torch.float32)
    if way == "global":
        kept.append((model, state))
    if way == "cycle":
        holder = [model, state]
        holder.append(holder)
    for step in range(0 if way == "unused" else 3):
        if step == 2 and rank == 0 and way == "backward":
            model.module[2].register_full_backward_hook(fail)  # the last layers' bucket is on its way
        if step == 2 and way == "raise":
            raise Raised(way)
        if step == 2 and rank == 1 and way == "alone":
            raise Raised(way)
        train(rank, model, range(step, step + 1))
    if way == "close":
        state.close()
    if way in ("destroy", "close"):
        dist.destroy_process_group()


def fail(*_: Any) -> None:
    raise Raised("in backward")


class Late:
    """Takes its time when the interpreter finalizes, and says when it does."""

    def __init__(self, file: str) -> None:
        self.parts = os.open, os.O_CREAT | os.O_WRONLY, file, time.sleep  # names are gone by then

    def __del__(self) -> None:
        opened, flags, file, sleep = self.parts
        opened(file, flags)
        sleep(1)


def stuck(rank: int, store: str, exchange: str) -> None:
    """Rank 0 raises in backward while it waits for rank 1, which goes away while rank 0's interpreter ends."""
    meet(rank, store, 2)
    model, state = wrap(perceptron(), TopK(density=0.1), exchange=exchange)
    train(rank, model, range(2))
    if rank == 1:
        deadline = time.monotonic() + 60
        while not Path(store + ".ends").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os._exit(int(time.monotonic() > deadline))
    kept.extend([model, state])
    sys.modules["late"] = late = ModuleType("late")  # modules go first, and when no thread can go on
    vars(late)["late"] = Late(store + ".ends")
    del late
    model.module[2].register_full_backward_hook(fail)
    threads.STOP_SECONDS = 0.2
    discarded.RAISED_TIMEOUT = timedelta(seconds=1)
    train(rank, model, range(2, 3))


class Slow:
    def __del__(self) -> None:
        time.sleep(0.5)


def late_callback() -> str:
    """A thread of Gloo lets go of its callback while the interpreter ends; the group is kept, as DDP keeps it."""
    kept.append(dist.group.WORLD)
    vars(sys.modules["__main__"])["late"] = Late(os.devnull)
    time.sleep(0.5 * dist.get_rank())  # rank 0's collective is under way when it gets the callback
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(partial(lambda slow, future: future.value(), Slow())).wait()
    return "done"


# -- a long run -------------------------------------------------------------------------------------------------------


def long_run(rank: int, store: str, steps: int, layers: int, samples: int, seed: int) -> dict[str, Any]:
    """Train under random delays, before buckets and before collectives; what it took, and what was lost."""
    meet(rank, store, 3)
    delays = random.Random(f"{seed} {rank}")

    def delay(chance: float) -> None:
        if delays.random() < chance:
            time.sleep(delays.expovariate(1 / 0.003))

    model, state = wrap(perceptron(layers=layers), TopK(density=0.1), ddp={"bucket_cap_mb": 0.01}, exchange="union")
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: delay(0.1))
    ledger, readings = Ledger(model.module), list[dict[str, int]]()
    with ExitStack() as stack:
        for name in ("all_gather", "all_reduce"):
            real = getattr(Group, name)

            def slow(*args: Any, real: Any = real) -> Any:
                delay(0.03)
                return real(*args)

            stack.enter_context(patch.object(Group, name, slow))
        for step in range(steps):
            train(rank, model, range(step, step + 1), ledger)
            if (step + 1) % (steps // samples) == 0:
                readings.append({"step": step + 1, **reading()})
    result = {
        "readings": readings,
        "buckets": len(state.statistics().decisions),
        "lost": ledger.error(state),
        "replica": digest(model.parameters()),
    }
    state.close()
    dist.destroy_process_group()
    return result


def reading() -> dict[str, int]:
    """Resident memory in KiB, threads, file descriptors."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "memory": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
