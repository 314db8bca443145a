"""A replica of the drill, in a process of its own, that may be fated to kill or stop itself at a drawn point.

It dies by SIGKILL, and writes down before what it had given to rounds: other threads send nothing meanwhile, so that
what is written is what the others may have got.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gradwire import LocalUpdates, Meeting
from gradwire.hooks.comm.group import Group
from gradwire.hooks.local_sgd.healing import CommonState
from gradwire.hooks.local_sgd.meeting import client
from gradwire.hooks.local_sgd.meeting.client import Board
from gradwire.hooks.local_sgd.replicas import Replicas
from gradwire.hooks.local_sgd.rounds import RoundRunner
from replica_ledger import Entry, Ledger, Name, state_digest
from torch import nn

#: What a replica and the drill tell each other in shared memory, a row for each replica; the last row is the drill's.
VIEW, SIZE, NAME_VIEW, NAME_ROUNDS, STOPPED, WORDS = range(6)
#: The value of `STOPPED` of one that dies.
DYING = -1
#: The drill's words: stop at this round; end; no fate comes true any more; write down your view.
LAST, END, DISARMED, REPORT = range(4)

#: Points in a change of view at which a replica may die: each is passed once in a change, in this order.
POINTS = ("before connecting", "after connecting", "before its report", "after its report", "before healing",
          "while healing", "after healing", "before following", "after following")  # fmt: skip


@dataclass(frozen=True)
class Fate:
    """A replica's end, or pause.

    Args:
        kind: "message": before its `count`-th message of the `round`; "applied": right after it has applied the round;
            "withholds": it keeps the round's last message to its predecessor from it, and dies once somebody has
            completed the round; or one of `POINTS`, for the `count`-th time.
        pause: it stops instead, until it is continued.
    """

    kind: str
    round: int = 0
    count: int = 1
    pause: bool = False


@dataclass
class Ended:
    """What a replica leaves behind."""

    entries: list[Entry]
    problems: list[str] = field(default_factory=list)
    name: Name = (0, 0)
    digest: str = ""
    members: tuple[int, ...] = ()
    member: int = -1
    own_steps_lost: int = 0
    repeated: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    dead: bool = False


@dataclass
class Plan:
    """All that a replica needs to know."""

    number: int
    folder: Path
    address: str
    wait_for: int
    options: dict[str, Any]
    fate: Fate | None
    interface: str
    board: np.ndarray

    @property
    def words(self) -> np.ndarray:
        return self.board[self.number]

    @property
    def drill(self) -> np.ndarray:
        return self.board[-1]


class Gone:
    """The work of a message that was kept back."""

    def wait(self, *_: Any) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    is_success = is_completed


class Fated:
    """Lets a replica's fate come true."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.fate = plan, plan.fate
        self.replicas: Any = None
        self.updates: LocalUpdates | None = None
        self.ledger: Ledger | None = None
        self.endings: Counter[str] = Counter()
        self.dying = self.withheld = False
        self.passed: Counter[str] = Counter()
        self.sent: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()
        self._watch()

    def _armed(self, kind: str) -> bool:
        return self.fate is not None and self.fate.kind == kind and not self.plan.drill[DISARMED]

    def _watch(self) -> None:
        send = Group.with_peer_context

        def watched(group: Any, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
            while self.dying:
                time.sleep(1)
            if self.fate is not None and self.ledger is not None and self._message(group, peer, call.__name__):
                return Gone()
            return send(group, peer, call, *arguments)

        self._wrap(Group, "with_peer_context", watched)
        self._around(Group, "over_store", "before connecting", "after connecting", kind=staticmethod)
        self._around(CommonState, "start", "before healing", "while healing")
        self._around(Replicas, "_heal", None, "after healing")
        self._around(Replicas, "followed", "before following", "after following")
        post, applied, constructed, follow = Board.post, Replicas.applied, Replicas.__init__, RoundRunner.follow

        def following(runner: RoundRunner, arrival: Any, *sent: Any) -> None:
            say(f"view {arrival.view.number} of {arrival.view.members}: {arrival.name}, {arrival.ending}")
            if self.ledger is not None and self.ledger._pending is not None:
                self.endings[arrival.ending] += 1
            self.endings["healed"] += arrival.healed is not None
            follow(runner, arrival, *sent)

        def constructing(replicas: Replicas, *args: Any, **options: Any) -> None:
            self.replicas = replicas
            constructed(replicas, *args, **options)

        def posted(board: Board, key: str, value: bytes) -> None:
            if "report of" in key:
                self.point("before its report")
            post(board, key, value)
            if "report of" in key:
                self.point("after its report")

        def applying(replicas: Replicas, number: int) -> None:
            applied(replicas, number)
            self.publish(replicas)
            if self._armed("applied") and self.fate is not None and number >= self.fate.round:
                self.strike()

        self._wrap(Board, "post", posted)
        self._wrap(Replicas, "applied", applying)
        self._wrap(Replicas, "__init__", constructing)
        self._wrap(RoundRunner, "follow", following)

    @staticmethod
    def _wrap(owner: Any, name: str, function: Any) -> None:
        setattr(owner, name, function)

    def _around(self, owner: Any, name: str, before: str | None, after: str, kind: Any = None) -> None:
        plain = getattr(owner, name)

        def around(*args: Any, **options: Any) -> Any:
            if before is not None:
                self.point(before)
            found = plain(*args, **options)
            self.point(after)
            return found

        setattr(owner, name, around if kind is None else kind(around))

    def point(self, where: str) -> None:
        """Die if it is time."""
        self.passed[where] += 1
        if self._armed(where) and self.fate is not None and self.passed[where] >= self.fate.count:
            self.strike()

    def _message(self, group: Any, peer: int, what: str) -> bool:
        """Before a message of a round. True: it is kept back."""
        assert self.fate is not None
        assert self.updates is not None
        runner: Any = self.updates._runner
        number, view = runner.number, runner.replicas.view
        if view is None or view.group is None or view.group._group is not group._group:
            return False
        if self._armed("message") and number >= self.fate.round:
            self.passed["message"] += 1
            if self.passed["message"] >= self.fate.count:
                self.strike()
        if self._armed("withholds") and what == "send" and peer == (group.rank - 1) % group.size and group.size > 2:
            self.sent[view.number, number] += 1
            of_this, of_last = self.sent[view.number, number], self.sent[view.number, number - 1]
            if number >= self.fate.round and of_last and of_this >= of_last and not self.withheld:
                self.withheld = True
                threading.Thread(target=self._await_others, args=((view.number, number),), daemon=True).start()
            return self.withheld
        return False

    def _await_others(self, name: Name) -> None:
        """Die once somebody has completed the round, or nobody does."""
        others = [row for row in self.plan.board[:-1] if row is not self.plan.words]
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            if any((row[NAME_VIEW], row[NAME_ROUNDS]) == name for row in others):
                break
            time.sleep(0.001)
        self.strike()

    def strike(self) -> None:
        """Die, or stop."""
        with self._lock:
            fate, self.fate = self.fate, None
            if fate is None:
                return
            say(f"{'stops' if fate.pause else 'dies'}: {fate}")
            if fate.pause:
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            self.dying = True
            self.plan.words[STOPPED] = DYING
        time.sleep(0.01)  # for messages that are just being sent
        if self.ledger is not None:
            ended = self.ended(self.ledger)
            ended.entries, ended.dead = self.ledger.last_words(), True
            write(self.plan, ended)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def publish(self, replicas: Replicas) -> None:
        """Tell the drill where this replica is."""
        words, view = self.plan.words, replicas.view
        words[NAME_VIEW], words[NAME_ROUNDS] = replicas._name
        words[VIEW], words[SIZE] = (0, 0) if view is None else (view.number, len(view.members))

    def ended(self, ledger: Ledger) -> Ended:
        updates: Any = ledger.updates
        found: Any = updates._statistics
        return Ended(
            list(ledger.entries), list(ledger.problems), updates._runner.replicas._name, state_digest(updates),
            updates.members, updates.member, found.own_steps_lost, found.repeated_rounds, self.endings,
        )  # fmt: skip


def say(text: str) -> None:
    print(f"{time.time() % 1000:.3f} {text}", flush=True)


def write(plan: Plan, ended: Ended) -> None:
    """Leave it behind, whole or not at all."""
    aside = plan.folder / f"{plan.number}.tmp"
    aside.write_bytes(pickle.dumps(ended))
    aside.rename(plan.folder / f"{plan.number}.ended")


def model_of(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5), nn.BatchNorm1d(5))


