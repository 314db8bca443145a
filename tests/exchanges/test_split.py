"""`split` over Gloo: what it keeps, that nothing is lost, and how many messages it takes."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import training
from gradwire.benchmarks.common.in_process import InProcessGroup, World
from gradwire.compress import TopK
from gradwire.compress.backends.sparse import Pieces
from gradwire.compress.feedback.residual import server_state
from gradwire.hooks.comm.entry_exchange import Entries, fill
from gradwire.hooks.comm.ports import Stages
from gradwire.hooks.exchanges.split import Split, split_estimate
from gradwire.hooks.network import cost
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

CPU = torch.device("cpu")


class Ranks:
    """The exchange alone, of ranks in this process, without the selection."""

    def __init__(self, size: int, numel: int, k: int, extra: int = 0, values: torch.dtype = torch.float32) -> None:
        self.world = World(size)
        self.numel, self.k, self.extra = numel, k, extra
        codec = TopK((k - 0.5) / numel, values=values)
        assert codec.k(numel) == k
        self.exchanges = [Split(codec, numel, extra, CPU, group) for group in self.world.groups]
        self.residuals = [torch.zeros(numel) for _ in range(size)]

    def take(self, lists: Sequence[Entries]) -> None:
        """What is kept back goes with what is selected next."""
        for entries, residual in zip(lists, self.residuals, strict=True):
            at = entries.indices.long()
            entries.values += residual[at]
            residual[at] = 0

    def step(self, entries: Sequence[Entries], extras: Sequence[Tensor]) -> tuple[Tensor, int]:
        """What all ranks get, and how many stages that took."""
        before = self.world.completed

        def stages(group: InProcessGroup) -> Stages:
            rank = group.rank
            feedback = server_state(self.residuals[rank])
            return self.exchanges[rank].combine(entries[rank], extras[rank], feedback)

        results = [fill(torch.zeros(self.numel), found) for found in self.world.run(stages)]
        assert all(torch.equal(result, results[0]) for result in results), "replicas differ"
        return results[0], self.world.completed - before


@st.composite
def gradients(draw: st.DrawFn) -> tuple[Ranks, list[list[Entries]]]:
    size, numel = draw(st.integers(1, 5)), draw(st.integers(1, 300))
    k, steps = draw(st.integers(1, numel)), draw(st.integers(1, 4))
    kind, seed = draw(st.sampled_from(["equal", "few", "any", "moving"])), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    every = []
    for step in range(steps):
        lists = []
        for _ in range(size):
            count = int(torch.randint(0, k + 1, (1,), generator=generator))
            indices = torch.randperm(numel, generator=generator)[:count].sort().values.int()
            values = torch.randint(-8, 9, (count,), generator=generator).float()
            if kind == "equal":
                values.fill_(1.0)
            elif kind == "any":
                values *= torch.randn(count, generator=generator)
            elif kind == "moving":  # where the largest are, they were not before
                values *= torch.where(indices % (step + 2) == 0, 100.0, 1.0) * 3.0**step
            lists.append(Entries(indices, values))
        every.append(lists)
    extra = draw(st.integers(0, 7))
    return Ranks(size, numel, k, extra, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))), every


@settings(max_examples=30, deadline=None)
@given(gradients())
def test_the_largest_are_kept_and_nothing_is_lost(case: tuple[Ranks, list[list[Entries]]]) -> None:
    """Whatever came before: of float32 exactly those that a stable sort by magnitude puts first."""
    ranks, steps = case
    size, sent = ranks.world.size, torch.zeros(ranks.numel, dtype=torch.float64)
    got = torch.zeros(ranks.numel, dtype=torch.float64)
    exact = ranks.exchanges[0].exchanger.dtype == torch.float32
    for step, lists in enumerate(steps):
        extras = [torch.arange(ranks.extra, dtype=torch.float32) + rank + step for rank in range(size)]
        wanted = torch.stack(extras).sum(0)
        sent += sum(fill(torch.zeros(ranks.numel), entries).double() for entries in lists)
        ranks.take(lists)
        dense = [fill(torch.zeros(ranks.numel), entries) for entries in lists]
        result, _ = ranks.step(lists, extras)
        assert all(torch.equal(extra, wanted) for extra in extras)
        used = torch.cat([entries.indices for entries in lists]).unique().long()
        assert torch.count_nonzero(result) <= ranks.k
        assert ranks.exchanges[0].union_size == len(used)
        if exact:
            total = dense[0].clone()
            for part in dense[1:]:
                total += part
            means = total[used] * (1.0 / size)
            kept = used[means.abs().sort(descending=True, stable=True).indices[: ranks.k]]
            expected = torch.zeros(ranks.numel)
            expected[kept] = total[kept] * (1.0 / size)
            assert torch.equal(result, expected)
        got += size * result.double()
    kept_back = sum(residual.double() for residual in ranks.residuals)
    assert torch.allclose(got + kept_back, sent, atol=1e-4 * float(sent.abs().max()) + 1e-4)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_two_messages_to_each_rank(size: int) -> None:
    """As many as two_pass, once ranges are known; a third where more is missing than was to be expected."""
    numel, k, steps = 20_000, 400, 12
    ranks, generator = Ranks(size, numel, k, extra=3), torch.Generator().manual_seed(0)
    taken = []
    for _ in range(steps):
        lists = [
            Entries(
                torch.randperm(numel, generator=generator)[:k].sort().values.int(), torch.randn(k, generator=generator)
            )
            for _ in range(size)
        ]
        taken.append(ranks.step(lists, [torch.zeros(3) for _ in range(size)])[1])
    assert taken[0] <= 4, "the first balances the ranges"
    assert min(taken[1:]) == 2
    assert max(taken[1:]) <= 3
    assert sum(taken[1:]) <= 2 * (steps - 1) + 1


def test_bytes_are_those_of_what_travels() -> None:
    numel, k, size = 20_000, 400, 4
    ranks, generator = Ranks(size, numel, k), torch.Generator().manual_seed(0)
    for _ in range(3):
        lists = [
            Entries(
                torch.randperm(numel, generator=generator)[:k].sort().values.int(), torch.randn(k, generator=generator)
            )
            for _ in range(size)
        ]
        before = [exchange.exchanger.received for exchange in ranks.exchanges]
        ranks.step(lists, [torch.zeros(0)] * size)
    moved = sum(exchange.exchanger.received - had for exchange, had in zip(ranks.exchanges, before, strict=True)) / size
    most = (size - 1) * (2 * k / size + 3 * math.sqrt(k / size) + 2) * (4 + 1.25)
    assert 2 * k * (size - 1) / size * 4 < moved < 1.05 * most


def test_messages_cost_every_bucket_the_processor() -> None:
    """Where latency is the processor's, the buckets of a step do not share it; where it is distance, they do."""
    far, near = (cost.Line(1e-3, 1e-9, each=each) for each in (0.0, 1e-3))
    shape = cost.Shape(1 << 18, 2621, 8, 20_000)
    stages = [
        split_estimate(cost.Calibration(line, line, line, training.WORK, training.LATENCY), shape, shape.k)
        for line in (far, near)
    ]
    assert stages[0].seconds == pytest.approx(stages[1].seconds)
    assert [estimate.stages for estimate in stages] == [2, 2]
    assert stages[0].among(8) == pytest.approx(stages[0].among(1) - 2e-3 * 7 / 8)
    assert stages[1].among(8) == pytest.approx(stages[1].among(1))


@pytest.mark.parametrize("counts", [[-1, 3], [3, 1 << 20], [-(1 << 31), 5]])
def test_what_a_head_says_is_not_believed(counts: list[int]) -> None:
    """Damaged counts would let kernels write beyond their memory."""
    messages = Ranks(2, 1000, 20).exchanges[0].to_owners
    came = torch.zeros(2, 400, dtype=torch.uint8)
    came.view(torch.int32)[:, 0] = torch.tensor(counts, dtype=torch.int32)
    messages.port = cast(Any, SimpleNamespace(received=came))
    heads = [count for (count,) in messages.heads()]
    assert heads == counts
    with pytest.raises(RuntimeError, match=r"entries cannot be right.*same version"):
        messages.read(Pieces(heads, [0, 0], [500, 500]), "owned lists")
