"""Replicas that come and go, as threads of one process: equal bits for equal names, and the law of every round."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gradwire import (
    ChunkedTopK,
    Codec,
    Identity,
    LocalUpdates,
    Meeting,
    MeetingLost,
    Momentum,
    OneBit,
    OuterSGD,
    PowerSGD,
    Residual,
    Rounds,
    TopK,
    Tracking,
)
from gradwire.hooks.comm.group import Group
from gradwire.hooks.local_sgd.healing import Healed, Progress
from gradwire.hooks.local_sgd.meeting.client import Board, Client
from gradwire.hooks.local_sgd.meeting.server import MeetingPoint
from gradwire.hooks.local_sgd.replicas import Replicas
from gradwire.hooks.local_sgd.view import Arrival, View
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from replica_ledger import Entry, Ledger, check
from torch import nn

CODECS: dict[str, Callable[[], Codec]] = {
    "gather": lambda: ChunkedTopK(k=64, chunk=512, values=2), "two_pass": OneBit, "split": lambda: TopK(0.1),
    "union": lambda: TopK(0.1), "mask": lambda: TopK(0.1, values=torch.int8), "dense": Identity, "factors": PowerSGD,
}  # fmt: skip


@dataclass
class World:
    """Replicas in threads, and their meeting point."""

    options: dict[str, Any]
    point: MeetingPoint
    replicas: list[Replica] = field(default_factory=list)
    #: Those that are cut off.
    beyond: list[Client] = field(default_factory=list)

    def start(self, count: int = 1) -> list[Replica]:
        made = [Replica(self, len(self.replicas) + i) for i in range(count)]
        self.replicas += made
        LIVING.extend(made)
        for replica in made:
            replica.thread.start()
        return made

    def advance(self, rounds: int) -> None:
        """Wait until so many rounds more have been made."""
        end = rounds + max((replica.rounds for replica in self.replicas if not replica.dead), default=0)
        self.until(lambda: any(replica.rounds >= end for replica in self.replicas if not replica.dead))

    def restart(self, seconds: float) -> None:
        """Restart the meeting point at the same port."""
        port = self.point.port
        self.point.close()
        time.sleep(seconds)
        self.point = MeetingPoint(port, dead_after=2.5)

    @contextmanager
    def cut(self, beyond: Sequence[Replica]) -> Iterator[None]:
        """Cut replicas off from the meeting point, and from those of the others."""
        ties = [replica.tie for replica in beyond]
        self.beyond = [tie.client for tie in ties]
        for client in self.beyond:
            client._place = ("127.0.0.1", 9)  # where nobody listens
            if (connection := client._connection) is not None:
                with contextlib.suppress(OSError):  # it is gone already
                    connection.end.shutdown(socket.SHUT_RDWR)
        yield
        host, port = self.point.address.rsplit(":", 1)
        for client in self.beyond:
            client._place = (host, int(port))
        self.beyond = []

    def across(self, replica: Replica, members: Sequence[int], peer: int) -> bool:
        """Whether a message goes from one side to the other."""
        beyond = {client.member for client in self.beyond}
        return bool(beyond) and (replica.tie.client.member in beyond) != (members[peer] in beyond)

    def until(self, ready: Callable[[], object], seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while not ready():
            for replica in self.replicas:
                if replica.error is not None:
                    raise replica.error
            assert time.monotonic() < end, [(r.number, r.where, r.updates) for r in self.replicas]
            time.sleep(0.005)


class Replica:
    """A replica that trains until it is told to end."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"replica {number}")
        self.updates: LocalUpdates | None = None
        self.ledger: Ledger | None = None
        self.error: BaseException | None = None
        self.ending = self.dead = False
        self.hold = threading.Event()
        self.hold.set()
        self.where = "starting"
        self.messages_left: int | None = None
        #: The point of a change of view at which it dies.
        self.dies: str | None = None
        self.saved: Any = None
        #: Called before each of its messages, while set.
        self.last_words: Callable[..., None] | None = None

    def _run(self) -> None:
        try:
            torch.manual_seed(self.number)
            model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 5), nn.BatchNorm1d(5))
            adaptive = self.world.options["rounds"].lengthen_steps if "rounds" in self.world.options else False
            optimizer = (torch.optim.AdamW if adaptive else torch.optim.SGD)(model.parameters(), lr=0.05)
            options = {"meeting": Meeting(self.world.point.address), **self.world.options}
            calls, loads = options.pop("calls", None), options.pop("loads", None)
            options["meeting"] = options["meeting"] or Meeting(self.world.point.address)
            self.updates = updates = LocalUpdates(model, optimizer, **options)
            if loads is not None and updates.rounds == 0:
                updates.load_state_dict(loads)
            self.ledger = Ledger(updates)
            data = torch.Generator().manual_seed(updates.member)
            while not self.ending:
                self.hold.wait()
                self.where = "training"
                loss = model(torch.randn(8, 12, generator=data)).square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.002)
                self.where = "in step()"
                updates.step()
                if calls is not None and updates.rounds % calls[1] == calls[1] - 1:
                    self.where = f"in {calls[0]}()"
                    saved = getattr(updates, calls[0])()
                    self.saved = self.saved or saved
            updates.close()
        except BaseException as error:
            if not self.dead:
                self.error = error
        finally:
            self.where = f"gone: {self.error}"

    def die(self) -> None:
        """Go as a process does that is killed: connections end."""
        self.dead = self.ending = True
        self.hold.set()
        self.tie.close()

    def die_at(self, messages: int) -> None:
        """Die before so many messages from now are sent or received."""
        self.messages_left = messages

    def owns(self, group: Any) -> bool:
        if self.updates is None or self.dead:
            return False
        views = (self.tie.view, self.tie._next)
        return any(v is not None and v.group is not None and v.group._group is group._group for v in views)

    @property
    def tie(self) -> Replicas:
        assert self.updates is not None
        assert self.updates._replicas is not None
        return self.updates._replicas

    @property
    def place(self) -> int:
        """Its rank in its view."""
        return -1 if self.tie.view is None else self.tie.view.rank

    @property
    def entries(self) -> list[Entry]:
        return [] if self.ledger is None else self.ledger.entries

    @property
    def rounds(self) -> int:
        return 0 if self.updates is None else self.updates.rounds

    @property
    def trains(self) -> bool:
        return self.ledger is not None


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replicas die at a drawn message, or at a point of a change of view."""
    plain = Group.with_peer_context

    def counting(group: Any, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
        for replica in tuple(LIVING):
            if replica.last_words is not None and replica.owns(group):
                replica.last_words(peer, call, arguments)
            if replica.messages_left is not None and replica.owns(group):
                replica.messages_left -= 1
                if replica.messages_left < 0:
                    replica.messages_left = None
                    replica.die()
                    raise RuntimeError("this replica has died")
            if replica.world.beyond and replica.owns(group) and replica.world.across(replica, group._ranks, peer):
                raise RuntimeError("Connection closed by peer")
        return plain(group, peer, call, *arguments)

    def passing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def passes(tie: Replicas, *arguments: Any) -> Any:
            _die_at(f"before {name}", tie)
            found = plain(tie, *arguments)
            _die_at(f"after {name}", tie)
            return found

        return passes

    monkeypatch.setattr(Group, "with_peer_context", counting)
    for name in STAGES:
        monkeypatch.setattr(Replicas, name, passing(name, getattr(Replicas, name)))
    LIVING.clear()


LIVING: list[Replica] = []
#: What a replica does in a change of view.
STAGES = ("_connect", "_report", "_heal", "followed")
POINTS = [f"{when} {stage}" for stage in STAGES for when in ("before", "after")]


def _die_at(point: str, tie: Replicas) -> None:
    for replica in tuple(LIVING):
        if replica.dies == point and not replica.dead and replica.tie is tie:
            replica.die()


@contextmanager
def world(**options: Any) -> Iterator[World]:
    point = MeetingPoint(dead_after=2.5)
    point._membership._recovering = 0.0  # it need not wait for members of an earlier group
    made = World({"codec": Identity(), "every": 5, **options}, point)
    try:
        yield made
    finally:
        for replica in made.replicas:
            replica.ending = True
            replica.hold.set()
        for replica in made.replicas:
            replica.thread.join(20)
        for replica in made.replicas:
            if replica.updates is not None:
                replica.updates.close()
        point.close()


def settle(made: World) -> int:
    """End all replicas that live at one round, and check the ledgers."""
    made.until(lambda: all(replica.trains or replica.dead for replica in made.replicas))
    first = max(replica.rounds for replica in made.replicas) + 2
    made.until(lambda: all(replica.rounds >= first or replica.dead for replica in made.replicas))
    for replica in made.replicas:
        replica.ending = True
    made.until(lambda: all(not replica.thread.is_alive() for replica in made.replicas))
    ledgers = [replica.entries for replica in made.replicas]
    problems = [text for replica in made.replicas if replica.ledger is not None for text in replica.ledger.problems]
    assert not problems
    last = max(entry.name for entries in ledgers for entry in entries)
    exact = made.options.get("error_feedback") == Residual()
    return check(ledgers, last, law=exact, plain=made.options.get("outer") is None)


@pytest.mark.parametrize("exchange", sorted(CODECS))
def test_one_dies_and_one_comes(exchange: str) -> None:
    with world(codec=CODECS[exchange](), exchange=exchange, error_feedback=Residual()) as made:
        made.start(3)
        made.until(lambda: all(replica.rounds >= 3 for replica in made.replicas))
        made.replicas[1].die()
        after = made.replicas[0].rounds + 3
        made.until(lambda: made.replicas[0].rounds >= after and made.replicas[2].rounds >= after)
        views = [made.replicas[which].tie.view for which in (0, 2)]
        assert [view is not None and len(view.members) for view in views] == [2, 2]
        made.start()
        made.until(lambda: made.replicas[3].rounds >= after + 3)
        assert settle(made) > 5


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize(("exchange", "sends"), [("gather", 1), ("two_pass", 2), ("split", 2)])
def test_a_round_that_one_has_completed_counts_for_all(exchange: str, sends: int, dies: bool) -> None:
    """The first of three dies between its last message to the second, which completes the round, and that to the
    third; or its connection to the third breaks then."""
    with world(codec=CODECS[exchange](), exchange=exchange, error_feedback=Residual()) as made:
        made.start(3)
        made.until(lambda: all(replica.rounds >= 3 for replica in made.replicas))
        dying, second, third = sorted(made.replicas, key=lambda replica: replica.place)
        sent, at = list[int](), dying.rounds + 1

        def last_words(peer: int, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            if peer == 2 and call.__name__ == "send" and arguments[0][0].numel() > 6 and dying.rounds > at:
                sent.append(peer)
                if len(sent) == sends:
                    made.until(lambda: second.tie._name[1] >= dying.rounds)
                    if dies:
                        dying.die()
                    raise RuntimeError("this replica has died, or its connection")

        dying.last_words = last_words
        made.until(lambda: len(sent) >= sends)
        settle(made)
        entries = [[entry for entry in replica.entries if entry.name[0] == 1] for replica in (second, third)]
        assert entries[0][-1].name == entries[1][-1].name
        assert entries[0][-1].moved is not None
        assert entries[1][-1].moved is None, "the third has completed the round itself"
        same = [entry for replica in made.replicas for entry in replica.entries if entry.name == entries[0][-1].name]
        assert dies or len(same) == 3, "the law of this round was not checked"
        assert third.tie.statistics.own_steps_lost == 0, "its steps have been counted"


def test_a_checkpoint_holds_all_that_was_left_out() -> None:
    """All replicas save at one round, by one that sends their residuals; a new group goes on from it, and a newcomer
    gets it from that."""
    options = {"codec": TopK(0.1), "exchange": "gather", "error_feedback": Residual(), "every": 4}
    with world(**options, meeting=None, calls=("consolidated_state_dict", 7)) as made:
        made.start(3)
        made.until(lambda: all(replica.saved is not None for replica in made.replicas))
        saves = [replica.saved for replica in made.replicas]
        settle(made)
    texts = [{name: {k: x.tolist() for k, x in save["global"].items()} for name in ("global",)} for save in saves]
    assert all(text == texts[0] for text in texts)
    assert not any(x.any() for save in saves for x in save["residuals"]["mean"].values())
    with world(**options, meeting=None, loads=saves[0]) as made:
        made.start(2)
        made.until(lambda: all(replica.rounds > saves[0]["step"] for replica in made.replicas))
        made.start()
        made.until(lambda: made.replicas[2].rounds > saves[0]["step"] + 3)
        settle(made)


def test_replicas_without_a_meeting_point_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradwire.hooks.local_sgd.replicas.REPORT_AFTER", 0.1)
    with pytest.raises(ValueError, match=r"address='nowhere'.*head:29400"):
        LocalUpdates(
            model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()), OneBit(), every=2, meeting="nowhere"
        )
    lost = Meeting("127.0.0.1:9", patience=0.3)
    with pytest.raises(MeetingLost, match=r"127\.0\.0\.1:9 has not been reached for [01] s"):
        LocalUpdates(model, torch.optim.SGD(model.parameters()), OneBit(), every=2, meeting=lost)
    (said,) = caplog.messages
    assert said.startswith("gradwire: no round yet: the meeting point 127.0.0.1:9 has not been reached for 0 s (")
    assert "Connection refused" in said
    assert said.endswith("). Waiting for up to 0.3 s")


def test_replicas_that_are_too_few_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("gradwire.hooks.local_sgd.replicas.REPORT_AFTER", 2.5)
    model = nn.Linear(2, 2)
    with MeetingPoint(dead_after=1.5) as point:  # it waits so long for members of an earlier group
        alone = Meeting(point.address, min_replicas=2, patience=4.0)
        with pytest.raises(RuntimeError, match=r"for 4 s: 1 of at least 2 replicas are here\. Start more"):
            LocalUpdates(model, torch.optim.SGD(model.parameters()), OneBit(), every=2, meeting=alone)
    assert caplog.messages == ["gradwire: no round yet: 1 of at least 2 replicas are here. Waiting for up to 4 s"]


@pytest.mark.parametrize("strategy", [Tracking(), Momentum()])
def test_strategies_that_newcomers_cannot_join_are_refused(strategy: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"a newcomer cannot take over.*Residual"):
        LocalUpdates(model, optimizer, OneBit(), every=2, meeting="127.0.0.1:9", error_feedback=strategy)


def test_another_model_is_refused() -> None:
    with world() as made:
        made.start()
        made.until(lambda: made.replicas[0].rounds >= 1)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ValueError, match=r"disagree on the model's parameters.*\[24, 12\].*\[2, 3\]"):
            LocalUpdates(model, optimizer, Identity(), every=5, meeting=made.point.address)
        settle(made)


def test_only_steps_that_no_round_has_counted_are_lost() -> None:
    with MeetingPoint() as point:
        point._membership._recovering = 0.0
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updates = LocalUpdates(model, optimizer, Identity(), every=4, meeting=point.address)
        tie: Any = updates._replicas

        def take_over() -> int:
            healed = Healed([flat.clone() for flat in tie.state._moving], [], [], [])
            updates._follow(Arrival(tie.view, tie._born, tie._name, "lost", healed, Progress(100, 21)))
            lost: int = tie.statistics.own_steps_lost
            return lost

        for _ in range(10):
            updates.step()
        assert take_over() == 2
        assert take_over() == 2
        updates.step()
        assert take_over() == 3
        updates.close()


def test_failures_count_anew_when_a_replica_is_gone() -> None:
    """Gloo tells of most deaths before the meeting point does: these are no failures of this replica's own."""
    with world(every=10000, meeting=None) as made:
        made.options["meeting"] = Meeting(made.point.address, wait_for=3)
        made.start(3)
        made.until(lambda: all(replica.trains for replica in made.replicas))
        left, *others = made.replicas
        for replica in others:
            replica.tie._failures = 3
        left.die()
        made.until(lambda: all(r.tie.view is not None and len(r.tie.view.members) == 2 for r in others))
        assert [replica.tie._failures for replica in others] == [0, 0]


