"""What ranks agree on without a coordinator: as if there had been one, in one message's way."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gradwire.hooks.horovod as hvd
import horovod_latency
import pytest
import torch
from gradwire.hooks.horovod.consensus import eager_payloads, epoch_log
from gradwire.hooks.horovod.consensus.eager_payloads import Delivered
from gradwire.hooks.horovod.consensus.epoch_coordinator import EpochCoordinator
from gradwire.hooks.horovod.consensus.epoch_log import Entry, EpochLog, LogCallbacks
from gradwire.hooks.horovod.consensus.negotiation import Negotiator, Request
from gradwire.hooks.horovod.consensus.protocol import Agreement, ProtocolCallbacks
from gradwire.hooks.horovod.consensus.request_cache import RequestCache
from gradwire.hooks.horovod.runtime import context
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import Pool, on_ranks
from test_horovod_operations import equal, raised

Ranks = Callable[[int], Pool]


@dataclass(frozen=True)
class Op:
    """One line of a script. `same` differs where the ranks are to disagree; `waits`: before the next line."""

    key: str
    kind: str = "allreduce"
    same: int = 0
    fused: bool = True
    eager: bool = False
    waits: bool = True
    set_id: int = 0

    def request(self) -> Request:
        shape = [2] if self.eager else [2000]
        return {
            "key": self.key, "set": self.set_id, "kind": self.kind, "tensors": [["float32", shape]],
            "must_match": {"op": self.same}, "per_rank": {"applied_counts": []},
            "fuse": "f" if self.fused else None, "no_gradient": False,
        }  # fmt: skip


@dataclass
class Member:
    """A rank: its script, what it waits for, what its executor has to do."""

    script: deque[Op]
    under_way: set[str] = field(default_factory=set)
    blocked: str | None = None
    queue: deque[dict[str, Any]] = field(default_factory=deque)
    results: list[tuple[str, str]] = field(default_factory=list)
    runs: list[tuple[str, ...]] = field(default_factory=list)

    def end(self, key: str, result: str) -> None:
        assert key in self.under_way, f"{key} has ended twice, or was never submitted"
        self.under_way.remove(key)
        self.results.append((key, result))
        if self.blocked == key:
            self.blocked = None


class World:
    """Ranks without a network: messages of two ranks keep their order, and nothing else does. A run goes on once every
    member has come to it, as a collective does."""

    def __init__(self, scripts: Sequence[Sequence[Op]], order: random.Random, coordinator_only: bool = False) -> None:
        self.size = len(scripts)
        self._order = order
        self._links: dict[tuple[int | str, int | str], deque[Callable[[], None]]] = {}
        self.members = [Member(deque(script)) for script in scripts]
        self.negotiator = Negotiator(self.size, fusion_bytes=20_000)
        self.negotiator.sets[1] = tuple(range(self.size - 1)) if self.size > 2 else (0, 1)
        self.epochs = EpochCoordinator(self.negotiator)
        self.sides = [self._side(rank) for rank in range(self.size)]
        self.epochs.agreement = self.sides[0]
        self._coordinator_only = coordinator_only
        if coordinator_only:
            self.epochs.take_over([(rank, None) for rank in range(self.size)], 0)
            self.epochs._until_next = 10**9
            for side in self.sides:
                side._epoch_log.open = side._epoch_log.appending = False

    def _side(self, rank: int) -> Agreement:
        class Mesh:
            def __init__(self, world: World) -> None:
                self.rank, self._world = rank, world

            def send(self, to: int, text: dict[str, Any], data: bytes = b"") -> None:
                self._world._put(rank, to, lambda: self._world.sides[to].receive(rank, text, bytearray(data)))

        def ask(request: Request) -> None:
            self._put(rank, "epochs", lambda: self.epochs.hear(rank, request))

        callbacks = ProtocolCallbacks(
            ask,
            lambda message: self._follow(rank, message),
            lambda delivered: self._deliver(rank, delivered),
            lambda left, agreed: self._put(rank, "epochs", lambda: self.epochs.take_over(left, agreed)),
            lambda key: self._put(rank, "epochs", lambda: self.epochs.collect(key)),
        )
        return Agreement(Mesh(self), self.size, 20_000, callbacks)  # type: ignore[arg-type]

    def _put(self, source: int | str, target: int | str, action: Callable[[], None]) -> None:
        self._links.setdefault((source, target), deque()).append(action)

    def _follow(self, rank: int, message: dict[str, Any]) -> None:
        named = message.get("ops") or [{"key": message["key"], "info": message}]
        for item in named:
            if item["info"].get("eager"):
                self.sides[rank].discard(item["key"], item["info"]["eager"])
        if message["do"] == "fail":
            if message["key"] in self.members[rank].under_way:
                self.members[rank].end(message["key"], message["message"])
        else:
            self.members[rank].queue.append(message)

    def _deliver(self, rank: int, delivered: Delivered) -> None:
        problem = delivered.problem
        result = "done" if problem is None else f"{delivered.key}: {problem}"
        assert problem is not None or rank in delivered.payloads
        self.members[rank].end(delivered.key, result)

    def _say(self) -> None:
        for decision in self.epochs.decisions():
            for rank in decision.members:
                message = decision.message | ({"acknowledge": True} if rank == decision.acknowledge else {})
                self._put("epochs", rank, partial(self.sides[rank].follow, message))

    def _execute(self) -> bool:
        """Run what every member has come to; whether there was anything."""
        for member in self.members:
            if not member.queue:
                continue
            message = member.queue[0]
            keys, ranks = [item["key"] for item in message["ops"]], self.negotiator.sets[message["set"]]
            heads = [self.members[rank].queue[0] if self.members[rank].queue else None for rank in ranks]
            if all(head is not None and [item["key"] for item in head["ops"]] == keys for head in heads):
                for rank in ranks:
                    mine = self.members[rank].queue.popleft()
                    self.members[rank].runs.append(tuple(keys))
                    if "epoch" in mine:
                        self.sides[rank].done(mine["epoch"])
                    if mine.get("acknowledge"):
                        self._put(rank, "epochs", partial(self.negotiator.done, mine["set"]))
                    for key in keys:
                        if key in self.members[rank].under_way:
                            self.members[rank].end(key, "done")
                return True
        return False

    def _step(self, rank: int) -> None:
        member = self.members[rank]
        op = member.script[0]
        if op.key in member.under_way:  # a name of its own until it has ended
            member.blocked = op.key
            return
        member.script.popleft()
        member.under_way.add(op.key)
        if op.waits:
            member.blocked = op.key
        payload = b"xx" if op.eager and not self._coordinator_only else None
        self.sides[rank].submit(op.request(), self.negotiator.sets[op.set_id], payload)

    def play(self) -> list[list[tuple[str, str]]]:
        """Until nothing moves any more. What has ended on each rank, sorted."""
        looked = False
        while True:
            self._say()
            links = [link for link in self._links.values() if link]
            ranks = [r for r, member in enumerate(self.members) if member.script and member.blocked is None]
            choices: list[Any] = [*links, *ranks]
            if not choices:
                if self._execute():
                    continue
                if looked:
                    break
                looked = True
                self.epochs.look()
                continue
            looked = False
            chosen = self._order.choice(choices)
            if isinstance(chosen, int):
                self._step(chosen)
            else:
                chosen.popleft()()
                if self._order.random() < 0.3:
                    self._execute()
        return [sorted(member.results) for member in self.members]


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Op]]:
    """A few operations, over and over; some ranks change their order, or what they say of one."""
    size = draw(st.sampled_from([2, 3]))
    ops = [
        Op(
            f"op{i}",
            draw(st.sampled_from(["allreduce", "allreduce", "broadcast"])),
            fused=draw(st.booleans()),
            eager=draw(st.integers(0, 2)) == 0,
            waits=draw(st.integers(0, 3)) == 0,
            set_id=draw(st.sampled_from([0] * 7 + [1])),
        )
        for i in range(draw(st.integers(1, 5)))
    ]
    lines: list[list[Op]] = [[] for _ in range(size)]
    # A rank that joins while others know a tensor of another size than its own: whom it disagrees with depends on time.
    joins = draw(st.booleans())
    changes = ["none", "none", "none", "order", "word", "wait", *([] if joins else ["size"])]
    for _ in range(draw(st.integers(1, 5))):
        change = draw(st.sampled_from(changes))
        who = draw(st.integers(0, size - 1))
        place = draw(st.integers(0, len(ops) - 1))
        for rank in range(size):
            cycle = list(ops)
            if rank == who and change == "order":
                # Only where none of them waits for one that comes later elsewhere.
                cycle = [Op(**{**vars(op), "waits": False}) for op in reversed(cycle)]
            elif rank == who and change == "word":
                cycle[place] = Op(**{**vars(cycle[place]), "same": 1})
            elif rank == who and change == "size":
                cycle[place] = Op(**{**vars(cycle[place]), "eager": not cycle[place].eager})
            elif rank == who and change == "wait":
                cycle = [Op(**{**vars(op), "waits": True}) for op in cycle]
            lines[rank] += [op for op in cycle if op.set_id == 0 or rank < max(2, size - 1)]
    if joins:
        for rank in range(size):
            missed = draw(st.integers(0, 3))
            end = len(lines[rank]) - missed
            lines[rank] = [*lines[rank][: max(0, end)], Op("join", "join"), *([ops[0]] if ops[0].set_id == 0 else [])]
    return lines


def check(lines: list[list[Op]], number: int) -> World:
    """Play a script in an order drawn by `number`, and hold the outcome against the coordinator's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epoch_log, "EPOCH_SECONDS", -1.0)  # nothing moves any more when the worlds look
        got, expected = World(lines, random.Random(number)), World(lines, random.Random(number), coordinator_only=True)
        assert got.play() == expected.play()
        assert [member.script for member in got.members] == [member.script for member in expected.members]
        assert not any(member.queue for member in got.members), "a collective that not all ranks have come to"
    return got


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(scripts(), st.integers(0, 1 << 30))
def test_the_outcome_is_the_coordinators(lines: list[list[Op]], number: int) -> None:
    check(lines, number)


