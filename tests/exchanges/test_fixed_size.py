"""`union` and `split` whose rows have a fixed size, where no host may read: step after step, against what they are to
do, written down entry by entry; on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import training
from gradwire.benchmarks.common.in_process import World as InProcessWorld
from gradwire.compress import TopK, new_draw
from gradwire.compress.backends.partition import Partition
from gradwire.compress.feedback.base import RESIDUAL, Feedback, FeedbackState
from gradwire.compress.feedback.momentum import MOMENTUM, Momentum
from gradwire.compress.feedback.residual import NOTHING, server_state
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.compress.formats.layout import Slot
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.ports import Work, drive
from gradwire.hooks.core.bucket import Bucket
from gradwire.hooks.exchanges import BucketSpec, ExchangeArgs, Hierarchical
from gradwire.hooks.exchanges.fixed_base import FixedSizeExchange
from gradwire.hooks.exchanges.fixed_split import FixedSizeSplit
from gradwire.hooks.exchanges.fixed_union import FixedSizeUnion
from gradwire.hooks.network import cost
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_on_cpu import DEVICE, Schedule, World, on_gpu, read
from nccl_on_cpu.training import same_bits
from often import by_time
from torch import Tensor

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
EXCHANGES: dict[str, type[FixedSizeExchange]] = {"union": FixedSizeUnion, "split": FixedSizeSplit}


@dataclass(frozen=True)
class Case:
    """Some steps of one bucket.

    Attributes:
        kind: of what gradients hold.
        wild: how many elements are not finite, on one rank, in the step before the last.
    """

    exchange: str
    ranks: int
    numel: int
    extra: int
    density: float
    values: torch.dtype
    kind: str
    feedback: bool = True
    wild: int = 0
    steps: int = 3
    seed: int = 0
    codec: TopK = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", TopK(self.density, values=self.values))

    def gradient(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed * 31 + step) * 17 + rank)
        x = torch.randn(self.numel, generator=generator)
        if self.kind == "ties":
            x = x.round()
        if self.kind == "alike":
            x = torch.randn(self.numel, generator=torch.Generator().manual_seed(self.seed)) + 0.01 * x
        if self.kind == "one rank":
            x *= rank == 0
        if self.kind == "one owner":  # so that rows overflow
            turn = torch.tensor(step)
            x[owner_of(self.numel, self.ranks, turn) == 0] *= 1e3
        if self.kind == "parting" and step < self.steps - 1:  # so that a union outgrows its room
            x = torch.randn(self.numel, generator=torch.Generator().manual_seed(self.seed))
        if self.wild and step == self.steps - 2 and rank == self.seed % self.ranks:
            x[: self.wild] = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.arange(self.wild)[: self.numel] % 3]
        return x


def owner_of(numel: int, ranks: int, turn: Tensor) -> Tensor:
    partition = Partition(numel, ranks, CPU)
    return partition.keys(torch.arange(numel), turn) // (partition.span + 1)


@dataclass
class Step:
    """Of one rank: what it had, what it got and what it keeps."""

    gradient: Tensor
    before: Tensor
    out: Tensor
    after: Tensor
    extra: Tensor
    momentum: Tensor
    capacity: int
    status: list[int]
    received: int


def run(
    case: Case,
    schedule: Schedule | None = None,
    strategy: Feedback | None = None,
    alter: Callable[[FixedSizeExchange, int], None] | None = None,
) -> list[list[Step]]:
    """Of every rank, its steps: on CPUs, or with a schedule on GPUs that are not there, over NCCL.

    Args:
        strategy: what is kept, where that is more than a residual.
        alter: given each rank's exchange and rank.
    """
    device, ranks = CPU if schedule is None else DEVICE, tuple(range(case.ranks))

    def train(world: World, rank: int) -> list[Step]:
        carrier = world.words_of(ranks) if schedule is None else world.communicator(ranks)
        group = Group(carrier.member(rank), ranks).channel("test")
        exchange = EXCHANGES[case.exchange](case.codec, case.numel, case.extra, device, group)
        if alter is not None:
            alter(exchange, rank)
        residual, momentum = torch.zeros(2, case.numel, device=device)
        feedback, steps = server_state(residual) if case.feedback else NOTHING, []
        if strategy is not None:
            feedback = FeedbackState(strategy, {RESIDUAL: residual, MOMENTUM: momentum})
        place: Callable[[Tensor], Tensor] = Tensor.clone if schedule is None else on_gpu
        for number in range(case.steps):
            before, grad = read(residual), case.gradient(rank, number)
            given, out, extra = (
                place(x) for x in (grad, torch.full_like(grad, torch.nan), torch.ones(case.extra) * rank)
            )
            with world.machine.never_waiting():
                draw = new_draw(0, number, rank, device)
                drive(exchange.reduce(ExchangeArgs(given, out, extra, feedback, (), draw, draw.clone(), number)))
            mean, after, sums, masked = (read(x) for x in (out, residual, extra, momentum))
            status, received = read(torch.stack(exchange.counts()).sum(0)).tolist(), exchange.bytes_received
            steps.append(Step(grad, before, mean, after, sums, masked, exchange.capacity, status, received))
        return steps

    return World(case.ranks, schedule).run(train)


def selected(case: Case, x: Tensor) -> dict[int, np.float32]:
    """The k largest, by index."""
    keys = x.numpy().view(np.uint32) & 0x7FFFFFFF
    order = np.argsort(~keys, kind="stable")[: case.codec.k(case.numel)]
    return {int(i): x.numpy()[i] for i in sorted(order) if keys[i]}


def expected(case: Case, steps: list[Step], number: int) -> tuple[Tensor, list[Tensor]]:
    """What one step is to hand out, and what each rank is to keep; with values of float32, all of them finite."""
    totals = [step.gradient + step.before for step in steps]
    mine = [selected(case, total) for total in totals]
    kept = [total.numpy().copy() for total in totals]
    out, scale = np.zeros(case.numel, np.float32), np.float32(1.0 / case.ranks)
    if case.exchange == "union":
        for i in sorted({i for entries in mine for i in entries})[: steps[0].capacity]:
            total = np.float32(0)
            for entries, part in zip(mine, kept, strict=True):  # what waits goes too, if there is such
                total, part[i] = total + (part[i] if case.feedback else entries.get(i, np.float32(0))), 0
            out[i] = total * scale
        return torch.from_numpy(out), [torch.from_numpy(part) for part in kept]
    sent, k = [set[int]() for _ in mine], case.codec.k(case.numel)
    for owner in range(case.ranks):
        owned = owner_of(case.numel, case.ranks, torch.tensor(number)) == owner
        sums: dict[int, np.float32] = {}
        for rank, entries in enumerate(mine):
            for i in [i for i in entries if owned[i]][: steps[0].capacity]:
                sums[i] = sums.get(i, np.float32(0)) + entries[i]
                sent[rank].add(i)
        means = {i: total * scale for i, total in sums.items() if total * scale != 0}
        share = min(-(-k // case.ranks), -(-case.numel // case.ranks))
        for i in sorted(sorted(means), key=lambda i: -abs(means[i]))[:share]:
            out[i] = means[i]
            for rank, part in enumerate(kept):
                if i in sent[rank]:
                    part[i] = 0
    return torch.from_numpy(out), [torch.from_numpy(part) for part in kept]


def check(case: Case) -> list[list[Step]]:
    """All laws."""
    found = run(case)
    for number in range(case.steps):
        steps = [steps[number] for steps in found]
        first = steps[0]
        assert all(torch.equal(step.out.view(torch.int32), first.out.view(torch.int32)) for step in steps), "replicas"
        assert all((step.extra - (case.ranks - 1) / 2).abs().max() < 1e-6 for step in steps if case.extra)
        assert all(step.status[0] == 0 for step in steps), "nothing is skipped"
        wild = any(not step.gradient.isfinite().all() for step in steps)
        seen = [steps[number - 1].status[1] if number else 0 for steps in found]
        assert all((step.status[1] > before) == wild for step, before in zip(steps, seen, strict=True))
        assert all(step.after.isfinite().all() for step in steps), "a residual stays clean"
        if wild:
            assert not first.out.isfinite().all(), "what is not finite is seen"
            continue
        if case.values == torch.float32:
            out, kept = expected(case, steps, number)
            assert torch.equal(first.out, out)
            assert all(torch.equal(step.after, part) for step, part in zip(steps, kept, strict=True) if case.feedback)
        if not case.feedback:
            continue
        had = sum((step.gradient.double() + step.before.double() for step in steps), torch.zeros(()))
        has = case.ranks * first.out.double() + sum((step.after.double() for step in steps), torch.zeros(()))
        scale = max(float((step.gradient + step.before).abs().max()) for step in steps)
        assert (had - has).abs().max() <= 4e-6 * scale * case.ranks, "something is lost"
    return found


def cases_of(numel: int) -> st.SearchStrategy[Case]:
    """Of up to so many elements."""
    return st.builds(
        Case,
        exchange=st.sampled_from(sorted(EXCHANGES)),
        ranks=st.integers(1, 4),
        numel=st.one_of(st.integers(1, 40), st.integers(41, numel)),
        extra=st.sampled_from([0, 0, 3]),
        density=st.sampled_from([0.01, 0.05, 0.2, 0.5, 1.0]),
        values=st.sampled_from(DTYPES),
        kind=st.sampled_from(["normal", "ties", "alike", "one rank", "one owner", "parting"]),
        feedback=st.sampled_from([True, True, True, False]),
        wild=st.sampled_from([0, 0, 0, 1, 5, 60]),
        steps=st.integers(2, 4),
        seed=st.integers(0, 99),
    )


@settings(max_examples=by_time(20, 400), deadline=None)
@given(cases_of(900))
def test_nothing_is_lost_and_every_entry_goes_its_way(case: Case) -> None:
    check(case)


schedules = st.one_of(st.just(Schedule()), st.builds(Schedule, st.none(), st.integers(0, 99)))


@settings(max_examples=by_time(3, 100), deadline=None)
@given(cases_of(by_time(60, 900)), schedules)
def test_no_gpu_is_waited_for(case: Case, schedule: Schedule) -> None:
    """No step waits for the device, and what comes out is what CPUs make, to the bit."""
    case = replace(case, steps=by_time(2, case.steps))
    for ours, theirs in zip(run(case), run(case, schedule), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert same_bits(a.out, b.out)
            assert same_bits(a.after, b.after)
            assert same_bits(a.extra, b.extra)
            assert (a.capacity, a.status, a.received) == (b.capacity, b.status, b.received)


def test_owners_go_round_with_codecs_that_draw_nothing() -> None:
    """By the step's number, which is written to the device only where it is read."""
    slots = (Slot("a", 0, (60,), (1,)),)
    group = InProcessWorld(1).groups[0]
    made = TopK(0.1), 60, 0, CPU, group
    exchanges = FixedSizeSplit(*made), Hierarchical(FixedSizeSplit, *made, group), FixedSizeUnion(*made)
    for exchange, expected in zip(exchanges, ([5, 6], [5, 6], [0, 0]), strict=True):
        bucket = Bucket(0, [], slots, frozenset(), torch.zeros(60))
        bucket.use(exchange, 0, 0)
        seen = []
        for step in (5, 6):
            drive(bucket.reduce(torch.ones(60), FeedbackStore(None), False, step))
            seen.append(int(bucket.operands.draw[1]))
        assert seen == expected