def test_a_view_that_the_meeting_point_has_forgotten_ends() -> None:
    """A member stops in a round. The meeting point has a later view in use already, and says nothing of this one."""
    with world(every=2) as made:
        made.start(2)
        made.until(lambda: all(replica.rounds >= 2 for replica in made.replicas))
        stopped, waiting = made.replicas
        stopped.hold.clear()
        made.until(lambda: waiting.tie._under_way is not None and waiting.rounds > stopped.rounds)
        view = View(99, (waiting.tie.client.member,), 0, Board(99, lambda _: True))
        former, waiting.tie._next = waiting.tie.view, view
        waiting.tie._meeting = Meeting(made.point.address, patience=20)
        waiting.tie._await_round(view)
        assert waiting.tie._under_way is None
        assert former is not None
        assert former.broken is not None


@pytest.mark.parametrize("before", [2, 4], ids=["one comes", "one goes"])
def test_a_replica_may_leave_while_it_changes_views(before: int) -> None:
    """Its thread then makes no reducer of a view without a group: it would meet the ranks of the default group."""
    with world(every=2) as made:
        made.start(before)
        made.until(lambda: all(replica.rounds >= 2 for replica in made.replicas))
        (leaving, *_, last), groups = made.replicas, list[Any]()
        tie = leaving.tie
        former, open_view, warn = tie.view, tie._open_view, tie._warn_of_diverged

        def leave(*arguments: Any) -> None:
            leaving.dead = True  # its training raises
            tie.close()
            warn(*arguments)

        def opened(group: Any) -> Any:
            groups.append(group)
            return open_view(group)

        tie._warn_of_diverged, tie._open_view = leave, opened  # type: ignore[assignment,method-assign]
        if before == 2:
            made.start()
        else:
            last.ending = True
        made.until(lambda: groups and not tie._changing)
        assert None not in groups
        assert tie.view is former
        assert tie._next is not None
        assert tie._next.reducer is None
        others = [replica for replica in made.replicas if replica is not leaving and not replica.ending]
        made.until(lambda: all(r.trains and r.tie.view is not None and len(r.tie.view.members) == 2 for r in others))


