"""An arm on its links: the processes of replicas and of what brings them together, their kills, and what they wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ..common.launch import PREFIX, LinkError, path_of
from ..links.links import Loopback
from . import replica, with_torchft
from .accounting import Life
from .kills import Kill
from .task import Task

#: Seconds until the first round, and for the last one after the time is up.
START, LATE = 180.0, 90.0
#: Seconds in which replicas of the last round report it, and from one look at them to the next.
GRACE, LOOK = 1.0, 0.01


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        train: a replica's function, which takes the job.
        hub: the command of the process that brings replicas together, before its port; empty: there is none.
        killed: whether replicas are killed.
    """

    title: str
    train: Callable[[Mapping[str, Any]], None]
    hub: tuple[str, ...] = ()
    killed: bool = False


_MEETING = ("-m", "gradwire.hooks.local_sgd.meeting", "--port")
_LIGHTHOUSE = ("-m", with_torchft.__name__)
ARMS = {
    "gradwire": Arm("gradwire, LocalUpdates(meeting=…)", replica.gradwire, _MEETING, killed=True),
    "gradwire-undisturbed": Arm("gradwire, nobody is killed", replica.gradwire, _MEETING),
    "without-meeting": Arm("gradwire in a process group, nobody is killed", replica.gradwire),
    "torchft": Arm("torchft's DiLoCo, dense", with_torchft.replica, _LIGHTHOUSE, killed=True),
    "torchft-undisturbed": Arm("torchft's DiLoCo, nobody is killed", with_torchft.replica, _LIGHTHOUSE),
}


@dataclass
class Record:
    """An arm's run.

    Attributes:
        zero: the end of the first round, when its last replica had it.
        end: when the last round that counts had been reported.
        losses: held-out losses of states by their rounds.
        sent_bytes: by all replicas from `zero` to `end`; None on a loopback.
        failures: the last line of each replica that ended by itself, which was started again, too.
    """

    lives: list[Life] = field(default_factory=list)
    zero: float = 0.0
    end: float = 0.0
    losses: dict[int, float] = field(default_factory=dict)
    sent_bytes: int | None = None
    failures: list[str] = field(default_factory=list)


class Process:
    """A replica's process, and what of its output has been read."""

    def __init__(self, life: Life, process: subprocess.Popen[bytes], events: Path, log: Path) -> None:
        self.life, self.process, self.events, self.log = life, process, events, log
        self.place, self.doomed = 0, False

    def read(self) -> None:
        """Take what it has written since the last time, in whole lines."""
        with self.events.open("rb") as file:
            file.seek(self.place)
            *lines, rest = file.read().split(b"\n")
            self.place = file.tell() - len(rest)
        self.life.events += [json.loads(line) for line in lines]

    def last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-3000:] or "it wrote nothing"