def runs_what_differs(patch: pytest.MonkeyPatch) -> None:
    agree = epoch_log.agree
    patch.setattr(epoch_log, "agree", lambda requests, members: (agree(requests, members)[0], None))


def answers_no_mark(patch: pytest.MonkeyPatch) -> None:
    def receive(self: Any, rank: int, epoch: int, line: Any) -> None:
        if line is not None:
            original(self, rank, epoch, line)

    original = epoch_log.EpochLog.receive
    patch.setattr(epoch_log.EpochLog, "receive", receive)


def hears_the_coordinator_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(epoch_log.EpochLog, "follow", lambda self, message: self._callbacks.follow(message))


def forgets_what_is_left(patch: pytest.MonkeyPatch) -> None:
    original = EpochCoordinator.take_over
    patch.setattr(EpochCoordinator, "take_over", lambda self, left, agreed: original(self, [], agreed))


def counts_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eager_payloads.EagerPayloads, "discard", lambda self, key, ranks: None)


def leaves_payloads_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eager_payloads.EagerPayloads, "release", lambda self, key, ranks: [])


def counts_no_joins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eager_payloads.EagerPayloads, "join", lambda self, rank: iter(()))


def is_patient_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(epoch_log.EpochLog, "look", lambda self: None)


def fuses_by_its_own_count(patch: pytest.MonkeyPatch) -> None:
    original = epoch_log.EpochLog._agree

    def agree(self: Any, lines: Any) -> None:
        if self.rank == 1:
            lines = {rank: line._replace(ends=True) for rank, line in lines.items()}
        original(self, lines)

    patch.setattr(epoch_log.EpochLog, "_agree", agree)


