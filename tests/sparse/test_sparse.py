"""`sparse_all_reduce` between real processes: exact, the same on every rank, and never a hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
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
from gradwire.hooks.sparse.validation import Algorithm, Op
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import GROUP_TIMEOUT, Pool, on_ranks
from torch import Tensor

Ranks = Callable[[int], Pool]

#: How the ranks' index sets may lie.
PATTERNS = ("random", "clustered", "identical", "disjoint", "empty", "some empty", "all", "ends")


def index_set(pattern: str, numel: int, rank: int, world_size: int, seed: int) -> Tensor:
    own, shared = (torch.Generator().manual_seed(s) for s in (1000 * seed + rank, seed))
    if pattern == "empty" or (pattern == "some empty" and rank % 2 == 0):
        return torch.zeros(0, dtype=torch.int64)
    if pattern == "all":
        return torch.arange(numel)
    if pattern == "ends":
        return torch.tensor(sorted({0, numel - 1}))
    if pattern == "disjoint":
        return torch.arange(min(rank, numel), numel, world_size)
    if pattern == "clustered":
        start = int(torch.randint(0, numel, (1,), generator=shared))
        return torch.arange(start, min(numel, start + 1 + numel // 50 * (1 + rank)))
    generator = shared if pattern == "identical" else own
    k = int(torch.randint(1, numel + 1, (1,), generator=generator)) // (1 + seed % 20) + 1
    return torch.randperm(numel, generator=generator)[: min(k, numel)].sort().values


_groups: dict[int, Any] = {}


def first_ranks(world_size: int) -> Any:
    """The group of the first ranks, made at its first use, which every rank reaches together."""
    if world_size not in _groups:
        _groups[world_size] = dist.new_group(list(range(world_size)))
    return _groups[world_size]


def compare(
    rank: int, world_size: int, pattern: str, numel: int, seed: int, dtype: torch.dtype, row: tuple[int, ...] = ()
) -> None:
    """Every algorithm against the sum in float64, as entries and dense, and against the other ranks."""
    group = first_ranks(world_size)
    if rank >= world_size:
        return
    indices = index_set(pattern, numel, rank, world_size, seed)
    values = torch.randn(len(indices), *row, generator=torch.Generator().manual_seed(rank)).to(dtype)
    sums = torch.zeros(2, numel, *row, dtype=torch.float64)
    sums[:, indices] = torch.stack([values.double(), values.double().abs()])
    dist.all_reduce(sums, group=group)
    wanted, magnitude = sums
    union = set(magnitude.nonzero()[:, 0].tolist())
    info = torch.finfo(dtype)
    bound = magnitude * (info.eps + world_size * torch.finfo(torch.float32).eps) + info.smallest_normal * info.eps
    outs = []
    scales: dict[Op, float] = {"sum": 1.0, "mean": 1.0 / world_size}
    for algorithm in (*arguments.ALGORITHMS, "auto"):
        options: dict[str, Any] = {"algorithm": algorithm, "group": group}
        for op, scale in scales.items():
            at, found = sparse_all_reduce(indices, values, numel, op=op, **options)
            assert (at.dtype, found.dtype) == (indices.dtype, values.dtype)
            assert bool((at[1:] > at[:-1]).all())
            assert union <= set(at.tolist())
            got = torch.zeros(numel, *row, dtype=torch.float64)
            got[at] = found.double()
            assert bool(((got - wanted * scale).abs() <= bound * scale).all()), (algorithm, op)
        out = torch.full((numel, *row), torch.nan, dtype=dtype)
        assert sparse_all_reduce(indices, values, numel, out=out, **options) is out
        assert torch.equal(out.double(), got)
        outs.append(out)
    mine = torch.cat(outs)
    replicas = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(replicas, mine, group=group)
    assert all(torch.equal(replica, mine) for replica in replicas)


@pytest.mark.parametrize("world_size", [1, 8, *(pytest.param(size, marks=pytest.mark.slow) for size in range(2, 8))])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_algorithm_is_exact(ranks: Ranks, pattern: str, world_size: int) -> None:
    """`test_any_vector` draws other numbers of ranks."""
    for numel in (1, 37, 5003):
        ranks(8).run(compare, world_size, pattern, numel, numel, torch.float32)


@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.sampled_from(PATTERNS),
    numel=st.integers(1, 3000),
    world_size=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    row=st.one_of(st.just(()), st.integers(1, 9).map(lambda n: (n,))),
)
def test_any_vector(
    ranks: Ranks, pattern: str, numel: int, world_size: int, seed: int, dtype: torch.dtype, row: tuple[int, ...]
) -> None:
    ranks(8).run(compare, world_size, pattern, numel, seed, dtype, row)


@pytest.mark.parametrize("algorithm", arguments.ALGORITHMS)
@on_ranks(3)
def test_what_is_not_finite_stays_visible(rank: int, algorithm: Algorithm) -> None:
    """Rank 1 has what is not finite; so has, there alone, the result of every rank."""
    values = torch.tensor([1.0, float("nan"), float("inf"), 2.0]) if rank == 1 else torch.ones(4)
    at, found = sparse_all_reduce(torch.tensor([0, 5, 6, 9]), values, 10, algorithm=algorithm, op="sum")
    assert at.tolist() == [0, 5, 6, 9]
    one, nan, inf, other = found.tolist()
    assert (one, other) == (3.0, 4.0)
    assert nan != nan
    assert inf == float("inf")


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
    pool = Pool(6)
    try:
        told = pool.run(die, may_die=(1, 2, 3, 4))
    finally:
        pool.close()
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
    pool = Pool(3)
    try:
        told = pool.run(die_between, survived, may_die=(1,), within=30.0)
    finally:
        pool.close()
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


def balance(rank: int, world_size: int, pattern: str) -> list[Any]:
    exchanger = EntryExchanger(100_000, torch.float32, torch.device("cpu"), Group(dist.group.WORLD))
    indices = index_set(pattern, 100_000, rank, world_size, 3).int()
    bounds = drive(exchanger.balanced_bounds(indices))
    cuts = torch.searchsorted(indices, torch.tensor(bounds, dtype=torch.int32))
    return [bounds, (cuts[1:] - cuts[:-1]).tolist()]


@pytest.mark.parametrize("pattern", ["random", "clustered", "identical", "disjoint"])
def test_owners_get_equal_shares(ranks: Ranks, pattern: str) -> None:
    results = ranks(4).run(balance, 4, pattern)
    bounds = results[0][0]
    assert all(result[0] == bounds for result in results)
    assert bounds[0] == 0
    assert bounds[-1] == 100_000
    shares = torch.tensor([counts for _, counts in results]).sum(0)
    assert int(shares.max()) <= 1.1 * float(shares.float().mean())


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
