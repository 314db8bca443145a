"""Ranks that share a process: what they send arrives, and a rank that is missing is noticed."""

from __future__ import annotations

import pytest
import torch
from gradwire.benchmarks.common.in_process import InProcessGroup, World
from gradwire.hooks.comm.ports import Stages


def test_what_ranks_send_arrives() -> None:
    def rotate(group: InProcessGroup) -> Stages:
        rank, size = group.rank, group.size
        sent = torch.tensor([10 * rank + to for to in range(size)], dtype=torch.int32)
        received = torch.zeros_like(sent)
        yield group.all_to_all(received, sent)
        # Rank r sends r + 1 numbers to every other rank, and none to itself.
        lengths = [0 if to == rank else rank + 1 for to in range(size)]
        incoming = [0 if of == rank else of + 1 for of in range(size)]
        ragged = torch.zeros(sum(incoming), dtype=torch.int32)
        yield group.all_to_all_v(ragged, torch.full((sum(lengths),), rank, dtype=torch.int32), incoming, lengths)
        return received.tolist(), ragged.tolist()

    for rank, (received, ragged) in enumerate(World(3).run(rotate)):
        assert received == [10 * of + rank for of in range(3)]
        assert ragged == [of for of in range(3) for _ in range(of + 1) if of != rank]


def test_an_error_on_one_rank_ends_the_world() -> None:
    def fail(group: InProcessGroup) -> Stages:
        if group.rank == 2:
            raise ValueError("rank 2 has had enough")
        yield group.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="rank 2 has had enough"):
        World(4).run(fail)


def test_a_rank_that_leaves_early_is_noticed() -> None:
    def leave(group: InProcessGroup) -> Stages:
        if group.rank != 2:
            yield group.all_reduce(torch.zeros(1))

    with pytest.raises(RuntimeError, match="3 of 4 ranks have joined collective 1"):
        World(4).run(leave)
