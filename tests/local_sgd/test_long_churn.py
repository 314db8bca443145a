"""A day of replicas that come and go, in one process: equal bits, the law of every round, and memory that stays.

Messages go through memory in the place of Gloo's sockets, and training takes no time: a round stands for a minute. The
meeting point, its connections on loopback, and all threads of the library are real.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gradwire import ChunkedTopK, LocalUpdates, Meeting, Residual
from gradwire.hooks.comm.group import Group
from gradwire.hooks.local_sgd.meeting.server import MeetingPoint
from gradwire.hooks.local_sgd.replicas import Replicas
from memory_mesh import MemoryMeshes
from replica_ledger import Ledger, check, state_digest
from torch import nn

#: Optimizer's steps in a round; rounds in an hour, between two deaths, and between two restarts of the meeting point,
#: in the mean.
EVERY, HOUR, BETWEEN_DEATHS, BETWEEN_RESTARTS = 2, 60, 10, 240
#: Seconds of the real clock that anything may take.
PATIENCE = 120.0
#: Classes whose objects are counted; of the first ten a replica has one or two.
COUNTED = (
    "View", "Reducer", "Session", "Pipeline", "Board", "Bucket", "Client", "Replicas", "LocalUpdates", "MemoryGroup",
    "Group", "Mesh", "Step", "Arrival", "Healed", "Messages", "Receiving", "PersistentMessage", "Thread", "Tensor",
)  # fmt: skip


class Replica:
    """A replica that trains, and waits before each round until the world lets it begin."""

    def __init__(self, world: World, number: int, round_: int) -> None:
        self.world, self.number, self.due = world, number, round_
        self.updates: LocalUpdates | None = None
        self.ledger: Ledger | None = None
        self.error: BaseException | None = None
        self.dead = self.stopped = self.was_stopped = self.ending = False
        self.runs = threading.Event()
        self.runs.set()
        self.parked = threading.Event()
        self.first_round: int | None = None
        #: Rounds that it has made, as it waits before the next one.
        self.rounds = 0
        self.thread = threading.Thread(target=self._run, name=f"replica {number}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            torch.manual_seed(self.number)
            model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            updates = LocalUpdates(
                model, optimizer, ChunkedTopK(k=32, chunk=256, values=2), every=EVERY, exchange="gather",
                error_feedback=Residual(), meeting=Meeting(self.world.point.address, patience=PATIENCE),
            )  # fmt: skip
            self.ledger, self.updates = Ledger(updates), updates
            data = torch.Generator().manual_seed(updates.member)
            while not self.ending:
                loss = model(torch.randn(8, 6, generator=data)).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if updates._runner.progress.count + 1 < EVERY or self.world.train(self, updates):
                    updates.step()
            if not self.dead:
                updates.close()
        except BaseException as error:
            if not self.dead:
                self.error = error
            elif not isinstance(error, RuntimeError):
                raise

    @property
    def tie(self) -> Replicas:
        assert self.updates is not None
        assert self.updates._runner.replicas is not None
        return self.updates._runner.replicas

    @property
    def trains(self) -> bool:
        return self.updates is not None and not self.dead

    def die(self, goodbye: bool = False) -> None:
        """End as a process that is killed: its connections end."""
        client = self.tie.client
        self.dead = self.ending = True
        self.world.gone.add(client.member)
        if not goodbye:
            client._loop.put(None)
            if threading.current_thread() is not client._thread:
                client._thread.join(10)
        self.tie.close()
        self.runs.set()
        self.world.wake()

    def forget(self) -> None:
        """Let go of what a process has, after its end."""
        self.thread.join(PATIENCE)
        if self.ledger is not None:
            self.ledger.detach()
        self.updates = self.ledger = None

    def stop(self) -> None:
        """Stop as by SIGSTOP, so long that the meeting point counts it as lost."""
        loop: Any = self.tie.client._loop
        poll = loop.poll

        def poll_when_it_runs(seconds: float) -> Any:
            if not self.runs.is_set():
                self.parked.set()
                self.runs.wait()
            return poll(seconds)

        loop.poll = poll_when_it_runs
        self.parked.clear()
        self.stopped = self.was_stopped = True
        self.world.gone.add(self.tie.client.member)
        self.runs.clear()
        assert self.parked.wait(PATIENCE)
        loop.poll = poll
        for known in list(self.world.point._membership._replicas.values()):
            if known.member == self.tie.client.member:
                known.heard -= 1000.0

    def go_on(self) -> None:
        self.stopped = False
        self.world.gone.discard(self.tie.client.member)
        self.runs.set()
        self.world.wake()


@dataclass
class World:
    """Replicas, their meeting point, and the rounds that they may begin."""

    point: MeetingPoint
    draws: random.Random
    replicas: list[Replica] = field(default_factory=list)
    #: Numbers so far.
    started: int = 0
    round: int = 0
    laws: int = 0
    #: Messages after which a member dies.
    dying: dict[int, int] = field(default_factory=dict)
    #: Replicas that have died in the round under way, and rounds at which something is due.
    died: list[Replica] = field(default_factory=list)
    #: Numbers of members that are dead or stopped.
    gone: set[int] = field(default_factory=set)
    due: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    _may: threading.Condition = field(default_factory=threading.Condition)

    def start(self, count: int = 1) -> None:
        for _ in range(count):
            self.replicas.append(Replica(self, self.started, self.round + 1))
            self.started += 1

    def train(self, replica: Replica, updates: LocalUpdates) -> bool:
        """Make steps that no round is due after, until the next round may begin. Returns False if it does not: the
        replica ends, or has got the others' state."""
        while not replica.ending:
            with self._may:
                replica.rounds = updates.rounds
                if self._may.wait_for(partial(self._goes_on, replica), 0.05):
                    return not replica.ending
            if replica.runs.is_set() and not updates._runner.look_around(replica.tie):
                return False
        return False

    def _goes_on(self, replica: Replica) -> bool:
        return replica.ending or (replica.rounds < self.round and replica.runs.is_set())

    def wake(self) -> None:
        with self._may:
            self._may.notify_all()

    def before_message(self, member: int) -> None:
        """Let a member die at a drawn message."""
        if member in self.dying:
            self.dying[member] -= 1
            if self.dying[member] < 0 and self.dying.pop(member, None) is not None:
                self.bury(next(r for r in self.replicas if r.trains and r.tie.client.member == member))
                raise RuntimeError("this replica has died")

    def bury(self, replica: Replica, goodbye: bool = False) -> None:
        replica.die(goodbye)
        self.died.append(replica)
        self.seen["deaths"] += 1

    @property
    def training(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.trains and not replica.stopped]

    def until(self, ready: Callable[[], object], doing: str) -> None:
        end = time.monotonic() + PATIENCE
        while not ready():
            for replica in self.replicas:
                if replica.error is not None:
                    raise replica.error
            assert time.monotonic() < end, f"round {self.round}, {doing}: " + ", ".join(
                f"{r.number}: {r.rounds} in {r.tie.view and (r.tie.view.number, len(r.tie.view.members))}"
                for r in self.training
            )
            time.sleep(0.002)

    def one_view(self) -> bool:
        """True if all that live are in one view."""
        living = sum(not replica.dead and not replica.stopped for replica in self.replicas)
        # Whoever is behind gets the others' state with the next step of one of these.
        views = [replica.tie.view for replica in self.training if replica.rounds == self.round]
        return len({view.number for view in views if view is not None}) == 1 and all(
            view is not None
            and view.broken is None
            and len(view.members) == living
            and self.gone.isdisjoint(view.members)
            for view in views
        )

    def _at_rest(self) -> bool:
        """True if none that lives needs the meeting point for its next round."""
        there = [replica for replica in self.replicas if not replica.dead and not replica.stopped]
        return self.one_view() and all(replica.trains and replica.rounds == self.round for replica in there)

    def make_round(self, settle: bool = True) -> None:
        """Make the next round.

        Args:
            settle: its training lasts until the members have changed to the view of all that live.
        """
        if settle and self.training:
            self.until(self.one_view, "changing views")
        with self._may:
            self.round += 1
            self._may.notify_all()
        due = [replica for replica in self.training if replica.rounds == self.round - 1]
        self.until(lambda: all(r.rounds >= self.round for r in due if not r.dead and not r.stopped), "making a round")
        calm = settle and not self.died
        for replica in self.replicas:
            if calm and not replica.stopped:
                self.until(partial(self._took_part, replica), "joining")
            elif replica.first_round is None:  # others had no time to heal it, or the view that it came to has broken
                replica.due = max(replica.due, self.round + 1)
        self._check()

    def _took_part(self, replica: Replica) -> bool:
        return replica.dead or (replica.trains and replica.rounds >= self.round)

    def _check(self) -> None:
        """Check the round that has been made, and forget it."""
        ledgers = {r: r.ledger for r in (*self.replicas, *self.died) if r.ledger is not None}
        problems = [text for ledger in ledgers.values() for text in ledger.problems]
        assert not problems
        there = [r for r in self.training if r.rounds == self.round]
        names = {(r.tie._name, state_digest(r.updates)) for r in there if r.updates is not None}
        assert len(names) == 1, f"round {self.round} has left different states: {names}"
        ((last, _),) = names
        entries = {replica: list(ledger.entries) for replica, ledger in ledgers.items()}
        self.laws += check(entries.values(), last)
        for replica, written in entries.items():
            if written and replica.first_round is None:
                replica.first_round = written[0].name[1]
            del ledgers[replica].entries[: len(written)]
        for replica in self.training:
            came = self.round + 1 if replica.first_round is None else replica.first_round
            assert came <= replica.due, f"replica {replica.number} was due in round {replica.due}, and came in {came}"
            lost = replica.tie.statistics.own_steps_lost
            assert lost == 0 or replica.was_stopped, f"replica {replica.number} has lost {lost} steps"
        for replica in self.died:
            replica.forget()
        self.replicas = [replica for replica in self.replicas if not replica.dead]
        self.died.clear()

    def restart(self, down: Callable[[], None] = lambda: None) -> None:
        """Restart the meeting point."""
        port = self.point.port
        self.point.close()
        down()
        self.point = MeetingPoint(port, dead_after=10.0)
        self.seen["restarts of the meeting point"] += 1

    def disturb(self, size: int) -> bool:
        """Draw what happens in the next round. Returns False if the round does not wait for it."""
        for number in [number for number in self.due if number <= self.round]:
            for action in self.due.pop(number):
                action()
        if self.draws.random() < 1 / BETWEEN_RESTARTS:
            if self.draws.random() < 0.5 and not self.dying:
                self.until(self._at_rest, "changing views before a restart")
                self.restart(partial(self.make_round, settle=False))
            else:
                self.restart()
        count = self.draws.choice([1] * 9 + [2, 3, 4])
        if self.draws.random() > 1 / (BETWEEN_DEATHS * 1.5):  # as one time brings 1.5 in the mean
            return True
        for _ in range(min(count, len(self.training) - 2)):
            victim = self.draws.choice(self.training)
            kind = self.draws.choice(
                ["killed", "killed", "in the round", "in the round", "in the round", "leaves", "stopped"]
            )
            back = self.round + self.draws.randint(1, 10)
            self.seen[kind] += 1
            if kind == "stopped":
                victim.stop()
                self.due.setdefault(back, []).append(victim.go_on)
                continue
            if kind == "in the round":
                self.dying[victim.tie.client.member] = self.draws.randint(0, 6 * size)
            else:
                self.bury(victim, goodbye=kind == "leaves")
            self.due.setdefault(back, []).append(self.start)
        return self.draws.random() < 0.7