FAULTS = (
    runs_what_differs, answers_no_mark, hears_the_coordinator_too_early, forgets_what_is_left, counts_twice,
    leaves_payloads_alone, counts_no_joins, is_patient_for_ever, fuses_by_its_own_count,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    @settings(
        max_examples=1500, deadline=None, database=None, phases=[Phase.generate], derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(scripts(), st.integers(0, 1 << 30))
    def drawn(lines: list[list[Op]], number: int) -> None:
        check(lines, number)

    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
            drawn()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("eager", [True, False])
def test_what_repeats_takes_one_message_a_rank(size: int, eager: bool) -> None:
    cycle = [Op(f"op{i}", fused=False, eager=eager, waits=i == 2) for i in range(3)]
    world = check([cycle * 10] * size, 0)
    for side, member in zip(world.sides, world.members, strict=True):
        assert side.counts == {"messages": 30, "full_requests": 3}
        assert len(member.results) == 30
    assert not any(link for (source, _), link in world._links.items() if source == "epochs")
    assert ("epochs", 0) not in world._links, "the coordinator has had something to say"


def test_what_comes_while_enough_is_under_way_shares_a_buffer() -> None:
    cycle = [Op(f"op{i}", waits=False) for i in range(5)]
    world = World([cycle, cycle], random.Random(0))
    for rank in (0, 1):
        for _ in cycle:
            world._step(rank)
    world.play()
    assert world.members[0].runs == world.members[1].runs == [("op0",), ("op1",), ("op2", "op3"), ("op4",)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=40), st.integers(0, 4))
def test_requests_come_back_from_their_slots(numbers: list[int], capacity: int) -> None:
    sender, receiver = RequestCache(capacity), RequestCache(capacity)
    for place, number in enumerate(numbers):
        request = {"key": f"op{number}"}
        slot, text = sender.outgoing(json.dumps(request))
        assert receiver.incoming(1, slot, None if text is None else json.loads(text)) == request
        if capacity and number in numbers[max(0, place - capacity) : place]:
            assert text is None, "among the last few, and yet told in full"


# -- on ranks ----------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_operations_that_repeat_take_one_message_a_rank(rank: int) -> None:
    """Messages, requests in full and words to the coordinator that ten of each take once they are known."""
    hvd.shutdown()
    hvd.init()
    engine = context.world().engine
    asked: list[Any] = []
    send = engine._connection.send

    def told(text: dict[str, Any], data: Any = b"", sent: Any = None) -> bool:
        asked.append(text)
        return send(text, data, sent)

    engine._connection.send = told  # type: ignore[method-assign]
    model = torch.nn.Sequential(torch.nn.Linear(300, 50), torch.nn.Linear(50, 300))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=hvd.Compression.onebit()
    )
    rows = torch.ones(3000, 2)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()

    found = {}
    actions: dict[str, Callable[[], Any]] = {
        "small": lambda: hvd.allreduce(torch.ones(10), name="ten"),
        "large": lambda: hvd.alltoall(rows, name="rows"),
        "step": step,
    }
    for name, action in actions.items():
        for _ in range(3):
            action()
        before, asked_before = dict(engine.agreement.counts), len(asked)
        for _ in range(10):
            action()
        counts = engine.agreement.counts
        found[name] = (
            counts["messages"] - before["messages"], counts["full_requests"] - before["full_requests"],
            len(asked) - asked_before if rank else len(engine._coordinator.epochs._held),  # type: ignore[union-attr]
        )  # fmt: skip
    assert found == dict.fromkeys(("small", "large", "step"), (10, 0, 0))


