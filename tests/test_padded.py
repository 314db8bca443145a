"""`union` and `split` whose rows have a fixed size, where no host may read: step after step, against what they are to
do, written down entry by entry; on ranks that are threads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from gradwire.compress import TopK, new_draw
from gradwire.compress.feedback import NOTHING, plain
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.pipeline import drive
from gradwire.hooks.exchanges import Operands
from gradwire.hooks.exchanges.dealing import Dealing
from gradwire.hooks.exchanges.padded import PaddedUnion
from gradwire.hooks.exchanges.padded_split import PaddedSplit
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_on_cpu import World
from torch import Tensor

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
EXCHANGES = {"union": PaddedUnion, "split": PaddedSplit}


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
    dealing = Dealing(numel, ranks, CPU)
    return dealing.keys(torch.arange(numel), turn) // (dealing.span + 1)


@dataclass
class Step:
    """Of one rank: what it had, what it got and what it keeps."""

    gradient: Tensor
    before: Tensor
    out: Tensor
    after: Tensor
    extra: Tensor
    capacity: int
    status: list[int]


def run(case: Case) -> list[list[Step]]:
    """Of every rank, its steps."""

    def train(world: World, rank: int) -> list[Step]:
        group = Group(world.words_of(tuple(range(case.ranks))).member(rank), tuple(range(case.ranks)))
        exchange = EXCHANGES[case.exchange](case.codec, case.numel, case.extra, CPU, group.channel("test"))
        residual = torch.zeros(case.numel)
        feedback, steps = plain(residual) if case.feedback else NOTHING, []
        for number in range(case.steps):
            grad, out = case.gradient(rank, number), torch.full((case.numel,), torch.nan)
            extra, before = torch.full((case.extra,), float(rank)), residual.clone()
            draws = new_draw(0, number, rank), new_draw(0, number, rank)
            drive(exchange.reduce(Operands(grad.clone(), out, extra, feedback, (), *draws)))
            capacity = exchange.capacity if isinstance(exchange, PaddedUnion) else exchange.rows.capacity
            status = exchange.status().tolist()
            steps.append(Step(grad, before, out, residual.clone(), extra, capacity, status))
        return steps

    return World(case.ranks).run(train)


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
            for part in kept:
                total, part[i] = total + part[i], 0
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
        if not case.feedback:
            continue
        had = sum((step.gradient.double() + step.before.double() for step in steps), torch.zeros(()))
        has = case.ranks * first.out.double() + sum((step.after.double() for step in steps), torch.zeros(()))
        scale = max(float((step.gradient + step.before).abs().max()) for step in steps)
        assert (had - has).abs().max() <= 4e-6 * scale * case.ranks, "something is lost"
        if case.values == torch.float32:
            out, kept = expected(case, steps, number)
            assert torch.equal(first.out, out)
            assert all(torch.equal(step.after, part) for step, part in zip(steps, kept, strict=True))
    return found


cases = st.builds(
    Case,
    exchange=st.sampled_from(sorted(EXCHANGES)),
    ranks=st.integers(1, 4),
    numel=st.one_of(st.integers(1, 40), st.integers(41, 900)),
    extra=st.sampled_from([0, 0, 3]),
    density=st.sampled_from([0.01, 0.05, 0.2, 0.5, 1.0]),
    values=st.sampled_from(DTYPES),
    kind=st.sampled_from(["normal", "ties", "alike", "one rank", "one owner", "parting"]),
    feedback=st.sampled_from([True, True, True, False]),
    wild=st.sampled_from([0, 0, 0, 1, 5, 60]),
    steps=st.integers(2, 4),
    seed=st.integers(0, 99),
)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_nothing_is_lost_and_every_entry_goes_its_way(case: Case) -> None:
    check(case)