@dataclass
class Sizes:
    """What the process holds."""

    resident: int
    threads: int
    files: int
    objects: Counter[str]

    def check(self, replicas: int) -> None:
        """Check that nothing is left of views and replicas that are gone."""
        for name in COUNTED[:10]:
            assert self.objects[name] <= 2 * replicas, self
        assert self.objects["Group"] <= 8 * replicas, self
        assert self.threads <= 8 * replicas + 40, self

    @staticmethod
    def now() -> Sizes:
        gc.collect()
        time.sleep(0.2)  # threads of what was collected end
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found = Counter(type(thing).__name__ for thing in gc.get_objects())
        return Sizes(
            int(status["VmRSS"].split()[0]) // 1024, int(status["Threads"]), len(os.listdir("/proc/self/fd")),
            Counter({name: found[name] for name in COUNTED}),
        )  # fmt: skip


def churn(monkeypatch: pytest.MonkeyPatch, size: int, hours: int, seed: int) -> list[Sizes]:
    """Let replicas come and go. Returns the sizes after each hour."""
    point = MeetingPoint(dead_after=10.0)
    point._membership._recovering = 0.0  # it need not wait for members of an earlier group
    world = World(point, random.Random(seed))
    meshes = MemoryMeshes(world.before_message)
    monkeypatch.setattr(Group, "over_store", meshes.over_store)
    monkeypatch.setattr(Group, "cut", meshes.cut)
    sizes = []
    try:
        world.start(size)
        world.until(lambda: world.training and world.one_view(), "starting")
        began = time.monotonic()
        for hour in range(hours):
            while world.round < (hour + 1) * HOUR:
                world.make_round(settle=world.disturb(size))
            sizes.append(Sizes.now())
            print(
                f"hour {hour + 1}, {time.monotonic() - began:.0f} s, {len(world.training)} train: {sizes[-1]}",
                flush=True,
            )
        world.until(world.one_view, "ending")
        print(f"{world.round} rounds, law of {world.laws} checked, {world.started} replicas, {dict(world.seen)}")
        assert world.laws > 0.8 * hours * HOUR
        return sizes
    finally:
        for replica in world.replicas:
            replica.ending = True
            replica.runs.set()
        world.wake()
        for replica in world.replicas:
            replica.thread.join(20)
            if replica.updates is not None:
                replica.updates.close()
        world.point.close()


@pytest.mark.slow
def test_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = churn(monkeypatch, size=16, hours=1, seed=1)
    sizes[-1].check(16)


@pytest.mark.soak
def test_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = churn(monkeypatch, size=64, hours=24, seed=2)
    for after in sizes:
        after.check(64)
    first, last = sizes[0], sizes[-1]
    assert last.resident < 1.1 * first.resident
    assert last.threads < first.threads + 64
    assert last.files < first.files + 64