def changed(rank: int) -> list[str]:
    """What the ranks hear when one changes an operation that has been repeated."""
    hvd.init()
    last = rank == hvd.size() - 1
    heard = []
    for size, changed_size in ((10, 11), (10, 5000), (5000, 10), (5000, 5001)):
        for _ in range(3):
            equal(hvd.allreduce(torch.ones(size), name="again"), torch.ones(size))
        other = torch.ones(changed_size if last else size)
        heard.append(raised(hvd.HorovodInternalError, partial(hvd.allreduce, other, name="again")))
        equal(hvd.allreduce(torch.ones(size), name="again"), torch.ones(size))
        # In the opposite order on one rank.
        handles = [hvd.allreduce_async(torch.ones(size) * n, name=f"n{n}") for n in ((2, 1) if last else (1, 2))]
        total = sum(hvd.synchronize(handle) for handle in handles)
        equal(total, torch.full((size,), 3.0))
    return heard


@pytest.mark.parametrize("world", [2, 4])
def test_a_change_is_heard_of_on_every_rank(ranks: Ranks, world: int) -> None:
    results = ranks(world).run(changed)
    assert all(heard == results[0] for heard in results)
    sizes = ((10, 11), (10, 5000), (5000, 10), (5000, 5001))
    for text, (size, other) in zip(results[0], sizes, strict=True):
        assert f"allreduce.again: ranks disagree on the shape: rank 0 has [{size}]" in text
        assert f"rank {world - 1} has [{other}]" in text


