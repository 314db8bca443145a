"""One life of a replica: a process that trains until it is killed, and writes what happens, a line of JSON each.

    {"event": "joining"}                       it has begun to look for the others
    {"event": "ready"}                         its first step begins
    {"event": "due"}                           a call begins that makes a round
    {"event": "call", "seconds": …, "due": …}  a call of `step` is over
    {"event": "doomed", "dies": …}             it is killed by its own hand at that moment, inside this call
    {"event": "round", "round": n, "steps": …, "replicas": …, "digest": …}   a call has made a round

Each line has the clock's time, "at", of all processes on the machine. A round's "steps" are those of this replica that
the round has counted. Each round leaves its state in a file, by one of the replicas that have it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import ChunkedTopK, LocalUpdates, Meeting, Residual
from ..common.launch import function_at
from .task import Pace, Task

LEARNING_RATE = 1e-3
#: Makes a call that may be a round. Returns its "round", "steps" and "replicas", or None when there was none.
Exchange = Callable[[int], Mapping[str, Any] | None]


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


class Doom:
    """Death inside the next exchange, by order of SIGUSR1: at a drawn moment of the median that exchanges took so far.

    Args:
        seed: of the draw.
    """

    def __init__(self, seed: int) -> None:
        self.draw, self.ordered, self.took = random.Random(seed), False, list[float]()
        signal.signal(signal.SIGUSR1, self._order)

    def _order(self, number: int, frame: object) -> None:
        self.ordered = True

    def exchange_begins(self) -> None:
        if self.ordered and self.took:
            moment = self.draw.uniform(0, statistics.median(self.took))
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
            say("doomed", dies=time.monotonic() + moment)


def train(
    job: Mapping[str, Any], task: Task, generator: torch.Generator, local: Callable[[], None], call: Exchange
) -> None:
    """Train until killed.

    Args:
        job: see `main`.
        local: takes what of a step no other replica is needed for, after the backward pass.
        call: makes the call of `step`, with the number of steps since the last round.
    """
    doom, pace, since = Doom(job["seed"] * 1000 + job["life"]), Pace(job["step"]), 0
    say("ready")
    while True:
        task.student.zero_grad()
        task.loss(generator).backward()
        local()
        pace.wait()
        since += 1
        due = since >= job["every"]
        if due:
            doom.exchange_begins()
            say("due")
        begin = time.monotonic()
        made = call(since)
        seconds = time.monotonic() - begin
        due = due or made is not None  # a newcomer's first round comes sooner
        say("call", seconds=seconds, due=due)
        if made is not None:
            since = 0
            doom.took.append(seconds)
            keep(made, task.state(), Path(job["folder"]))
            pace.restart()
        elif due:
            pace.restart()


def keep(made: Mapping[str, Any], state: torch.Tensor, folder: Path) -> None:
    """Say that a round was made, and save its state unless another replica does."""
    values = state.numpy()
    say("round", **made, digest=hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest())
    claimed = folder / f"{made['round']}.claimed"
    try:
        claimed.touch(exist_ok=False)
    except FileExistsError:
        return
    values.tofile(claimed)
    claimed.rename(folder / f"{made['round']}.state")


def gradwire(job: Mapping[str, Any]) -> None:
    """`LocalUpdates` through a meeting point, or without one in a process group of all."""
    task, meeting = Task(job["seed"]), None
    optimizer = torch.optim.AdamW(task.student.parameters(), lr=LEARNING_RATE)
    say("joining")
    if job["hub"]:
        meeting = Meeting(job["hub"], wait_for=job["replicas"], patience=job["patience"])
    else:
        dist.init_process_group("gloo")
    updates = LocalUpdates(
        task.student,
        optimizer,
        ChunkedTopK(k=64, chunk=4096, values=2),
        every=job["every"],
        exchange="gather",
        error_feedback=Residual(decay=0.95),
        meeting=meeting,
    )
    lost = 0

    def call(since: int) -> dict[str, Any] | None:
        nonlocal lost
        before = updates.rounds
        updates.step()
        if updates.rounds == before:
            return None
        counts = updates.statistics()
        dropped, lost = getattr(counts, "own_steps_lost", 0) - lost, getattr(counts, "own_steps_lost", 0)
        of_views = ("views", "repeated_rounds", "healed_bytes", "own_steps_lost")
        facts = {name: getattr(counts, name) for name in of_views if hasattr(counts, name)}
        made = {"round": updates.rounds, "steps": since - dropped, "replicas": len(updates.members)}
        return made | {"payload_bytes": counts.bytes_sent, "meeting_s": counts.seconds.get("meeting", 0.0)} | facts

    generator = torch.Generator().manual_seed(job["seed"] * 1000 + updates.member)
    train(job, task, generator, lambda: optimizer.step() and None, call)


def main() -> None:
    """Main function of each life.

    The job is a JSON object: "function", which trains; "seed"; "life", the number of this process among all of the arm;
    "replicas"; "every", steps from round to round; "step", seconds; "hub", the meeting point's address, or ""; "host",
    this replica's address; "patience", seconds; "folder", for states; "events", the file of lines.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=json.loads)
    job = parser.parse_args().job
    torch.set_num_threads(1)
    with open(job["events"], "w") as sys.stdout:
        function_at(job["function"])(job)


if __name__ == "__main__":
    main()