def run(plan: Plan) -> None:
    """Train until the drill says when to stop; never returns."""
    log = os.open(plan.folder / f"{plan.number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = plan.interface
    client.SILENT_SECONDS, client.CONNECT_SECONDS, client.BEAT_SECONDS = 2.5, 1.0, 0.5
    code = 1
    try:
        _train(plan)
        code = 0
    except BaseException:
        say(traceback.format_exc())
    finally:
        os._exit(code)


def _train(plan: Plan) -> None:
    fated = Fated(plan)
    model = model_of(plan.number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    meeting = Meeting(plan.address, wait_for=plan.wait_for, patience=20)
    threading.Thread(target=_report, args=(plan, fated), daemon=True).start()
    updates = fated.updates = LocalUpdates(model, optimizer, meeting=meeting, **plan.options)
    runner: Any = updates._runner
    replicas: Replicas = runner.replicas
    ledger = fated.ledger = Ledger(updates)
    fated.publish(replicas)
    say(f"member {updates.member} of {updates.members}")
    data, words, drill = torch.Generator().manual_seed(updates.member), plan.words, plan.drill
    while not drill[END]:
        if drill[LAST] and replicas._name[1] >= drill[LAST]:
            fated.publish(replicas)
            words[STOPPED] = DYING if fated.dying else 1
            runner.look_around(replicas)  # a newcomer asks how far this one is
            time.sleep(0.005)
            continue
        words[STOPPED] = DYING if fated.dying else 0
        batch = torch.randn(8, 17, generator=data)
        loss = (model(batch[:, :12]) - batch[:, 12:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.002)
        updates.step()
        fated.publish(replicas)
    write(plan, fated.ended(ledger))


def _report(plan: Plan, fated: Fated) -> None:
    """Write down the view's state when the drill asks."""
    while not plan.drill[REPORT]:
        time.sleep(0.1)
    with contextlib.suppress(AttributeError):
        say(f"{vars(fated.replicas)}")
        say(f"{vars(fated.replicas.client)}")