def test_what_does_not_fit_is_sent_later() -> None:
    """Rows that overflow, and a union that outgrows its room: drawn, and seen to happen."""
    case = Case("split", 3, 600, 0, 0.2, torch.float32, "one owner", steps=4)
    for steps in check(case):
        first = steps[0]
        mine = selected(case, first.gradient)
        assert not any(owner_of(case.numel, case.ranks, torch.tensor(0))[list(mine)])
        assert first.capacity < len(mine)
        assert int((first.after[list(mine)] != 0).sum()) >= len(mine) - first.capacity
    case = replace(case, exchange="union", kind="parting")
    last = [steps[-1] for steps in check(case)]
    union = {i for step in last for i in selected(case, step.gradient + step.before)}
    assert last[0].capacity < len(union)
    assert int((last[0].out != 0).sum()) == last[0].capacity


class Hidden(Case):
    """One rank's last gradient has a NaN, where there is no room for it."""

    def gradient(self, rank: int, step: int) -> Tensor:
        x = super().gradient(rank, step)
        if rank == 1 and step == self.steps - 1:
            owners = owner_of(self.numel, self.ranks, torch.tensor(step))
            x[int((owners == 0).nonzero()[-1])] = torch.nan  # the last in the row that overflows
        return x


@pytest.mark.parametrize(("exchange", "kind"), [("split", "one owner"), ("union", "parting")])
def test_a_nan_for_which_there_is_no_room_is_seen(exchange: str, kind: str) -> None:
    check(Hidden(exchange, 3, 600, 0, 0.2, torch.float32, kind, steps=3))


