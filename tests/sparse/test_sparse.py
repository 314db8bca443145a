"""`sparse_all_reduce` beside what is drawn: ranks that die or lie, owners, and what decides the way."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import sparse_all_reduce
from gradwire.hooks.comm.entry_exchange import Entries, EntryExchanger
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.ports import drive
from gradwire.hooks.network import cost, probe
from gradwire.hooks.sparse import validation as arguments
from gradwire.hooks.sparse.costs import choose
from ranks import GROUP_TIMEOUT, Pool, Ranks, on_ranks
from torch import Tensor

#: Of six processes, two outlive the others: in the n-th algorithm's group the third goes in the middle of a call.
SURVIVORS = (0, 5)


def die(rank: int) -> list[str]:
    """Algorithm by algorithm, a rank goes in the middle of a call, and the others are told."""
    groups = [dist.new_group([0, 1 + n, 5], timeout=GROUP_TIMEOUT) for n in range(len(arguments.ALGORITHMS))]
    indices, told = torch.arange(0, 50_000, 5), []
    for n, (algorithm, group) in enumerate(zip(arguments.ALGORITHMS, groups, strict=True)):
        if rank == 1 + n:
            EntryExchanger.gather = EntryExchanger.to_owners = lambda *a, **k: os._exit(1)  # type: ignore[method-assign, assignment]
            Group.all_reduce = lambda *a, **k: os._exit(1)  # type: ignore[method-assign]
        if rank in (*SURVIVORS, 1 + n):
            begin = time.monotonic()
            try:
                sparse_all_reduce(indices, torch.ones(len(indices)), 50_000, algorithm=algorithm, group=group)
            except RuntimeError as error:
                told.append(str(error))
            else:
                told.append("")
            assert time.monotonic() - begin < GROUP_TIMEOUT.total_seconds() + 1
    return told


def test_a_rank_that_dies_is_an_error_within_the_timeout() -> None:
    with Pool(6) as pool:
        told = pool.run(die, may_die=(1, 2, 3, 4))
    for rank in SURVIVORS:
        assert len(told[rank]) == len(arguments.ALGORITHMS)
        assert all(told[rank])


def die_between(rank: int, survived: int) -> float:
    """Rank 1 goes when rank 0 has its message of one stage, and rank 2 has not; how long the others wait."""
    group = dist.new_group([0, 1, 2])  # its timeout is half an hour
    sent, calls = Group.send, iter(range(100))

    def send(self: Group, received: Any, parts: Any, works: Any) -> Any:
        if rank == 1 and next(calls) == survived:
            self._group.send([parts[0]], 0, self._tag).wait()
            time.sleep(0.5)
            os._exit(1)
        return sent(self, received, parts, works)

    Group.send = send  # type: ignore[method-assign, assignment]
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="is not responding"):
        sparse_all_reduce(torch.arange(0, 9000, 5), torch.ones(1800), 9000, algorithm="gather", group=group)
    return time.monotonic() - begin


@pytest.mark.parametrize("survived", [0, 1])
def test_a_rank_that_dies_between_two_messages_leaves_nobody_waiting(survived: int) -> None:
    with Pool(3) as pool:
        told = pool.run(die_between, survived, may_die=(1,), within=30.0)
    assert max(told[0], told[2]) < 10.0


def lie(rank: int) -> list[Any]:
    """Rank 1 sends bytes that no sound list has; the others leave out what cannot be right."""
    group = Group(dist.group.WORLD)
    exchanger = EntryExchanger(1000, torch.float32, torch.device("cpu"), group)
    if rank == 1:
        kernels = exchanger.kernels
        noise = torch.Generator().manual_seed(1)

        class Liar:
            def __getattr__(self, name: str) -> Any:
                return getattr(kernels, name)

            def pack_indices(self, indices: Tensor, count: Any, base: int, numel: int, wire: Tensor) -> None:
                wire.copy_(torch.randint(0, 256, (len(wire),), generator=noise).to(torch.uint8))

        exchanger.kernels = Liar()  # type: ignore[assignment]
    entries = Entries(torch.arange(0, 1000, 10, dtype=torch.int32), torch.ones(100))
    found = []
    for run in (lambda: exchanger.gather(entries, 100), lambda: exchanger.to_owners(entries, [0, 300, 600, 1000])):
        result = drive(run())
        at = result.indices.long()
        assert bool((at[1:] > at[:-1]).all())
        assert len(at) == 0 or (int(at[0]) >= 0 and int(at[-1]) < 1000)
        found.append((at.tolist(), result.values.tolist()))
    return [found[0], exchanger.skipped]


def test_lies_on_the_wire_are_left_out_and_counted(ranks: Ranks) -> None:
    results = ranks(3).run(lie)
    assert results[0][0] == results[1][0] == results[2][0], "replicas must agree on what they leave out"
    assert all(skipped > 0 for _, skipped in results)


@on_ranks(2)
def test_a_result_outlives_the_next_call(rank: int) -> None:
    """What the first call returned, after a second one has worked in the same memory."""
    indices = torch.tensor([rank, 5 + rank], dtype=torch.int32)
    first = sparse_all_reduce(indices, torch.ones(2), 10, op="sum", algorithm="gather")
    sparse_all_reduce(indices + 1, torch.full((2,), 7.0), 10, op="sum", algorithm="gather")
    assert [tensor.tolist() for tensor in first] == [[0, 1, 5, 6], [1.0, 1.0, 1.0, 1.0]]


@on_ranks(2)
def test_a_newcomer_makes_all_probe(rank: int) -> None:
    """Rank 0 has met the group before, rank 1 has not: both must probe, or one hangs."""
    group = Group(dist.group.WORLD)
    probe.calibration(group, torch.device("cpu"))
    if rank == 1:
        probe._known.clear()
    sparse_all_reduce(torch.tensor([rank]), torch.ones(1), 10)
    assert probe.known(group, torch.device("cpu"))


def probed(rank: int) -> Any:
    group = Group(dist.group.WORLD)
    found = probe.calibration(group, torch.device("cpu"))
    again = probe.calibration(group, torch.device("cpu"))
    return found, found is again


def test_a_calibration_is_the_same_on_all_ranks_and_measured_once(ranks: Ranks) -> None:
    results = ranks(2).run(probed)
    assert results[0] == results[1]
    found, cached = results[0]
    assert cached
    for line in (found.all_gather, found.all_to_all, found.all_reduce):
        assert 1e-6 < line.alpha < 1
        assert 0 < line.beta < 1e-6


SLOW = cost.Line(1e-4, 1e-7)
WORK = cost.Work(2e-9, 2e-9, 2e-9, 2e-9, 5e-11, 5e-10)
LATENCY = cost.Latency(1e-4, 3e-4, 4e-4)


@pytest.mark.parametrize(
    ("density", "overlap", "world_size", "expected"),
    [
        (0.001, 0.0, 2, {"gather"}),
        (0.01, 0.0, 8, {"split", "gather"}),
        (0.01, 1.0, 16, {"split"}),
        (0.5, 0.0, 8, {"split"}),  # indices are cheap where they lie close
        (0.99, 1.0, 8, {"dense"}),
    ],
)
def test_the_model_chooses_as_bytes_do_on_a_slow_network(
    density: float, overlap: float, world_size: int, expected: set[str]
) -> None:
    calibration = cost.Calibration(SLOW, SLOW, SLOW, WORK, LATENCY)
    numel = 1 << 22
    k = int(density * numel)
    union = min(numel, round(k * (1 + (world_size - 1) * (1 - overlap))))
    decision = choose(calibration, cost.Shape(numel, k, world_size, union))
    assert decision.name in expected, str(decision)


def test_a_line_goes_through_what_was_measured() -> None:
    line = cost.Line(1.0, 0.1, ((100.0, 5.0), (200.0, 9.0)))
    assert [line.transfer(size) for size in (0, 50, 100, 150, 200, 1000)] == [0, 2, 4, 6, 20, 100]


def test_on_a_fast_network_work_decides() -> None:
    fast = cost.Line(1e-5, 1e-11)
    calibration = cost.Calibration(fast, fast, fast, WORK, LATENCY)
    assert choose(calibration, cost.Shape(1 << 22, 1 << 19, 8, 1 << 21)).name == "dense"


def test_estimates_of_the_union_follow_the_overlap() -> None:
    for overlap in (0.0, 0.5, 1.0):
        numel, k, world_size = 200_000, 2000, 4
        own = round(k * (1 - overlap))
        order = torch.randperm(numel, generator=torch.Generator().manual_seed(0))
        shared = order[: k - own]
        sets = [torch.cat([shared, order[k + rank * own :][:own]]).sort().values for rank in range(world_size)]
        bits = torch.stack([arguments.windows_of(indices, numel, 1024) for indices in sets])
        sides = arguments.Sides([k] * world_size, True, bits, torch.zeros(0), 0)
        true = len(torch.cat(sets).unique())
        assert abs(arguments.estimate_union(sides, numel) / true - 1) < 0.2
