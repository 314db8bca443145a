"""Which elements owners have where no host may read: of whatever ranks select, each has about as much."""

from __future__ import annotations

import pytest
import torch
from gradwire.compress.backends.partition import Partition
from gradwire.hooks.exchanges.fixed_base import row_capacity

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16, 64])
def test_owners_are_dealt_alike_of_whatever_is_selected(ranks: int) -> None:
    """Rows, columns, diagonals, lumps and chance: no owner gets many more than by chance, in hardly any step."""
    numel, width = 300_007, 512
    partition, everything = Partition(numel, ranks, CPU), torch.arange(300_007)
    lots = [everything[::stride] for stride in (1, 2, 3, 8, 16, 100, width, width + 1, 610, 987)]
    lots += [everything[100_000:104_000], everything[everything % width < 3]]
    lots.append(torch.randperm(numel, generator=torch.Generator().manual_seed(0))[:3000].sort().values)
    for turn in (torch.tensor(0), torch.tensor(1), torch.tensor(123_456)):
        keys = partition.keys(everything, turn)
        assert len(keys.unique()) == numel
        owners, places = keys // (partition.span + 1), keys % (partition.span + 1)
        assert int(places.max()) < partition.span
        every = partition.indices(torch.arange(partition.span).expand(ranks, -1), turn)
        assert torch.equal(every[owners, places], everything)
        again = partition.keys(everything, turn + 1) // (partition.span + 1)
        assert abs(float((again == owners).float().mean()) - 1 / ranks) < 0.05, "no owner keeps what it has"
        for lot in lots:
            share = len(lot) / ranks
            most = int(owners[lot].bincount(minlength=ranks).max())
            assert most <= share + 5 * share**0.5 + 1, (lot[:3], turn)


def test_the_largest_of_each_owner_are_about_the_largest_of_all() -> None:
    numel, ranks, k = 1_000_000, 8, 10_000
    partition, generator = Partition(numel, ranks, CPU), torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator).square_() * torch.rand(numel, generator=generator)
    owners = partition.keys(torch.arange(numel), torch.tensor(3)) // (partition.span + 1)
    found = torch.zeros(numel)
    for owner in range(ranks):
        mine = torch.where(owners == owner, x, 0.0)
        at = mine.topk(k // ranks).indices
        found[at] = mine[at]
    best = x.topk(k).values
    assert int((found >= best[-1]).sum()) > 0.98 * k
    assert found.sum() > 0.999 * best.sum()


def test_without_a_residual_there_is_room_for_all() -> None:
    for ranks, k, span in ((2, 100, 500), (8, 100, 50), (4, 1, 1), (1, 30, 40)):
        assert row_capacity(k, span, ranks, feedback=False) == min(k, span)
        assert k / ranks <= row_capacity(k, k, ranks, feedback=True) <= k
    assert row_capacity(65_536, 1 << 23, 8, feedback=True) < 1.04 * 65_536 / 8
