"""The drill: replicas in processes that are killed, stopped and cut off at drawn moments.

    python tests/support/drill.py --seed 3 --first 17 --count 1    # repeats a scenario

It prints a line for each scenario, the last one of them as JSON with the sums.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import drill_replica as replica
import numpy as np
import torch
from drill_network import INTERFACE, Network, missing
from drill_replica import (
    DISARMED,
    DYING,
    END,
    LAST,
    NAME_ROUNDS,
    POINTS,
    REPORT,
    SIZE,
    STOPPED,
    VIEW,
    WORDS,
    Ended,
    Fate,
    Plan,
)
from gradwire import ChunkedTopK, OuterSGD, Residual, Rounds, TopK
from gradwire.compress import CODECS
from gradwire.hooks.exchanges import EXCHANGES
from gradwire.hooks.local_sgd.meeting.server import MeetingPoint
from gradwire.hooks.local_sgd.options import LocalOptions
from replica_ledger import Entry, Name, chain, check

#: Replicas and newcomers at most, and the seconds that a scenario may take.
MOST, SECONDS = 9, 60.0
EXCHANGES_DRAWN = ("gather", "two_pass", "mask", "split", "union", "dense", "factors")
#: Events, and how often each is drawn.
EVENTS = {
    "killed at a message": 5, "killed in a change": 4, "killed after applying": 2, "completed by some": 4,
    "newcomer": 2, "stopped": 2, "meeting point killed": 2, "cut off": 2,
}  # fmt: skip


@dataclass
class Timed:
    """What the drill does once a round has been made."""

    round: int
    kind: str
    which: tuple[int, ...] = ()
    seconds: float = 0.0
    began: float | None = None
    done: bool = False


@dataclass
class Scenario:
    """A drawn scenario."""

    number: str
    size: int
    exchange: str
    options: dict[str, Any]
    dead_after: float
    kinds: list[str] = field(default_factory=list)
    fates: dict[int, Fate] = field(default_factory=dict)
    timed: list[Timed] = field(default_factory=list)
    #: A newcomer takes the place of each that dies.
    replaced: bool = False

    @property
    def wait_for(self) -> int:
        """Replicas for the first view: some may die before it is in use."""
        return self.size - sum(number < self.size and fate.kind in POINTS for number, fate in self.fates.items())

    @property
    def partitioned(self) -> bool:
        return any(timed.kind == "cut off" for timed in self.timed)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        events = [f"{number} {fate}" for number, fate in self.fates.items()]
        events += [f"{t.kind} {list(t.which)} at {t.round} for {t.seconds:.1f} s" for t in self.timed]
        return f"{self.number}: {self.size} replicas, {options}; {'; '.join(events)}"


def draw(seed: int, number: int, networks: bool) -> Scenario:
    """The scenario of a seed and a number."""
    rng = random.Random(f"{seed}/{number}")
    exchange = rng.choice(EXCHANGES_DRAWN)
    codecs = [*CODECS, TopK(0.1), ChunkedTopK(k=64, chunk=512, values=2)]
    codec = rng.choice([codec for codec in codecs if EXCHANGES[exchange].carries(codec)])
    every = rng.choice([2, 3, 4, 6])
    rounds = rng.choice([
        Rounds(), Rounds(), Rounds(bucket_cap_mb=0.001), Rounds(delay=1), Rounds(delay=1, keep_local=True),
        Rounds(delay=1, mixing=0.5), Rounds(sync_until=7), *([Rounds(fragments=2)] if every % 2 == 0 else []),
    ])  # fmt: skip
    outer = rng.choice([OuterSGD(), OuterSGD(), OuterSGD(0.7, 0.9)])
    options = {"codec": codec, "exchange": exchange, "every": every, "rounds": rounds, "outer": outer}
    size = rng.randint(2, 6)
    made = Scenario(
        f"{seed}/{number}", size, exchange, {**options, "error_feedback": Residual()}, rng.uniform(1.5, 2.5)
    )
    free = list(range(size))
    rng.shuffle(free)
    keeper = free.pop()  # somebody lives on, or the state would be gone
    kinds = rng.choices([*EVENTS], [*EVENTS.values()], k=rng.choice([1, 2, 2, 3]))
    for kind in kinds:
        _add(made, kind, rng, free, keeper, networks)
    made.replaced = rng.random() < 0.3
    made.options["entropy_coding"] = rng.random() < 0.5
    return made


def _add(made: Scenario, kind: str, rng: random.Random, free: list[int], keeper: int, networks: bool) -> None:
    at = rng.randint(2, 12)
    if kind == "newcomer":
        newcomer = made.size + sum(timed.kind == kind for timed in made.timed)
        if rng.random() < 0.3:
            made.fates[newcomer] = Fate(rng.choice(POINTS))
        made.timed.append(Timed(at, kind))
    elif kind == "meeting point killed":
        if any(timed.kind == kind for timed in made.timed):
            return
        made.timed.append(Timed(at, kind, (), rng.choice([0.0, rng.uniform(0.0, 1.0)])))
    elif kind == "cut off":
        if not networks or made.partitioned:
            return
        beyond = rng.sample(range(made.size), rng.randint(1, made.size - 1))
        made.timed.append(Timed(at, kind, tuple(sorted(beyond)), rng.uniform(0.3, made.dead_after + 2.0)))
    elif not free:
        return
    elif kind == "killed at a message":
        made.fates[free.pop()] = Fate("message", at, rng.randint(1, 60))
    elif kind == "killed in a change":  # which something else must cause
        made.fates[free.pop()] = Fate(rng.choice(POINTS), count=rng.choice([1, 2, 2, 2]))
        made.timed.append(Timed(at, "newcomer"))
    elif kind == "killed after applying":
        made.fates[free.pop()] = Fate("applied", at)
    elif kind == "stopped":
        longer = rng.random() < 0.8
        made.timed.append(Timed(at, kind, (free.pop(),), made.dead_after + 0.7 if longer else rng.uniform(0.1, 1.0)))
    elif kind == "completed by some" and made.size > 2:
        made.fates[free.pop()] = Fate("withholds", at)
        # The others may die or stop right after they have completed it, so that nobody is left who has.
        for other in [*free[: rng.choice([0, 1, 1, 2, 3])]]:
            free.remove(other)
            made.fates[other] = Fate("applied", at, pause=rng.random() < 0.5)
    else:
        return
    made.kinds.append(kind)


class Failed(AssertionError):
    """A scenario has shown a fault."""


class Play:
    """A scenario that is played."""

    def __init__(self, scenario: Scenario, network: Network | None, folder: Path) -> None:
        self.scenario, self.network, self.folder = scenario, network, folder
        self.board = np.frombuffer(mmap.mmap(-1, (MOST + 1) * WORDS * 8), np.int64).reshape(MOST + 1, WORDS)
        self.living: dict[int, int] = {}
        self.dead: set[int] = set()
        #: Those that may lose steps, and those of them that were stopped.
        self.disturbed: set[int] = set()
        self.paused: set[int] = set()
        self.stopped: dict[int, float] = {}
        self.started = 0
        self.port, self.meeting = 0, 0
        self.began = time.monotonic()
        made = LocalOptions(
            scenario.options["codec"], scenario.exchange, Residual(), fallback=None, topology=None, seed=0,
            world_size=scenario.size,
        )  # fmt: skip
        made.prepare(0, [torch.float32], torch.device("cpu"))  # before the fork, for all

    def play(self) -> None:
        try:
            self._meet(first=True)
            for _ in range(self.scenario.size):
                self._start()
            self._until(lambda: self._rounds() >= 1)
            timed = sorted(self.scenario.timed, key=lambda timed: timed.round)
            self._until(lambda: sum(self._advance(each) for each in timed) == len(timed))
            fates = (fate.round for fate in self.scenario.fates.values())
            last = max([self._rounds(), *fates, *(each.round for each in timed)])
            self._until(lambda: self._rounds() >= last + 3)
            self._until(lambda: not self.stopped and self._in_one_view())
            self.drill[DISARMED] = 1
            time.sleep(0.05)  # for one that has just begun to die
            self._until(self._in_one_view)
            self.drill[LAST] = self._rounds() + 2
            self._until(self._at_one_round)
            self.drill[END] = 1
            self._until(lambda: not self.living)
        finally:
            self._kill(*self.living.values(), self.meeting)

    # -- processes ---------------------------------------------------------------------------------------------------

    @property
    def drill(self) -> np.ndarray:
        return self.board[-1]

    def _fork(self, host: int, target: Callable[[], None]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                if self.network is not None:
                    self.network.enter(host)
                target()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        return pid

    @staticmethod
    def _kill(*processes: int) -> None:
        """Kill children that have not been waited for; 0 stands for none."""
        for pid in filter(None, processes):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _meet(self, first: bool = False) -> None:
        """Start the meeting point."""
        reading, writing = os.pipe()

        def serve() -> None:
            log = (self.folder / "meeting.log").open("a", buffering=1)
            stamp = lambda line: print(f"{time.time() % 1000:.3f} {line}", file=log)  # noqa: E731
            point = MeetingPoint(self.port, dead_after=self.scenario.dead_after, report=stamp)
            if first:
                point._membership._recovering = 0.0  # it need not wait for members of an earlier group
            os.write(writing, str(point.port).encode())
            os.close(writing)
            point.join()

        self.meeting = self._fork(0, serve)
        os.close(writing)
        with os.fdopen(reading) as told:
            self.port = int(told.read() or 0)
        if not self.port:
            raise Failed("the meeting point has not started")

    def _start(self) -> None:
        number, self.started = self.started, self.started + 1
        at = "127.0.0.1" if self.network is None else self.network.address(0)
        plan = Plan(
            number, self.folder, f"{at}:{self.port}", self.scenario.wait_for, self.scenario.options,
            self.scenario.fates.get(number), "lo" if self.network is None else INTERFACE, self.board,
        )  # fmt: skip
        if number >= self.scenario.size:
            self.disturbed.add(number)
        self.living[number] = self._fork(number + 1, lambda: replica.run(plan))

    def _reap(self) -> None:
        for number, pid in list(self.living.items()):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if not found:
                continue
            if os.WIFSTOPPED(status):  # the drill's or its own
                self.disturbed.add(number)
                self.paused.add(number)
                self.stopped.setdefault(number, time.monotonic() + self.scenario.dead_after + 0.7)
                continue
            del self.living[number]
            self.stopped.pop(number, None)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                self.dead.add(number)
                if self.scenario.replaced and self.started < MOST:
                    self._start()
            elif os.WEXITSTATUS(status) or not self.drill[END]:
                raise Failed(f"replica {number} has ended: {self._tail(number)}")
        for number, until in list(self.stopped.items()):
            if time.monotonic() > until:
                os.kill(self.living[number], signal.SIGCONT)
                del self.stopped[number]

    def _tail(self, number: int) -> str:
        return (self.folder / f"{number}.log").read_text()[-3000:]

    # -- what happens ------------------------------------------------------------------------------------------------

    def _rounds(self) -> int:
        return max((int(self.board[number][NAME_ROUNDS]) for number in self.living), default=0)

    def _until(self, ready: Callable[[], bool]) -> None:
        while True:
            self._reap()
            if ready():
                return
            if time.monotonic() > self.began + SECONDS:
                self._hang()
            time.sleep(0.003)

    def _advance(self, timed: Timed) -> bool:
        """Let an event happen when it is time; true once it is over."""
        now = time.monotonic()
        if timed.done or (timed.began is None and self._rounds() < timed.round):
            return timed.done
        begins, timed.began = timed.began is None, timed.began or now
        over = now >= timed.began + timed.seconds
        if timed.kind == "newcomer":
            if self.started < MOST:
                self._start()
        elif timed.kind == "stopped" and begins:
            for number in set(timed.which) & self.living.keys():
                os.kill(self.living[number], signal.SIGSTOP)
                self.disturbed.add(number)
                self.paused.add(number)
                self.stopped[number] = now + timed.seconds
        elif timed.kind == "meeting point killed":
            if begins:
                self._kill(self.meeting)
                self.meeting = 0
            if over:
                self._meet()
        elif timed.kind == "cut off":
            assert self.network is not None
            if begins:
                self.network.cut(number + 1 for number in timed.which)
                self.disturbed |= set(range(MOST))
            if over:
                self.network.heal()
        timed.done = over
        return over

    def _in_one_view(self) -> bool:
        rows = [self.board[number] for number in self.living]
        together = all(row[VIEW] == rows[0][VIEW] and row[SIZE] == len(rows) for row in rows)
        return together and not any(row[STOPPED] == DYING for row in rows)

    def _at_one_round(self) -> bool:
        rows = [self.board[number] for number in self.living]
        self.drill[LAST] = max(self.drill[LAST], *(row[NAME_ROUNDS] for row in rows))
        return all(row[STOPPED] and row[NAME_ROUNDS] == self.drill[LAST] for row in rows) and self._in_one_view()

    def _hang(self) -> None:
        """Have all say where they are."""
        self.drill[REPORT] = 1
        for pid in self.living.values():
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        for pid in self.living.values():
            os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        logs = [path.name + ":\n" + path.read_text()[-6000:] for path in sorted(self.folder.glob("*.log"))]
        raise Failed("\n".join(["it hangs", *logs]))

    # -- afterwards --------------------------------------------------------------------------------------------------

    def verdict(self) -> Counter[str]:
        """Check what all have left behind; counts."""
        ended: dict[int, Ended] = {}
        for path in self.folder.glob("*.ended"):
            ended[int(path.stem)] = pickle.loads(path.read_bytes())
        alive = {number: found for number, found in ended.items() if not found.dead}
        for what in ("name", "digest", "members"):
            found = {number: getattr(each, what) for number, each in alive.items()}
            _hold(len(set(found.values())) == 1, f"the last {what} differs: {found}")
        (members,) = {each.members for each in alive.values()}
        _hold(sorted(members) == sorted(each.member for each in alive.values()), f"{members} are in the last view")
        said = (self.folder / "meeting.log").read_text()  # a busy machine makes some silent for too long
        silent = {int(member) for member in re.findall(r"member (\d+) is lost: silent", said)}
        for number, each in ended.items():
            _hold(not each.problems, f"replica {number}: {each.problems}")
            if number not in self.disturbed and each.member not in silent and not each.dead:
                during = each.endings["counted"] * self.scenario.options["rounds"].delay  # of messages in flight
                _hold(each.own_steps_lost <= during, f"replica {number} has lost {each.own_steps_lost} steps")
        codec = self.scenario.options["codec"]
        name = next(iter(alive.values())).name
        law = LocalOptions(
            codec, self.scenario.exchange, Residual(), fallback=None, topology=None, seed=0, world_size=2
        ).choice(0).feedback or self.scenario.exchange == "dense"  # fmt: skip
        every = [ended[number].entries if number in ended else [] for number in range(MOST)]
        plain, returns = self.scenario.options["outer"] == OuterSGD(), self.scenario.exchange == "split"
        counts = Counter(rounds=check(every, name, law, plain, returns))
        led = chain(every, name)
        for number, each in ended.items():
            off = [entry for entry in each.entries if entry.moved is not None and entry.name not in led]
            self._check_off(number, off, led, every)
            counts["rounds that none went on from"] += len(off)
            counts.update({f"ending {ending}": times for ending, times in each.endings.items()})
            counts["repeated rounds"] += each.repeated
        dead = [entry for each in ended.values() if each.dead for entry in each.entries if entry.digest is None]
        counts["dead, inside a round"] += len(dead)
        counts["dead, their last message counted"] += sum(entry.name in led for entry in dead)
        counts["dead"] += len(self.dead)
        return counts

    def _check_off(
        self, number: int, off: list[Entry], led: Mapping[Name, list[Entry]], every: list[list[Entry]]
    ) -> None:
        """Of rounds that no state goes back to, at most the one that was under way was made after others had gone on.

        A view of which all are cut off from the meeting point, or were stopped, cannot know that it has been given up.
        """
        cut = self.paused | {host for timed in self.scenario.timed if timed.kind == "cut off" for host in timed.which}
        for view in {entry.name[0] for entry in off}:
            members = {n for n, entries in enumerate(every) if any(entry.name[0] == view for entry in entries)}
            later = [entry.at for entries in led.values() for entry in entries if entry.name[0] > view]
            late = [entry for entry in off if entry.name[0] == view and later and entry.at > min(later)]
            beside = {
                n for n, entries in enumerate(every)
                if any(entry.name in led and late[0].at < entry.at < late[-1].at for entry in entries)
            } if late else set[int]()  # fmt: skip
            apart = members <= cut or beside <= cut  # each side has a view of its own
            _hold(len(late) <= 1 or apart, f"replica {number} has gone on by itself: {len(late)} of view {view}")


def _hold(holds: bool, text: str) -> None:
    if not holds:
        raise Failed(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the logs of scenarios that fail")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = replica.model_of(0)  # what the first step imports
    model(torch.ones(2, 12)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    why = missing()
    if why is not None:
        print(f"nobody is cut off: {why}")
    totals: Counter[str] = Counter()
    failures = 0
    with contextlib.nullcontext() if why else Network(MOST + 1) as network:
        for number in range(options.first, options.first + options.count):
            failures += not _play(draw(options.seed, number, why is None), network, totals, options)
    print(json.dumps(dict(sorted(totals.items()))))
    return 1 if failures else 0


def _play(scenario: Scenario, network: Network | None, totals: Counter[str], options: argparse.Namespace) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="gradwire-drill-"))
    play = Play(scenario, network if scenario.partitioned else None, folder)
    try:
        play.play()
        found = play.verdict()
    except Exception as error:
        text = error if isinstance(error, AssertionError) else "".join(traceback.format_exception(error))
        print(f"FAILED {scenario}: {text}", flush=True)
        number = scenario.number.split("/")[1]
        print(f"Again: python tests/support/drill.py --seed {options.seed} --first {number} --keep DIR", flush=True)
        if options.keep is not None:
            shutil.copytree(folder, options.keep / scenario.number.replace("/", "-"), dirs_exist_ok=True)
        totals["failed"] += 1
        return False
    finally:
        if network is not None and scenario.partitioned:
            network.heal()
        shutil.rmtree(folder)
    totals.update(found)
    totals.update(["scenarios", f"by {scenario.exchange}", *scenario.kinds])
    print(f"{time.monotonic() - play.began:.1f} s, {scenario}: {dict(found)}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