def alone() -> tuple[EpochLog, list[tuple[int, list[str]]]]:
    """Rank 1 of two, by itself, and what it was told to run: epoch, keys."""
    runs: list[tuple[int, list[str]]] = []
    nothing = lambda *_: None  # noqa: E731
    run = lambda epoch, ready: runs.append((epoch, [request["key"] for request, _ in ready]))  # noqa: E731
    return EpochLog(1, 2, 20_000, LogCallbacks(nothing, nothing, run, nothing, nothing)), runs


def test_what_all_agree_on_is_not_kept() -> None:
    """An epoch lasts as long as training does."""
    ledger, runs = alone()
    request = Op("a").request()
    for _ in range(1000):
        ledger.submit(request)
        ledger.receive(0, 0, Entry(request, True))
    assert runs == [(0, ["a"])] * 1000
    assert sum(len(log) for logs in ledger._logs.values() for log in logs) == 0


def test_an_epoch_that_begins_while_the_last_one_ends_has_its_own_entries() -> None:
    """The coordinator's word overtakes rank 0's last entries, and its first of the next epoch are here already."""
    ledger, runs = alone()
    old, new = Op("old").request(), Op("new").request()
    for request in (old, old):
        ledger.submit(request)
    ledger.receive(0, 0, Entry(old, True))
    ledger.follow({"do": "begin", "epoch": 1})
    ledger.receive(0, 1, Entry(new, True))
    ledger.receive(0, 0, None)
    assert (ledger.epoch, ledger.open) == (1, True)
    ledger.submit(new)
    assert runs == [(0, ["old"]), (1, ["new"])]


@on_ranks(4)
def test_a_clean_end_overtakes_nothing_that_was_announced(rank: int) -> None:
    """The sum of all ranks, of which rank 2 hears rank 1's part late, when rank 0 has got its result and left."""
    hvd.init()
    hvd.barrier()
    agreement = context.world().engine.agreement
    if rank == 2:
        receive = agreement.receive
        late = ThreadPoolExecutor(1)
        late.submit(time.sleep, 0.5)

        def hear(rank: int, message: dict[str, Any], payload: bytearray) -> None:
            if rank == 1:
                late.submit(receive, rank, message, payload)
            else:
                receive(rank, message, payload)

        agreement.receive = hear  # type: ignore[method-assign]
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    hvd.shutdown()
    assert float(total) == 4.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:OneBit")
@on_ranks(2)
def test_the_ways_to_agree_can_be_compared(rank: int) -> None:
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(horovod_latency, "CALLS", 1)
        for way in horovod_latency.WAYS:
            assert all(horovod_latency.turn(way).values())