class Scene:
    """An arm's processes. A context manager, which ends them.

    Args:
        links: of the replicas, and of the hub as the last rank.
        job: of all replicas; see `replica.main`.
    """

    def __init__(self, links: Loopback, arm: Arm, job: Mapping[str, Any]) -> None:
        self.links, self.arm, self.job = links, arm, job
        self.replicas: int = job["replicas"]
        self.record, self.current, self.stack = Record(), list[Process](), ExitStack()

    def __enter__(self) -> Scene:
        self.folder = Path(self.stack.enter_context(TemporaryDirectory(prefix=f"{PREFIX}-")))
        self.stack.callback(self._end)
        self.port, self.hub = self.links.port(), None
        if self.arm.hub:
            log = self.stack.enter_context((self.folder / "hub.log").open("wb"))
            command = [sys.executable, *self.arm.hub, str(self.port)]
            self.hub = self.links.start(self.replicas, command, self.port, log, {})
        self.current = [self._start(place) for place in range(self.replicas)]
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()

    def _start(self, place: int) -> Process:
        number = len(self.record.lives)
        job = {
            **self.job,
            "function": path_of(self.arm.train),
            "life": number,
            "host": self.links.host(place),
            "hub": f"{self.links.host(self.replicas)}:{self.port}" if self.arm.hub else "",
            "folder": str(self.folder),
            "events": str(self.folder / f"{number}.jsonl"),
        }
        life, log = Life(place, time.monotonic()), self.folder / f"{number}.log"
        events = Path(job["events"])
        events.touch()
        command = [sys.executable, "-m", replica.__name__, json.dumps(job)]
        with log.open("wb") as output:
            process = self.links.start(place, command, self.port, output, {"WORLD_SIZE": str(self.replicas)})
        self.record.lives.append(life)
        return Process(life, process, events, log)

    def _end(self) -> None:
        for process in [*(one.process for one in self.current), *([self.hub] if self.hub else [])]:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _replace(self, place: int) -> None:
        """Start a replica again whose process is dead."""
        dead = self.current[place]
        dead.process.wait()
        dead.read()
        if dead.life.killed is None:
            dies = [event["dies"] for event in dead.life.of("doomed")]
            dead.life.killed = dies[0] if dies else time.monotonic()
        self.current[place] = self._start(place)

    def kill(self, place: int) -> None:
        life = self.current[place]
        life.process.send_signal(signal.SIGKILL)
        life.life.killed = time.monotonic()
        self._replace(place)

    def look(self) -> None:
        """Read what replicas wrote, and start those again that have ended.

        Raises:
            LinkError: the hub or the links have ended.
        """
        self.links.check()
        if self.hub is not None and self.hub.poll() is not None:
            said = (self.folder / "hub.log").read_text(errors="replace").strip()[-3000:]
            raise LinkError(f"{self.arm.title}: {' '.join(self.arm.hub)} has ended with {self.hub.returncode}:\n{said}")
        for place, one in enumerate(self.current):
            ended = one.process.poll() is not None
            one.read()
            if ended and not one.doomed:
                self.record.failures.append(one.last_words().splitlines()[-1][-300:])
                if not self.record.zero:
                    raise LinkError(f"{self.arm.title}: replica {place} ended by itself:\n{one.last_words()}")
            if ended:
                self._replace(place)

    def run(self, seconds: float, kills: Sequence[Kill], inside: bool, advance: Callable[[str], None]) -> Record:
        """Train for so many seconds from the first round on, and until the round after them.

        Args:
            kills: by which replicas die, if it is an arm of that kind.
            inside: kill each one in the exchange that follows its moment.
            advance: called with a note now and then.

        Raises:
            LinkError: there was no first round, or `look`'s.
        """
        record, begin = self.record, time.monotonic()
        while not all(one.life.reports for one in self.current):
            self.look()
            if time.monotonic() > begin + START:
                words = "\n".join(one.last_words() for one in self.current)
                raise LinkError(f"{self.arm.title}: no round of all replicas after {START:.0f} s:\n{words}")
            time.sleep(LOOK)
        record.zero = max(one.life.reports[0]["at"] for one in self.current)
        sent = self.sent_bytes()
        coming, waiting = list(kills) if self.arm.killed else [], list[int]()
        while (last := self._last(record.zero + seconds)) is None or time.monotonic() < last + GRACE:
            self.look()
            while coming and time.monotonic() >= record.zero + coming[0].at:
                waiting.append(coming.pop(0).replica)
            if not inside:
                for place in waiting:
                    self.kill(place)
                waiting = []
            for place in [place for place in waiting if self.current[place].life.reports]:
                waiting.remove(place)
                self.current[place].doomed = True
                self.current[place].process.send_signal(signal.SIGUSR1)
            advance(f"{sum(bool(life.killed) for life in record.lives)} kills")
            time.sleep(LOOK)
        record.end = last + GRACE
        after = self.sent_bytes()
        record.sent_bytes = None if sent is None or after is None else after - sent
        record.losses = self.losses()
        return record

    def _last(self, time_up: float) -> float | None:
        """The moment of the first round after the time was up, which is the last one; None before that."""
        now = time.monotonic()
        if now < time_up:
            return None
        reports = (report["at"] for life in self.record.lives for report in life.of("round"))
        return min((at for at in reports if at >= time_up), default=now if now > time_up + LATE else None)

    def sent_bytes(self) -> int | None:
        sent = [self.links.sent_bytes(place) for place in range(self.replicas)]
        return None if None in sent else sum(number for number in sent if number is not None)

    def losses(self) -> dict[int, float]:
        """Of the states that replicas have left; they are ended first, as this takes processors."""
        self._end()
        for one in self.current:
            one.read()
        task = Task(self.job["seed"])
        states = {int(file.stem): file for file in self.folder.glob("*.state")}
        return {
            number: task.held_out(torch.from_numpy(np.fromfile(file, np.float32)))
            for number, file in sorted(states.items())
        }
