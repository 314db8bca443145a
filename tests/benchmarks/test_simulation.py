"""Simulated worlds: the same bytes as between real processes, times that follow from the network alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire.benchmarks.common.in_process import InProcessGroup, Network, World
from gradwire.benchmarks.sparse.allreduce import IndexSets
from gradwire.benchmarks.sparse.simulation import Task, check, simulate
from gradwire.hooks.comm.entry_exchange import Entries
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.ports import Stages, drive
from ranks import Pool
from torch import Tensor

Ranks = Callable[[int], Pool]
NETWORK = Network(alpha=1e-3, beta=1e-6, overhead=1e-5)


def task_of(algorithm: str, world_size: int, dtype: torch.dtype = torch.float32, numel: int = 20_000) -> Task:
    index_set = IndexSets(numel, 0.02, 0.3)
    return Task(algorithm, numel, dtype, [index_set(rank) for rank in range(world_size)])


class RealGroup(Group):
    """A process group, with what `Task` asks of a simulated one."""

    def begin(self) -> None:
        pass


def for_real(rank: int, algorithm: str, world_size: int, dtype: torch.dtype) -> Any:
    group: Any = RealGroup(dist.group.WORLD)
    received, result = drive(task_of(algorithm, world_size, dtype)(group))
    return received, None if result is None else (result.indices.tolist(), result.values.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ["gather", "union", "split", "split-k"])
def test_the_same_bytes_and_sums_as_between_processes(
    ranks: Ranks, algorithm: str, world_size: int, dtype: torch.dtype
) -> None:
    real = ranks(world_size).run(for_real, algorithm, world_size, dtype)
    task = task_of(algorithm, world_size, dtype)
    simulated = World(world_size, NETWORK).run(task)
    assert [received for received, _ in simulated] == [received for received, _ in real]
    result = simulated[0][1]
    assert result is not None
    indices, values = real[0][1]
    assert result.indices.tolist() == indices
    if algorithm == "union":  # summed in another order
        assert torch.allclose(result.values, torch.tensor(values), atol=1e-5)
    else:
        assert result.values.tolist() == values


@pytest.mark.parametrize("algorithm", ["gather", "split", "split-k"])
def test_a_hundred_ranks(algorithm: str) -> None:
    found = simulate(task_of(algorithm, 100), 100, NETWORK)
    assert found["received_bytes"] > 0
    assert found["seconds"] >= found["network_s"] > 0.01


def one_of_each(group: InProcessGroup) -> Stages:
    clock = group.world.clocks[group.rank]
    times = []
    bytes_ = torch.zeros(1000, dtype=torch.uint8)
    for start in (
        lambda: [group.all_gather(group.gather_output(4, 250), bytes_[:250])],
        lambda: [group.all_to_all(torch.zeros_like(bytes_), bytes_)],
        lambda: [group.all_reduce(torch.zeros(250))],
        lambda: [group.all_gather(group.gather_output(4, 250), bytes_[:250]) for _ in range(2)],
    ):
        for work in start():
            yield work
            times.append(clock.now)
    return times


def test_times_are_those_of_the_formulas() -> None:
    alpha, beta, overhead = NETWORK.alpha, NETWORK.beta, NETWORK.overhead
    times = World(4, NETWORK).run(one_of_each)[0]
    gather, exchange, reduce = 2 * alpha + 750 * beta, alpha + 3 * overhead + 750 * beta, 4 * alpha + 1500 * beta
    expected = [gather, gather + exchange, gather + exchange + reduce]
    # Two in flight: one latency, then both share the link.
    expected += [expected[2] + gather, expected[2] + gather + 750 * beta]
    assert times == pytest.approx(expected)


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

    for rank, (received, ragged) in enumerate(World(3, NETWORK).run(rotate)):
        assert received == [10 * of + rank for of in range(3)]
        assert ragged == [of for of in range(3) for _ in range(of + 1) if of != rank]


@pytest.mark.parametrize("wrong", [lambda v: v + 0.01, lambda v: v * 0])
def test_wrong_sums_are_noticed(wrong: Callable[[Tensor], Tensor]) -> None:
    task = task_of("split", 4)
    result = World(4, NETWORK).run(task)[0][1]
    check(task, 4, result)
    with pytest.raises(RuntimeError, match="does not give the sum"):
        check(task, 4, Entries(result.indices, wrong(result.values)))
    with pytest.raises(RuntimeError, match="does not give the sum"):
        check(task, 4, result[1:])
