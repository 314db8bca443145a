"""`mask`: what all ranks send, step after step, and what a damaged message does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradwire.benchmarks.learning.ranks import InProcessRanks
from gradwire.compress import Lead, Momentum, Residual, TopK, Tracking
from gradwire.compress.backends import backend_for, entries_for
from gradwire.compress.backends.kernels import VectorKernels
from gradwire.compress.backends.sparse import EntryKernels
from gradwire.compress.feedback.base import Feedback
from gradwire.compress.formats.layout import Slot
from gradwire.hooks.exchanges.shared_mask import SharedMask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
STRATEGIES: list[Feedback] = [
    Residual(), Residual(0.9), Residual(dtype=torch.int8), Lead(), Momentum(), Momentum(nesterov=True, masking=False),
    Tracking(),
]  # fmt: skip


def ranks_of(size: int, numel: int, codec: TopK, strategy: Feedback | None = None, **options: Any) -> InProcessRanks:
    return InProcessRanks(size, (Slot("a", 0, (numel,), (1,)),), codec, "mask", strategy or Residual(), **options)


def kept(ranks: InProcessRanks, vector: str) -> Tensor:
    """The mean over the ranks of what each keeps."""
    layout = ranks.units[0].layout
    return torch.stack([memory.of(layout).read(vector) for memory in ranks.memories]).double().mean(0)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 6),
    numel=st.one_of(st.integers(1, 12), st.integers(1, 3000)),
    density=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    values=st.sampled_from(DTYPES),
    strategy=st.sampled_from(STRATEGIES),
    zeros=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 9),
)
def test_each_strategys_law_holds(
    size: int, numel: int, density: float, values: torch.dtype, strategy: Feedback, zeros: float, seed: int
) -> None:
    ranks, generator = ranks_of(size, numel, TopK(density, values=values), strategy), torch.Generator()
    generator.manual_seed(seed)
    exact = strategy.storage_dtype("residual") == torch.float32 and getattr(strategy, "decay", 1.0) == 1.0
    for step in range(2 * size + 1):
        grads = torch.randn(size, numel, generator=generator)
        grads[torch.rand(size, numel, generator=generator) < zeros] = 0.0
        before = {name: kept(ranks, name) for name in strategy.state_names}
        handed = ranks.reduce([grad.clone() for grad in grads]).double()
        after = {name: kept(ranks, name) for name in strategy.state_names}
        if exact:
            off = strategy.invariant(grads.double().mean(0), before, handed, after)
            assert float(off.abs().max()) < 2e-5, step


@pytest.mark.parametrize("values", DTYPES)
def test_every_rank_chooses_in_every_slice_by_turns(values: torch.dtype) -> None:
    """Each rank's large gradient comes through, within as many steps as there are ranks."""
    size, numel = 4, 400
    ranks = ranks_of(size, numel, TopK(0.05, values=values))
    grads = torch.full((size, numel), 1e-3)
    for rank in range(size):
        grads[rank, 7 + rank :: 100] = 8.0  # in each slice one of each rank
    seen = torch.zeros(numel, dtype=torch.bool)
    for step in range(size):
        handed = ranks.reduce([grad.clone() if step == 0 else torch.zeros(numel) for grad in grads])
        assert int((handed != 0).sum()) <= size * TopK(0.05).k(numel // size)
        seen |= handed > 1.0
    expected = (grads > 1.0).any(0)
    assert torch.equal(seen, expected)


def test_it_is_the_mean_at_the_largest_of_the_choosers_own() -> None:
    size, numel = 3, 300
    ranks, generator = ranks_of(size, numel, TopK(0.1)), torch.Generator().manual_seed(1)
    grads = torch.randn(size, numel, generator=generator)
    for step in range(2):
        residual = [memory.of(ranks.units[0].layout).read("residual").clone() for memory in ranks.memories]
        total = torch.stack(residual) + grads
        handed = ranks.reduce([grad.clone() for grad in grads])
        for owner in range(size):
            chooser, part = (owner - step) % size, slice(owner * 100, owner * 100 + 100)
            chosen = total[chooser, part].abs().topk(10).indices.sort().values
            assert torch.equal(handed[part].nonzero().view(-1), chosen)
            assert torch.allclose(handed[part][chosen], total[:, part][:, chosen].mean(0), atol=1e-6)


@pytest.mark.parametrize("where", ["the chooser's", "another's", "nobody chooses"])
@pytest.mark.parametrize("values", DTYPES)
def test_what_is_not_finite_is_seen_and_kept_by_no_rank(values: torch.dtype, where: str) -> None:
    ranks = ranks_of(2, 200, TopK(0.01, values=values))
    grads = torch.zeros(2, 200) if where == "nobody chooses" else torch.ones(2, 200)
    grads[0, 50 if where == "the chooser's" else 150] = torch.nan
    handed = ranks.reduce(list(grads))
    assert bool(handed.isnan().any())
    assert bool(kept(ranks, "residual").isfinite().all())
    again = ranks.reduce([torch.ones(200), torch.ones(200)])
    assert bool(again.isfinite().all())


@pytest.mark.parametrize("damage", ["out of range", "too few", "noise"])
def test_a_damaged_choice_writes_nowhere_else_and_loses_nothing(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = SharedMask.read

    def damaged(mask: SharedMask, step: int) -> None:
        if damage == "noise":
            mask.rows[1] = torch.arange(mask.rows.shape[1]).mul(37).byte()
        else:
            mask.rows[1] = 255 if damage == "out of range" else 0
        read(mask, step)

    monkeypatch.setattr(SharedMask, "read", damaged)
    ranks, generator = ranks_of(3, 1000, TopK(0.02, values=torch.int8)), torch.Generator().manual_seed(0)
    applied, entered = torch.zeros(2, 1000, dtype=torch.float64)
    for _ in range(6):
        grads = torch.randn(3, 1000, generator=generator)
        entered += grads.double().mean(0)
        applied += ranks.reduce([grad.clone() for grad in grads])
    assert float((entered - applied - kept(ranks, "residual")).abs().max()) < 1e-4
    if damage != "too few":  # fewer are nothing unusual
        assert all(int(unit.exchange.counts()[-1][0]) > 0 for unit in ranks.units)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_rank_receives_as_much_whatever_the_number_of_ranks(size: int) -> None:
    """A float32 ring all-reduce receives 8·n·(P-1)/P bytes."""
    numel, grads = 100_000, [torch.randn(100_000) for _ in range(size)]
    for values, most in ((torch.float32, 0.0116), (torch.bfloat16, 0.0066), (torch.int8, 0.0042)):
        ranks = ranks_of(size, numel, TopK(0.01, values=values))
        ranks.reduce([grad.clone() for grad in grads])
        assert ranks.bytes_received < most * 8 * numel * (size - 1) / size


def test_the_cpus_passes_have_the_bits_of_torchs() -> None:
    """Of what is taken and added up, with subnormal numbers, signs of zeros, and what is not finite."""
    generator, entries = torch.Generator().manual_seed(0), entries_for(torch.device("cpu"))
    vectors = backend_for(torch.device("cpu")).vectors
    for numel in (1, 63, 1000):
        x, residual = torch.randn(2, numel, generator=generator)
        for vector in (x, residual):
            vector[::5], vector[1::7], vector[2::11] = -0.0, 1e-40, 3e38
        x[3::13] = torch.nan
        places = torch.randperm(numel, generator=generator)[: numel // 2 + 1].int()
        for count in (None, torch.tensor([len(places) // 2], dtype=torch.int32)):
            mine, other, values = residual.clone(), residual.clone(), x[: len(places)].clone()
            theirs = values.clone()
            entries.take(mine, places, values, count)
            EntryKernels.take(entries, other, places, theirs, count)
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32))
            assert torch.equal(values.nan_to_num(7.0).view(torch.int32), theirs.nan_to_num(7.0).view(torch.int32))
        mine, other = residual.clone(), residual.clone()
        assert vectors.accumulate(x, mine) == VectorKernels.accumulate(vectors, x, other)
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32))
