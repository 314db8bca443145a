"""The collectives that exchanges are made of, between processes over Gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gradwire.hooks.comm.group import SMALL_GATHER, Group
from ranks import Pool

Ranks = Callable[[int], Pool]
SIZES = pytest.mark.parametrize("size", [1, 5, SMALL_GATHER + 4], ids=["one", "few", "large"])
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


def gathered(rank: int, size: int, dtype: torch.dtype) -> bool:
    """Two are under way together, and waited for in the other order."""
    group = Group(dist.group.WORLD)
    rows = (torch.arange(group.size * size) % 251).view(group.size, size).to(dtype)
    first, second = torch.zeros_like(rows), torch.zeros_like(rows)
    works = [group.all_gather(first, rows[rank]), group.all_gather(second, rows[rank] + 1)]
    works[1].wait()
    works[0].wait()
    return torch.equal(first, rows) and torch.equal(second, rows + 1)


@WORLDS
@SIZES
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16], ids=str)
def test_all_gather(ranks: Ranks, world_size: int, size: int, dtype: torch.dtype) -> None:
    assert all(ranks(world_size).run(gathered, size, dtype))


def swapped(rank: int, size: int) -> bool:
    group = Group(dist.group.WORLD)
    mine = torch.arange(group.size * size).view(group.size, size) + 1000 * rank
    theirs = torch.zeros_like(mine)
    group.all_to_all(theirs, mine).wait()
    expected = [torch.arange(rank * size, (rank + 1) * size) + 1000 * other for other in range(group.size)]
    return torch.equal(theirs, torch.stack(expected))


@WORLDS
@SIZES
def test_all_to_all(ranks: Ranks, world_size: int, size: int) -> None:
    assert all(ranks(world_size).run(swapped, size))


def ragged(rank: int) -> bool:
    """Rank r sends r + s elements to rank s: rank 0 nothing to itself."""
    group = Group(dist.group.WORLD)
    lengths = [rank + other for other in range(group.size)]
    received = torch.full((sum(lengths),), -1)
    group.all_to_all_v(received, torch.full((sum(lengths),), rank), lengths, lengths).wait()
    parts = received.split(lengths)
    everything = torch.full((sum(range(group.size)),), -1)
    group.all_gather_v(everything, torch.full((rank,), rank), list(range(group.size))).wait()
    ends = [torch.full((other,), other) for other in range(group.size)]
    return all(bool((part == other).all()) for other, part in enumerate(parts)) and torch.equal(
        everything, torch.cat(ends)
    )


@WORLDS
def test_rows_of_different_lengths_and_none(ranks: Ranks, world_size: int) -> None:
    assert all(ranks(world_size).run(ragged))