def test_many_changes_leave_nothing_behind() -> None:
    """Threads, descriptors and views are gone after each leave, and so is whoever has left."""
    counts = list[tuple[int, int, int]]()
    with world() as made:

        def train(found: list[LocalUpdates], end: threading.Event) -> None:
            model = nn.Linear(5, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            updates = LocalUpdates(model, optimizer, OneBit(), every=2, meeting=made.point.address)
            found.append(updates)
            with contextlib.suppress(RuntimeError):
                while not end.is_set():
                    time.sleep(0.001)
                    updates.step()
            updates.close()

        def start() -> tuple[list[LocalUpdates], threading.Event, threading.Thread]:
            found, end = list[LocalUpdates](), threading.Event()
            thread = threading.Thread(target=train, args=(found, end), daemon=True)
            thread.start()
            made.until(lambda: found)
            return found, end, thread

        def rounds(found: list[LocalUpdates]) -> None:
            after = found[0].rounds + 2
            made.until(lambda: found[0].rounds >= after)

        staying = [start(), start()]
        for turn in range(24):
            found, end, thread = start()
            rounds(found)
            end.set()
            thread.join(20)
            del found, end, thread
            rounds(staying[0][0])
            if turn % 8 == 7:
                made.until(lambda: gc.collect() >= 0 and (not counts or threading.active_count() <= counts[0][0]), 20.0)
                views = sum(type(each) is View for each in gc.get_objects())
                counts.append((threading.active_count(), len(os.listdir("/proc/self/fd")), views))
        for _, end, thread in staying:
            end.set()
            thread.join(20)
    assert counts[-1] <= counts[0], counts


EVENTS = st.one_of(
    st.tuples(st.just("dies"), st.integers(0, 9), st.integers(0, 60)),
    st.tuples(st.sampled_from(POINTS), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("cut off"), st.integers(1, 7), st.integers(0, 40)),
    st.tuples(st.just("comes"), st.just(0), st.just(0)),
    st.tuples(st.just("stalls"), st.integers(0, 9), st.integers(0, 40)),
    st.tuples(st.just("meeting point restarts"), st.just(0), st.integers(0, 40)),
)
OPTIONS = st.fixed_dictionaries(
    {
        "exchange": st.sampled_from(sorted(CODECS)),
        "every": st.sampled_from([2, 4, 6]),
        "rounds": st.sampled_from(
            [
                Rounds(),
                Rounds(bucket_cap_mb=0.001),
                Rounds(fragments=2),
                Rounds(delay=1),
                Rounds(sync_until=7),
                Rounds(delay=1, keep_local=True),
                Rounds(mixing=0.3),
                Rounds(keep_unsent=True),
                Rounds(delay=1, keep_unsent=True),
                Rounds(keep_unsent=True, lengthen_steps=True),
            ]
        ),
        "error_feedback": st.sampled_from([Residual(), Residual(decay=0.9), Residual(dtype=torch.int8), False]),
        "outer": st.sampled_from([None, OuterSGD(0.7, 0.9)]),
        "entropy_coding": st.booleans(),
        # Every so many rounds; newcomers are in `step` then.
        "calls": st.sampled_from([None, ("consolidated_state_dict", 3), ("synchronise", 2), ("synchronise", 5)]),
    }
)


def churn(options: dict[str, Any], size: int, events: list[tuple[tuple[str, int, int], int]]) -> None:
    options = {name: value for name, value in options.items() if value is not None}
    if options["rounds"].keep_unsent and options["error_feedback"] in (False, Residual(decay=0.9)):
        options["error_feedback"] = Residual()
    LIVING.clear()
    with world(codec=CODECS[options["exchange"]](), **options) as made:
        made.start(size)
        made.until(lambda: all(replica.rounds >= 1 for replica in made.replicas))
        for (kind, which, number), later in events:
            alive = [replica for replica in made.replicas if not replica.dead]
            trained = [r for r in alive if r.trains and r.messages_left is None and r.dies is None]
            made.advance(later)
            if kind == "comes" and len(alive) < 7:
                made.start()
            elif kind == "dies" and len(trained) > 1:
                trained[which % len(trained)].die_at(number)
            elif kind in POINTS and len(trained) > 1:
                trained[which % len(trained)].dies = kind
                made.start()  # the others change views for it
            elif kind == "cut off":
                with made.cut([replica for i, replica in enumerate(trained) if which & 1 << i % 3]):
                    time.sleep(number / 100)
            elif kind == "stalls" and trained:
                held = trained[which % len(trained)]
                held.hold.clear()
                time.sleep(number / 100)
                held.hold.set()
            elif kind == "meeting point restarts":
                made.restart(number / 100)
        settle(made)


DRAWN = given(OPTIONS, st.integers(1, 5), st.lists(st.tuples(EVENTS, st.integers(0, 3)), max_size=6))
test_drawn_churn = settings(max_examples=12, phases=[Phase.generate])(DRAWN(churn))


@pytest.mark.soak
def test_drawn_churn_for_long() -> None:
    """`GRADWIRE_CHURN_EXAMPLES` says how many."""
    count, threads = int(os.environ.get("GRADWIRE_CHURN_EXAMPLES", "500")), threading.active_count()
    settings(max_examples=count, derandomize=False, phases=[Phase.generate], suppress_health_check=list(HealthCheck))(
        DRAWN(churn)
    )()
    deadline = time.monotonic() + 60  # connections to whoever has gone are given up after a time
    while threading.active_count() > threads + 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert threading.active_count() <= threads + 8
