"""The meeting point's decisions hold their laws in every order of events, by a clock of the test's own."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
from typing import Any

import pytest
from gradwire.hooks.local_sgd.meeting.decisions import GAP, STRIKES, Membership
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

DEAD_AFTER = 4.0


class Simulated:
    """A replica: what it knows, and does by itself."""

    def __init__(self, token: int, least: int, wait_for: int, codec: str = "onebit") -> None:
        self.token = str(token)
        self.description = {"min_replicas": least, "wait_for": wait_for, "codec": codec}
        self.member: int | None = None
        self.next = self.seen = self.view = self.broken = 0
        self.members: list[int] = []
        self.pending: dict[int, list[int]] = {}
        self.named = 0
        self.link: int | None = None
        self.inbox: collections.deque[dict[str, Any] | None] = collections.deque()
        self.frozen = self.gone = False
        self.refused = ""
        self.waiting = ""
        self.disturbed = 0
        self.failures = 0  # of proposals with it

    def join(self) -> dict[str, Any]:
        return {
            "join": self.description, "member": self.member, "view": self.view, "token": self.token, "seen": self.seen,
            "members": self.members if self.view else [], "next": self.next, "name": [self.named, 0],
        }  # fmt: skip

    def freeze(self, frozen: bool, step: int) -> None:
        if frozen != self.frozen:
            self.frozen, self.disturbed = frozen, step

    def cut(self) -> None:
        self.link, self.pending = None, {}
        self.inbox.clear()


class World:
    """Replicas, the meeting point, and the laws, which are checked at every step."""

    def __init__(self, least: int = 1, wait_for: int = 1, dead_after: float = DEAD_AFTER) -> None:
        self.now = 100.0
        self.least, self.wait_for = least, wait_for
        self.point = Membership(self.now, dead_after)
        self.replicas: list[Simulated] = []
        self.links: dict[int, Simulated] = {}
        self.keys = itertools.count()
        self.steps = 0
        self.remembers = True  # the meeting point knows, or somebody told it, of all before
        self.proposed: dict[int, list[int]] = {}
        self.numbered: set[int] = set()
        self.connected: dict[int, set[int]] = collections.defaultdict(set)
        self.whole_at: dict[int, int] = {}
        self.spoiled: set[int] = set()
        self.met = False
        self.order: list[int] = []  # of the view that was last in use

    @property
    def alive(self) -> list[Simulated]:
        return [replica for replica in self.replicas if not replica.gone and not replica.refused]

    def add(self, codec: str = "onebit") -> Simulated:
        replica = Simulated(len(self.replicas), self.least, self.wait_for, codec)
        self.replicas.append(replica)
        self.connect(replica)
        return replica

    def connect(self, replica: Simulated) -> None:
        replica.cut()
        replica.link = next(self.keys)
        self.links[replica.link] = replica
        replica.disturbed = self.steps
        self.met |= replica.named > 0
        self.say(replica, replica.join())
        if replica.broken and replica.broken == replica.view:
            self.spoiled.add(replica.broken)
            self.say(replica, {"failed": replica.broken, "why": "a message did not come"})

    def say(self, replica: Simulated, message: dict[str, Any]) -> None:
        link = replica.link
        assert link is not None
        self.step(lambda: self.point.said(link, message, self.now))

    def close(self, replica: Simulated) -> None:
        """Its connection ends, on both sides."""
        replica.disturbed, link = self.steps, replica.link
        replica.cut()
        if link is not None and link in self.links:
            del self.links[link]
            self.step(lambda: self.point.closed(link, self.now))

    def restart(self) -> None:
        for replica in self.alive:
            replica.disturbed = self.steps
            replica.cut()
        self.links = {}
        if not self.remembers or not any(self.can_tell(replica) for replica in self.alive):
            self.forget()
        self.point = Membership(self.now, self.point.dead_after)
        self.met, self.order = False, []

    def can_tell(self, replica: Simulated) -> bool:
        """It knows of numbers after which a gap passes all that were given."""
        known = replica.seen + GAP > max(self.proposed, default=0)
        return replica.seen > 0 and known and replica.next + GAP > max(self.numbered, default=0)

    def forget(self) -> None:
        """Nobody is left that could tell the meeting point of these numbers."""
        self.numbered, self.proposed, self.connected = set(), {}, collections.defaultdict(set)
        self.whole_at, self.spoiled = {}, set()

    def step(self, act: Any) -> None:
        """Let the meeting point act; check what it has done, and put it on its way."""
        point, self.steps = self.point, self.steps + 1
        before = {view.number: view for view in (point.used, point.pending) if view is not None}
        used, known = point.used, dict(point._replicas)
        act()
        outbox, point.outbox = point.outbox, []
        if not point._replicas:
            self.met, self.order = False, []  # the next ones are a new group
        after = [view.number for view in (point.used, point.pending) if view is not None]
        told = collections.Counter((peer, message["void"]) for peer, message in outbox if message and "void" in message)
        for number, view in before.items():
            replaced = view is used and point.used is not None and point.used.number > number
            if number in after or replaced:
                continue
            for peer, replica in known.items():
                if replica.member in view.members and point.knows(peer):
                    assert told[peer, number] == 1, f"{peer} has not heard that view {number} is void"
            if view is used:
                since = self.whole_at[number]
                members = [replica for replica in self.replicas if replica.member in view.members]
                guilty = any(replica.frozen or replica.disturbed >= since for replica in members)
                assert guilty or number in self.spoiled, f"view {number} was fine"
            else:
                for peer, replica in known.items():
                    if peer in self.links:
                        self.links[peer].failures += replica.member in view.members
        numbers = [replica.member for replica in point._replicas.values() if replica.member >= 0]
        assert len(set(numbers)) == len(numbers)
        for peer, message in outbox:
            self.check(peer, message)
            if peer in self.links and "beat" not in (message or {}):
                if self.links[peer].link == peer:  # and not one that it has given up
                    self.links[peer].inbox.append(message)
                if message is None:
                    del self.links[peer]
        if point.used is not None and point.used.number not in self.whole_at:
            self.whole_at[point.used.number] = self.steps  # taken up again

    def check(self, peer: Any, message: dict[str, Any] | None) -> None:
        if message is None:
            return
        if "welcome" in message:
            replica = self.links[peer]
            if replica.member != message["welcome"] and self.remembers:
                assert message["welcome"] not in self.numbered, "a member's number was given before"
            self.numbered.add(message["welcome"])
        elif "view" in message and message["view"] not in self.proposed:
            number, members = message["view"], message["members"]
            assert len(set(members)) == len(members) >= (self.least if self.met else max(self.least, self.wait_for))
            assert set(members) <= {replica.member for replica in self.point.living}
            stay = [member for member in self.order if member in members]
            if self.order:
                assert members == [*stay, *sorted(set(members) - set(stay))], "members keep their order"
            if self.remembers:
                assert number > max(self.proposed, default=0), "a view's number was given before"
            self.proposed[number] = members
        elif "go" in message:
            number = message["go"]
            assert self.connected[number] == set(self.proposed[number]), "not all have connected"
            self.whole_at.setdefault(number, self.steps)
            self.met, self.order = True, self.proposed[number]
        elif "refused" in message and "disagree" not in message["refused"]:
            replica, used = self.links[peer], self.point.used
            assert replica.failures >= STRIKES
            assert used is not None
            assert replica.member not in used.members

    def hear(self, replica: Simulated) -> None:
        """Take the next message."""
        message = replica.inbox.popleft()
        if message is None:
            replica.cut()
        elif "welcome" in message:
            replica.member, replica.next = message["welcome"], max(replica.next, message["next"])
        elif "view" in message:
            number = message["view"]
            assert number > replica.seen, "numbers must increase for each replica"
            assert replica.member in message["members"]
            replica.seen, replica.pending = number, replica.pending | {number: message["members"]}
            replica.next = max(replica.next, message["next"])
        elif "go" in message:
            number = message["go"]
            replica.view, replica.members, replica.named = number, replica.pending[number], number
            replica.pending = {}
        elif "void" in message:
            replica.pending = {n: who for n, who in replica.pending.items() if n != message["void"]}
            if message["void"] == replica.view:
                replica.view = 0
        elif "refused" in message:
            replica.refused = message["refused"]
            replica.cut()
        elif "waiting" in message:
            replica.waiting = message["waiting"]

    def answer(self, replica: Simulated, works: bool = True) -> None:
        """Say of the last proposal that it stands, or that it failed."""
        number = max(replica.pending)
        if works:
            self.connected[number].add(-1 if replica.member is None else replica.member)
            self.say(replica, {"connected": number})
        else:
            self.spoiled.add(number)
            self.say(replica, {"failed": number, "why": "no route to host"})

    def advance(self, seconds: float) -> None:
        """Let time pass: living replicas beat, the meeting point acts when it says so."""
        end, acts = self.now + seconds, 0
        while True:
            due = self.point.deadline(self.now)
            beat = float(int(self.now) + 1)
            self.now = min(end, beat, end if due is None else due)
            if self.now == beat:
                for replica in self.alive:
                    if replica.link in self.links and not replica.frozen:
                        self.say(replica, {"beat": True})
            if due is not None and due <= self.now:
                acts += 1
                assert acts < 100 + 50 * seconds, "it is busy without an end"
                self.step(lambda: self.point.tick(self.now))
            if self.now >= end:
                return

    def settle(self, seconds: float, cannot: Any = lambda replica, members: False) -> None:
        """Replicas do all that they should, for some time."""
        end = self.now + seconds
        while self.now < end:
            for replica in self.alive:
                if replica.frozen:
                    continue
                if replica.link is None:
                    self.connect(replica)
                elif replica.link not in self.links and not replica.inbox:
                    replica.cut()
                while replica.inbox:
                    self.hear(replica)
                if replica.pending and not replica.refused:
                    number = max(replica.pending)
                    if cannot(replica, replica.pending[number]):
                        self.answer(replica, works=False)
                        replica.pending.clear()
                    elif replica.member not in self.connected[number]:
                        self.answer(replica)
            self.advance(0.05)

    def compare_beliefs(self) -> None:
        """Replicas believe what the meeting point does, as soon as they have heard all that is on its way to them."""
        for replica in self.alive if self.point._recovering is None else ():
            if replica.link is None or not self.point.knows(replica.link):
                continue
            heard = copy.copy(replica)
            heard.inbox = replica.inbox.copy()
            while heard.inbox:
                self.hear(heard)
            used, pending = (
                view.number if view is not None and heard.member in view.members else 0
                for view in (self.point.used, self.point.pending)
            )
            assert (heard.view, max(heard.pending, default=0)) == (used, pending)

    def agree(self) -> None:
        """All living replicas are in one view, if they are enough."""
        alive = self.alive
        if len(alive) < (self.least if self.met else max(self.least, self.wait_for)):
            assert self.point.used is None
            assert all("replicas are here" in replica.waiting for replica in alive)
            return
        if not alive:
            return
        used = self.point.used
        assert used is not None, (self.now, self.point.news[-12:])
        assert set(used.members) == {replica.member for replica in alive}
        assert {replica.view for replica in alive} == {used.number}
        assert used.number not in self.spoiled
        assert self.point.pending is None


class Orders(RuleBasedStateMachine):
    """Every order of events. At its end, replicas answer, and must come together."""

    @initialize(least=st.integers(1, 2), wait_for=st.integers(1, 3), remembers=st.booleans(), members=st.integers(0, 5))
    def start(self, least: int, wait_for: int, remembers: bool, members: int) -> None:
        self.world = World(least, max(least, wait_for))
        self.world.remembers = remembers
        for _ in range(members):
            self.world.add()
        if members:
            self.world.settle(DEAD_AFTER + 1)

    def pick(self, index: int) -> Simulated:
        return self.world.alive[index % len(self.world.alive)]

    some = precondition(lambda self: bool(self.world.alive))
    index = st.integers(0, 7)

    @precondition(lambda self: len(self.world.alive) < 6)
    @rule()
    def join(self) -> None:
        self.world.add()

    @precondition(lambda self: self.world.point._reference is not None and len(self.world.replicas) < 12)
    @rule()
    def join_with_another_codec(self) -> None:
        assert "disagree on codec: the group has onebit" in self.refused(self.world.add("topk"))

    def go(self, replica: Simulated) -> None:
        replica.gone, replica.disturbed = True, self.world.steps
        if self.world.point._recovering is not None and replica.link not in self.world.links:
            self.world.remembers = False  # it might have been the last that could tell
            self.world.forget()

    def refused(self, replica: Simulated) -> str:
        while replica.inbox:
            self.world.hear(replica)
        return replica.refused

    @some
    @rule(index=index)
    def die(self, index: int) -> None:
        replica = self.pick(index)
        self.go(replica)
        self.world.close(replica)

    @some
    @rule(index=index)
    def leave(self, index: int) -> None:
        replica = self.pick(index)
        self.go(replica)
        if replica.link in self.world.links:
            self.world.say(replica, {"leave": True})

    @some
    @rule(index=index)
    def freeze_or_thaw(self, index: int) -> None:
        replica = self.pick(index)
        replica.freeze(not replica.frozen, self.world.steps)

    @some
    @rule(index=index, noticed=st.booleans())
    def lose_the_connection(self, index: int, noticed: bool) -> None:
        replica = self.pick(index)
        if noticed:
            self.world.close(replica)
        else:
            replica.disturbed = self.world.steps
            replica.cut()

    @some
    @rule(index=index)
    def connect_again(self, index: int) -> None:
        if self.pick(index).link not in self.world.links:
            self.world.connect(self.pick(index))

    @some
    @rule(index=index, count=st.integers(1, 20))
    def hear(self, index: int, count: int) -> None:
        replica = self.pick(index)
        while count and replica.inbox and not replica.frozen:
            self.world.hear(replica)
            count -= 1

    @some
    @rule()
    def all_hear_and_answer(self) -> None:
        for replica in self.world.alive:
            while replica.inbox and not replica.frozen:
                self.world.hear(replica)
        for replica in self.world.alive:
            if replica.pending and replica.link in self.world.links and not replica.frozen:
                self.world.answer(replica)

    @some
    @rule(index=index, works=st.sampled_from((True, True, False)))
    def answer(self, index: int, works: bool) -> None:
        replica = self.pick(index)
        if replica.pending and replica.link in self.world.links and not replica.frozen:
            self.world.answer(replica, works)

    @some
    @rule(index=index)
    def fail_in_use(self, index: int) -> None:
        replica = self.pick(index)
        if replica.view:
            replica.broken = replica.view
            self.world.spoiled.add(replica.view)
            if replica.link in self.world.links:
                self.world.say(replica, {"failed": replica.view, "why": "a message did not come"})

    def let_somebody_tell(self) -> None:
        """Before time passes after a restart."""
        world = self.world
        if world.remembers and world.point._recovering is not None:
            for replica in [replica for replica in world.alive if world.can_tell(replica)][:1]:
                replica.freeze(False, world.steps)
                if replica.link not in world.links:
                    world.connect(replica)

    @rule(seconds=st.sampled_from((0.05, 0.2, 1.0, 3.0, 6.0)))
    def wait(self, seconds: float) -> None:
        self.let_somebody_tell()
        self.world.advance(seconds)

    @rule(back=st.permutations(range(6)), count=st.integers(0, 6))
    def restart(self, back: list[int], count: int) -> None:
        """Some come back at once, in any order."""
        self.world.restart()
        for index in back[:count]:
            if index < len(self.world.alive):
                self.world.connect(self.world.alive[index])

    @some
    @rule(seconds=st.sampled_from((0.1, 0.5, 1.5)))
    def go_on(self, seconds: float) -> None:
        """Whoever is not frozen does what it should."""
        self.let_somebody_tell()
        self.world.settle(seconds)

    @invariant()
    def beliefs(self) -> None:
        if hasattr(self, "world"):
            self.world.compare_beliefs()

    @invariant()
    def deadline_is_not_past(self) -> None:
        if hasattr(self, "world"):
            due = self.world.point.deadline(self.world.now)
            assert due is None or due >= self.world.now

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for replica in self.world.alive:
                replica.freeze(False, self.world.steps)
            for _ in range(20):
                self.world.settle(1.0)
                with contextlib.suppress(AssertionError):
                    self.world.agree()
                    return
            self.world.agree()


TestOrders = Orders.TestCase
TestOrders.settings = settings(max_examples=100, stateful_step_count=30)


def started(*, members: int, **options: Any) -> World:
    """A group in use."""
    world = World(**options)
    for _ in range(members):
        world.add()
    world.settle(DEAD_AFTER + 1)
    world.agree()
    return world


def test_a_replica_that_nobody_reaches_is_refused_and_disturbs_nobody() -> None:
    """Its two fellow newcomers, which came at the same time, get in."""
    world = started(members=3)
    assert world.point.used is not None
    first = world.point.used
    lonely = [world.add() for _ in range(3)][1]
    seen = set()

    def cannot(replica: Simulated, members: list[int]) -> bool:
        seen.add(world.point.used.number if world.point.used else 0)
        return lonely.member in members and len(members) > 1

    world.settle(30, cannot)
    assert "no route to host" in lonely.refused
    assert f"member {lonely.member} could not be connected" in lonely.refused
    assert 0 not in seen
    assert len(world.alive) == 5
    assert world.point.used.number > first.number
    world.agree()


def test_survivors_go_on_before_a_newcomer_that_nobody_reaches() -> None:
    world = started(members=3)
    lonely = world.add()
    world.advance(0.3)
    victim = world.replicas[0]
    victim.gone = True
    world.close(victim)
    world.settle(30, lambda replica, members: lonely.member in members and len(members) > 1)
    assert lonely.refused
    world.agree()


def test_after_a_restart_nothing_changes_if_all_members_come_back() -> None:
    """At once, and whatever order they come in; a newcomer then gets a number that no earlier meeting point gave."""
    world = started(members=3)
    number, taken = max(world.proposed), set(world.numbered)
    world.restart()
    for replica in reversed(world.alive):
        world.connect(replica)
    world.settle(0.1)
    assert world.point.used is not None
    assert world.point.used.number == number
    assert set(world.proposed) == {number}
    newcomer = world.add()
    world.settle(1)
    assert newcomer.member not in taken
    world.agree()


STATES = "in it", "in it", "in the one before", "void", "fails", "gone"


@given(
    states=st.lists(st.sampled_from(STATES), min_size=2, max_size=4),
    order=st.permutations(range(5)),
    newcomer=st.integers(0, 6),
    pause=st.sampled_from((0.0, 0.3, 0.7)),
)  # fmt: skip
@settings(max_examples=60)
def test_members_that_come_back_from_different_states_meet(
    states: list[str], order: list[int], newcomer: int, pause: float
) -> None:
    """After a restart, in any order and in time. Some had not heard of the last view, or had heard that it is void."""
    world = started(members=len(states))
    world.add()
    world.settle(0.3)
    world.advance(0.3)
    for replica in world.alive:
        while replica.inbox and "go" not in (replica.inbox[0] or {}):
            world.hear(replica)
        if replica.pending:
            world.answer(replica)
    for replica, state in zip(world.replicas, [*states, "in it"], strict=True):
        while replica.inbox and state != "in the one before":
            world.hear(replica)
        replica.gone = state == "gone"
        replica.view = 0 if state == "void" else replica.view
        if state == "fails":
            replica.broken = replica.view
            world.spoiled.add(replica.view)
    last = max(world.proposed)
    world.restart()
    same = len({(replica.view, replica.gone, replica.broken) for replica in world.replicas}) == 1
    for place, index in enumerate(order):
        if place == newcomer:
            world.add()
        if index < len(world.replicas) and not world.replicas[index].gone and world.replicas[index].link is None:
            world.connect(world.replicas[index])
            world.compare_beliefs()
        world.advance(pause if index else 0.0)
        world.compare_beliefs()
    world.settle(DEAD_AFTER + 2)
    world.agree()
    assert (max(world.proposed) == last) == (same and newcomer > 4)


def test_a_member_that_connects_again_before_its_loss_is_noticed_keeps_the_view() -> None:
    """But not a proposal, which it has given up."""
    world = started(members=2)
    used, member = world.point.used, world.replicas[0]
    member.cut()
    world.connect(member)
    world.compare_beliefs()
    world.settle(1)
    assert world.point.used is used
    world.add()
    world.advance(0.3)
    assert world.point.pending is not None
    member.cut()
    world.connect(member)
    world.compare_beliefs()
    assert world.point.used is used
    world.settle(1)
    world.agree()


def test_a_member_that_comes_back_after_its_loss_hears_that_its_view_is_void() -> None:
    world = started(members=2)
    member, number = world.replicas[0], max(world.proposed)
    world.close(member)
    assert member.view == number
    world.connect(member)
    assert {"welcome": 0, "next": 2} in member.inbox
    world.compare_beliefs()
    world.settle(1)
    world.agree()


def test_a_view_in_use_that_fails_is_replaced_after_a_short_grace() -> None:
    world = started(members=3)
    number, member = max(world.proposed), world.replicas[0]
    world.spoiled.add(number)
    world.say(member, {"failed": number, "why": "a message did not come"})
    assert world.point.used is None
    assert world.point.pending is None
    world.compare_beliefs()
    world.advance(0.1)
    assert world.point.pending is not None
    world.settle(0.2)
    world.agree()


def test_a_number_that_was_given_again_is_changed() -> None:
    """The meeting point was started again, and heard of nobody until newcomers had begun."""
    world = started(members=1)
    old = world.replicas[0]
    world.restart()
    world.remembers = False
    world.forget()
    newcomer = world.add()
    world.advance(DEAD_AFTER + 1)
    assert world.point.living[0].member == old.member == 0
    world.connect(old)
    world.settle(1)
    assert old.member != newcomer.member
    world.agree()


def test_a_proposal_that_is_not_answered_is_void_after_a_time() -> None:
    world = started(members=2)
    used, newcomer = world.point.used, world.add()
    world.advance(0.3)
    assert world.point.pending is not None
    number = world.point.pending.number
    for replica in world.replicas[:2]:
        while replica.inbox:
            world.hear(replica)
        world.answer(replica)
    world.advance(9.5)
    assert world.point.pending.number == number
    world.advance(0.5)
    assert world.point.used is used
    assert {"void": number, "why": "members [2] did not connect within 10 s"} in newcomer.inbox
    world.settle(1)
    world.agree()


GOOD = Simulated(0, 1, 1).join()


@pytest.mark.parametrize(
    "message",
    [
        {}, {"join": 3}, GOOD | {"member": -1}, GOOD | {"member": True}, GOOD | {"view": 3}, GOOD | {"members": ["a"]},
        GOOD | {"view": 3, "member": 1, "members": [1, 1]}, GOOD | {"seen": "x"}, GOOD | {"name": [1]},
        GOOD | {"join": {"min_replicas": 1}}, GOOD | {"token": None}, {"connected": "x"}, {"failed": 1},
        {"post": 1, "key": 2, "value": ""}, {"connected": -1},
    ],
    ids=str,
)  # fmt: skip
def test_rubbish_raises_and_changes_nothing(message: dict[str, Any]) -> None:
    world = started(members=1)
    before = (world.point.used, world.point.living, world.point.deadline(world.now))
    link = "stranger" if "join" in message else world.replicas[0].link
    with pytest.raises(ValueError):
        world.point.said(link, message, world.now)
    assert before == (world.point.used, world.point.living, world.point.deadline(world.now))
    assert not world.point.outbox