@pytest.mark.parametrize("exchange", sorted(EXCHANGES))
@pytest.mark.parametrize("kind", ["one owner", "parting", "normal"])
def test_momentum_is_masked_where_entries_have_arrived(exchange: str, kind: str) -> None:
    """And stays with those that are sent later."""
    case = Case(exchange, 3, 600, 0, 0.2, torch.float32, kind, steps=4)
    for steps in run(case, strategy=Momentum()):
        momentum = torch.zeros(case.numel)
        for step in steps:
            entered = momentum * 0.9 + step.gradient
            arrived = torch.zeros(case.numel, dtype=torch.bool)
            arrived[list(selected(case, entered + step.before))] = True
            if exchange == "union":  # all have sent what they had
                arrived = step.out != 0
            arrived &= step.after == 0
            assert arrived.any()
            momentum = step.momentum
            assert torch.equal(momentum, torch.where(arrived, 0.0, entered))


@pytest.mark.parametrize("exchange", sorted(EXCHANGES))
def test_what_cannot_be_right_is_skipped_alike_on_all_ranks(exchange: str) -> None:
    """Whatever one rank sends: nothing is written elsewhere, and replicas agree."""
    case = Case(exchange, 3, 500, 0, 0.1, torch.float32, "normal", seed=1, steps=3)

    def alter(wrong: FixedSizeExchange, rank: int) -> None:
        generator, sent = torch.Generator().manual_seed(1), [wrong.row]
        if isinstance(wrong, FixedSizeSplit):
            sent.append(wrong.rows_for(server_state(torch.zeros(0))).sent)
        for port in wrong.ports if rank == 1 else []:

            def scrambled(start: Callable[[], Work] = port.start) -> Work:
                for wire in sent:
                    wire.random_(generator=generator)
                return start()

            port.start = scrambled  # type: ignore[method-assign]

    found = run(case, alter=alter)
    assert found[0][-1].status[0] > 0
    for steps in zip(*found, strict=True):
        assert all(same_bits(step.out, steps[0].out) for step in steps)


@pytest.mark.parametrize("exchange", sorted(EXCHANGES))
@pytest.mark.parametrize("feedback", [True, False])
def test_what_is_predicted_is_what_arrives(exchange: str, feedback: bool) -> None:
    """Padding included."""
    line, speed = cost.Line(1e-5, 1e-9), cost.CodecSpeed(1e-10, 1e-10)
    network = cost.Calibration(line, line, line, training.WORK, training.LATENCY, 1)
    for values in DTYPES:
        case = Case(exchange, 4, 900, 0, 0.2, values, "normal", feedback, steps=2)
        steps = run(case)[0]
        size = int((steps[0].out != 0).sum())
        what = BucketSpec(case.codec, speed, case.numel, case.ranks, size, feedback)
        assert EXCHANGES[exchange].estimate(network, what).received == steps[-1].received
