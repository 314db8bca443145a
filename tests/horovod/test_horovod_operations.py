"""The Horovod operations: what each gives on every rank, in numbers."""

from __future__ import annotations

import json
import math
import resource
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import QSGD, TopK
from gradwire.hooks.horovod.runtime import context
from gradwire.hooks.horovod.runtime.handles import allreduce_operation, key_of
from ranks import Pool, on_ranks
from torch import Tensor

Ranks = Callable[[int], Pool]
WORLDS = pytest.mark.parametrize("world", [2, 4])


def equal(got: Any, expected: Any) -> None:
    expected = torch.as_tensor(expected)
    assert got.shape == expected.shape, f"{tuple(got.shape)} instead of {tuple(expected.shape)}"
    assert torch.equal(got.double(), expected.double()), f"{got.tolist()} instead of {expected.tolist()}"


def raised(kind: type[BaseException], action: Callable[[], Any]) -> str:
    """The message of the exception of exactly this kind that `action` raises."""
    try:
        action()
    except kind as error:
        if type(error) is kind:
            return str(error)
        raise
    raise AssertionError(f"no {kind.__name__} was raised")


# -- allreduce ---------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_reductions(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    x = torch.tensor([1.0, -2.0, 4.0]) * (rank + 1)
    total = torch.tensor([1.0, -2.0, 4.0]) * (n * (n + 1) / 2)
    equal(hvd.allreduce(x), total / n)
    equal(hvd.allreduce(x, op=hvd.Average), total / n)
    equal(hvd.allreduce(x, op=hvd.Sum), total)
    equal(hvd.allreduce(x, op=hvd.Min), [1.0, -2.0 * n, 4.0])
    equal(hvd.allreduce(x, op=hvd.Max), [float(n), -2.0, 4.0 * n])
    equal(hvd.allreduce(x, op=hvd.Product), torch.tensor([1.0, -2.0, 4.0]) ** n * math.factorial(n))
    equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), total * 1.5)
    equal(hvd.allreduce(x, prescale_factor=0.25, postscale_factor=4.0), total / n)
    equal(x, torch.tensor([1.0, -2.0, 4.0]) * (rank + 1))
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    equal(x, total)
    equal(hvd.synchronize(hvd.allreduce_async(x)), total)
    y = torch.ones(2, 3)
    handle = hvd.allreduce_async_(y, op=hvd.Sum)
    assert hvd.synchronize(handle) is y
    equal(y, torch.full((2, 3), float(n)))
    equal(hvd.allreduce(torch.zeros(0, 3)), torch.zeros(0, 3))
    equal(hvd.allreduce(torch.tensor(float(rank))), (n - 1) / 2)


@on_ranks(2, 4)
def test_the_average_of_integers_truncates(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        x = torch.tensor([rank, 3, 2 * rank + 1]).to(dtype)
        sums = [n * (n - 1) // 2, 3 * n, n * n]
        got = hvd.allreduce(x, op=hvd.Sum)
        assert got.dtype == dtype
        equal(got, sums)
        equal(hvd.allreduce(x), [s // n for s in sums])
    # Toward zero, not down; and where 1/n would be off by one unit in the last place.
    equal(hvd.allreduce(torch.tensor([-1 if rank else 0, -3]), op=hvd.Average), [0 if n == 2 else -3 // 4 + 1, -3])
    big = (1 << 62) // n + 1
    equal(hvd.allreduce(torch.tensor([big])), [big])
    equal(hvd.allreduce(torch.tensor([10]), op=hvd.Sum, postscale_factor=0.25), [int(10 * n * 0.25)])


def halves(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    x = torch.tensor([1.0 + 2.0**-12, 3.0, 2.0**17])
    half = hvd.allreduce(x, compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    equal(half[:2], [1.0, 3.0])
    assert half[2] == math.inf  # beyond float16
    brain = hvd.allreduce(x + 2.0**-9, compression=hvd.Compression.bf16)
    equal(brain[:2], [1.0, 3.0])  # 7 bits of mantissa
    equal(brain[2:], [2.0**17])  # but float32's range
    whole = torch.tensor([2049, 5])
    equal(hvd.allreduce(whole, op=hvd.Sum, compression=hvd.Compression.fp16), [2049 * n, 5 * n])
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        got = hvd.allreduce(torch.tensor([0.5, 1.0], dtype=dtype) * (rank + 1), op=hvd.Sum)
        assert got.dtype == dtype
        equal(got, torch.tensor([0.5, 1.0]) * (n * (n + 1) / 2))
    compressed, context = hvd.Compression.fp16.compress(x)
    assert compressed.dtype == torch.float16
    assert hvd.Compression.fp16.decompress(compressed, context).dtype == torch.float32
    assert hvd.Compression.none.compress(x)[0] is x


@WORLDS
def test_half_precision_rounds_on_the_way(ranks: Ranks, world: int) -> None:
    ranks(world).run(halves)


@on_ranks(2, 4)
def test_ranks_may_submit_in_opposite_orders(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    names = [f"t{i}" for i in range(40)]
    mine = names if rank % 2 else names[::-1]
    handles = {name: hvd.allreduce_async(torch.full((5,), float(int(name[1:]))), name=name) for name in mine}
    gathered = hvd.allgather_async(torch.tensor([rank]), name="t3")  # another operation: the name is free
    for name in names:
        equal(hvd.synchronize(handles[name]), torch.full((5,), float(int(name[1:]))))
    equal(hvd.synchronize(gathered), list(range(n)))
    if rank == 0:
        a, b = hvd.allgather_async(torch.ones(2), name="a"), hvd.broadcast_async(torch.zeros(1), 0, name="b")
    else:
        b, a = hvd.broadcast_async(torch.ones(1), 0, name="b"), hvd.allgather_async(torch.ones(2), name="a")
    equal(hvd.synchronize(a), torch.ones(2 * n))
    equal(hvd.synchronize(b), [0.0])


def asynchronous(rank: int) -> tuple[bool, float]:
    hvd.init()
    hvd.barrier()
    start = time.monotonic()
    if rank == 0:
        time.sleep(0.4)
    handle = hvd.allreduce_async(torch.ones(3), name="late")
    submitted = time.monotonic() - start
    early = hvd.poll(handle)
    equal(hvd.synchronize(handle), torch.ones(3))
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(10**9) is None
    assert "handle=-5" in raised(ValueError, lambda: hvd.poll(-5))
    return early, submitted


@WORLDS
def test_operations_are_asynchronous(ranks: Ranks, world: int) -> None:
    results = ranks(world).run(asynchronous)
    for early, submitted in results[1:]:
        assert not early
        assert submitted < 0.3


@on_ranks(2, 4)
def test_grouped_operations(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    scale = (n + 1) / 2
    tensors = [torch.full((3,), rank + 1.0), torch.full((2, 2), 2.0 * (rank + 1)), torch.tensor([rank + 1])]
    got = hvd.grouped_allreduce(tensors[:2])
    equal(got[0], torch.full((3,), scale))
    equal(got[1], torch.full((2, 2), 2 * scale))
    mixed = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="mixed")
    equal(mixed[2], [n * (n + 1) // 2])
    assert mixed[2].dtype == torch.int64
    doubles = [torch.zeros(0, dtype=torch.float64), torch.full((2,), rank + 1.0, dtype=torch.float64)]
    empty, floats, wide = hvd.grouped_allreduce([doubles[0], tensors[0], doubles[1]], op=hvd.Sum, name="one is empty")
    equal(empty, [])
    equal(floats, torch.full((3,), n * scale))
    equal(wide, torch.full((2,), n * scale))
    halves = hvd.grouped_allreduce([t + 2.0**-12 for t in tensors[:1]], compression=hvd.Compression.fp16)
    equal(halves[0], torch.full((3,), scale))
    equal(hvd.synchronize(hvd.grouped_allreduce_async(tensors[:2], op=hvd.Max))[0], torch.full((3,), float(n)))
    back = hvd.grouped_allreduce_(tensors[:2], op=hvd.Sum)
    assert back[0] is tensors[0]
    equal(tensors[1], torch.full((2, 2), 2.0 * n * scale))
    hvd.synchronize(hvd.grouped_allreduce_async_(tensors[:2]))
    equal(tensors[0], torch.full((3,), n * scale))
    a, b = hvd.grouped_allgather([torch.full((rank + 1, 2), rank), torch.tensor([rank])])
    equal(a, [[r, r] for r in range(n) for _ in range(r + 1)])
    equal(b, list(range(n)))
    assert len(hvd.synchronize(hvd.grouped_allgather_async([torch.ones(1), torch.ones(2)]))) == 2
    c, d = hvd.grouped_reducescatter([torch.arange(float(n)), torch.ones(2 * n, 3)], op=hvd.Sum)
    equal(c, [float(rank * n)])
    equal(d, torch.full((2, 3), float(n)))
    assert len(hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(n)]))) == 1


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@on_ranks(2)
def test_nameless_tensors_are_compressed_only_where_nothing_stays_behind(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    x = torch.arange(1.0, 301.0)
    codecs = hvd.Compression.topk(density=0.01), hvd.Compression.onebit(), hvd.Compression.codec(QSGD(), True)
    for codec in codecs:
        # What they leave out could never be told apart, so never arrive.
        assert "name=" in raised(ValueError, lambda c=codec: hvd.allreduce(x, compression=c))  # type: ignore[misc]
        assert "name=" in raised(ValueError, lambda c=codec: hvd.grouped_allreduce([x], compression=c))  # type: ignore[misc]
    # Without anything to keep, or told not to, it works, each time from the start.
    lossy = hvd.Compression.codec(TopK(0.01), error_feedback=False)
    for _ in range(2):
        assert (hvd.allreduce(x, compression=lossy) != 0).nonzero().view(-1).tolist() == [297, 298, 299]
    equal(hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.codec(TopK(0.01), exchange="dense")), n * x)
    means = [hvd.allreduce(x, compression=hvd.Compression.qsgd(bits=2)) for _ in range(200)]
    assert not torch.equal(means[0], means[1])  # of independent draws
    assert (torch.stack(means).mean(0) - x).abs().max() < 60
    # And nothing grows.
    large = torch.ones(500_000)
    for call in range(30):
        hvd.allreduce(large, compression=hvd.Compression.qsgd(bits=8))
        if call == 5:
            before = resident_bytes()
    assert resident_bytes() - before < 50e6


@on_ranks(2)
def test_a_name_with_a_residual_keeps_its_shape(rank: int) -> None:
    hvd.init()
    codec = hvd.Compression.topk(density=0.5)
    hvd.allreduce(torch.ones(6), compression=codec, name="reshaped")
    assert "(6,)" in raised(ValueError, lambda: hvd.allreduce(torch.ones(4), compression=codec, name="reshaped"))
    equal(hvd.allreduce(torch.ones(6), compression=codec, name="reshaped")[-1], 2.0)
    unbiased = hvd.Compression.qsgd(bits=8)
    for numel in (300, 200, 300):
        assert hvd.allreduce(torch.ones(numel), compression=unbiased, name="reshaped").shape == (numel,)


def pairwise(vectors: list[Tensor]) -> Tensor:
    """Adasum, from the paper's equation."""
    while len(vectors) > 1:
        vectors = [
            a * (1 - (a @ b) / (2 * (a @ a))) + b * (1 - (a @ b) / (2 * (b @ b)))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def adaptive_sums(rank: int) -> list[Tensor]:
    hvd.init()
    n = hvd.size()
    generator = torch.Generator().manual_seed(5)
    vectors = [torch.randn(37, generator=generator, dtype=torch.float64) for _ in range(n)]
    got = hvd.allreduce(vectors[rank].float(), op=hvd.Adasum)
    assert torch.allclose(got.double(), pairwise(vectors), atol=1e-5)
    exact = hvd.allreduce(vectors[rank], op=hvd.Adasum)
    assert torch.allclose(exact, pairwise(vectors), atol=1e-13)
    equal(hvd.allreduce(torch.full((5,), 3.0), op=hvd.Adasum), torch.full((5,), 3.0))  # equal: the mean
    axis = torch.eye(n)[rank] * (rank + 1)
    equal(hvd.allreduce(axis, op=hvd.Adasum), torch.arange(1.0, n + 1))  # orthogonal: the sum
    equal(hvd.allreduce(torch.tensor([2.0 * (rank == 0)]), op=hvd.Adasum), [2.0])  # zeros do nothing
    a, b = hvd.grouped_allreduce([torch.full((4,), 1.0), axis], op=hvd.Adasum)
    equal(a, torch.ones(4))
    equal(b, torch.arange(1.0, n + 1))
    return [got, exact]


@WORLDS
def test_adasum_is_as_published(ranks: Ranks, world: int) -> None:
    results = ranks(world).run(adaptive_sums)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_adasum_needs_a_power_of_two(ranks: Ranks) -> None:
    assert all("power of two" in text for text in ranks(3).run(adasum_of_three))


def adasum_of_three(rank: int) -> str:
    hvd.init()
    return raised(ValueError, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum))


# -- moving rows -------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_allgather_of_uneven_rows(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    equal(hvd.allgather(torch.full((2, 3), rank)), [[r] * 3 for r in range(n) for _ in range(2)])
    uneven = hvd.allgather(torch.full((rank, 2), float(rank)))  # rank 0 has no rows
    equal(uneven, torch.tensor([[float(r)] * 2 for r in range(n) for _ in range(r)]))
    equal(hvd.synchronize(hvd.allgather_async(torch.tensor([rank % 2 == 0]))), [r % 2 == 0 for r in range(n)])
    assert hvd.allgather(torch.zeros(0, 4)).shape == (0, 4)
    complex_ = hvd.allgather(torch.tensor([rank * 1j]))
    assert complex_.tolist() == [r * 1j for r in range(n)]
    assert hvd.allgather(torch.tensor([rank], dtype=torch.int16)).tolist() == list(range(n))


@on_ranks(2, 4)
def test_broadcast(rank: int) -> None:
    hvd.init()
    root = hvd.size() - 1
    x = torch.full((2, 2), float(rank))
    equal(hvd.broadcast(x, root), torch.full((2, 2), float(root)))
    equal(x, torch.full((2, 2), float(rank)))
    assert hvd.broadcast_(x, root) is x
    equal(x, torch.full((2, 2), float(root)))
    y = torch.tensor(rank == 1)
    equal(hvd.synchronize(hvd.broadcast_async(y, 1)), True)
    hvd.synchronize(hvd.broadcast_async_(y, 0))
    equal(y, False)


@on_ranks(2, 4)
def test_alltoall_with_and_without_splits(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    plain = hvd.alltoall(torch.arange(2 * n) + 100 * rank)
    assert isinstance(plain, Tensor)
    equal(plain, [100 * r + 2 * rank + i for r in range(n) for i in range(2)])
    # Rank s sends r + 1 rows to rank r.
    rows = torch.tensor([[10 * rank + r] * 2 for r in range(n) for _ in range(r + 1)])
    for splits in ([r + 1 for r in range(n)], torch.arange(1, n + 1, dtype=torch.int32)):
        got, received = hvd.alltoall(rows, splits)
        equal(got, [[10 * s + rank] * 2 for s in range(n) for _ in range(rank + 1)])
        equal(received, [rank + 1] * n)
        assert received.dtype == torch.int32
    got, received = hvd.synchronize(hvd.alltoall_async(torch.arange(n)))
    equal(got, [rank] * n)
    equal(received, [1] * n)
    # Nothing for most.
    got, received = hvd.alltoall(torch.full((3,), rank), [3] + [0] * (n - 1))
    equal(received, [3 * (rank == 0)] * n)
    equal(got, [r for r in range(n) for _ in range(3)] if rank == 0 else torch.zeros(0))


@on_ranks(2, 4)
def test_reducescatter_gives_the_remainder_to_the_first(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    rows = 2 * n + 1  # one more than goes round
    x = torch.arange(float(rows)).unsqueeze(1).repeat(1, 2) * (rank + 1)
    begin = 2 * rank + min(rank, 1)
    mine = torch.arange(float(rows)).unsqueeze(1).repeat(1, 2)[begin : begin + 2 + (rank == 0)]
    equal(hvd.reducescatter(x), mine * (n + 1) / 2)
    equal(hvd.reducescatter(x, op=hvd.Sum), mine * n * (n + 1) / 2)
    equal(hvd.reducescatter(x, op=hvd.Max), mine * n)
    equal(hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5), mine * n * (n + 1) / 2)
    equal(hvd.synchronize(hvd.reducescatter_async(x, op=hvd.Min)), mine)
    small = hvd.reducescatter(torch.tensor([7]), op=hvd.Sum)
    equal(small, [7 * n] if rank == 0 else torch.zeros(0))
    equal(hvd.reducescatter(torch.full((n,), 1 + 2.0**-12), compression=hvd.Compression.fp16), [1.0])
    assert "TopK" in raised(
        ValueError, lambda: hvd.reducescatter(torch.ones(n), compression=hvd.Compression.topk(density=0.5))
    )


@on_ranks(2, 4)
def test_sparse_tensors_are_gathered(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    x = torch.sparse_coo_tensor(
        torch.tensor([[rank, 5]]), torch.tensor([[1.0, 2.0], [n, 0.0]]), (6, 2), check_invariants=True
    )
    wait = hvd.sparse_allreduce_async(x, "rows", hvd.Average)
    got = wait()
    assert got.is_sparse
    expected = torch.zeros(6, 2)
    expected[:n] = torch.tensor([1.0, 2.0]) / n
    expected[5] = torch.tensor([float(n), 0.0])
    equal(got.to_dense(), expected)
    equal(hvd.sparse_allreduce_async(x, "rows", hvd.Sum)().to_dense(), expected * n)
    empty = torch.sparse_coo_tensor(
        torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (6, 2), check_invariants=True
    )
    equal(hvd.sparse_allreduce_async(empty if rank else x, "some", hvd.Sum)().to_dense()[5], [float(n), 0.0])
    two = torch.sparse_coo_tensor(torch.tensor([[0], [rank]]), torch.ones(1), (2, n), check_invariants=True)
    equal(hvd.sparse_allreduce_async(two, None, hvd.Sum)().to_dense()[0], torch.ones(n))
    assert "Min" in raised(ValueError, lambda: hvd.sparse_allreduce_async(x, "rows", hvd.Min))


# -- process sets ------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_process_sets(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.ranks == list(range(n))
    assert (hvd.global_process_set.rank(), hvd.global_process_set.size()) == (rank, n)
    even, odd = hvd.ProcessSet(range(0, n, 2)), hvd.ProcessSet(range(1, n, 2))
    assert (even.process_set_id, even.included(), even.size()) == (None, None, None)
    assert "not registered" in raised(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=even))
    assert hvd.add_process_set(even) is even
    hvd.add_process_set(odd)
    assert even.process_set_id != odd.process_set_id
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert mine.included()
    assert not other.included()
    assert (mine.rank(), mine.size(), other.rank()) == (rank // 2, n // 2, None)
    expected = sum(mine.ranks) / len(mine.ranks)
    equal(hvd.allreduce(torch.tensor([float(rank)]), name="x", process_set=mine), [expected])
    equal(hvd.allreduce(torch.tensor([float(rank)]), name="x"), [(n - 1) / 2])
    equal(hvd.allgather(torch.tensor([rank]), process_set=mine), mine.ranks)
    equal(hvd.broadcast(torch.tensor([rank]), mine.ranks[-1], process_set=mine), [mine.ranks[-1]])
    equal(hvd.alltoall(torch.full((n // 2,), rank), process_set=mine), mine.ranks)
    equal(hvd.reducescatter(torch.full((n // 2,), rank), op=hvd.Sum, process_set=mine), [sum(mine.ranks)])
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    hvd.barrier(mine)
    # The root is a global rank, and it has to be in the set.
    assert "root_rank" in raised(ValueError, lambda: hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine))
    assert f"rank {rank} is not in" in raised(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=other))
    for twin in (hvd.ProcessSet(even.ranks), hvd.ProcessSet(range(n))):
        assert "exists already" in raised(ValueError, partial(hvd.add_process_set, twin))
    assert "below" in raised(ValueError, lambda: hvd.add_process_set([0, n]))
    raised(ValueError, lambda: hvd.ProcessSet([0, 0]))
    assert hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(odd)
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set(list(range(1, n, 2)))
    assert again.process_set_id not in (None, even.process_set_id)
    assert hvd.remove_process_set(again)
    assert hvd.remove_process_set(even)


@on_ranks(2)
def test_a_process_set_can_be_removed_once_its_operations_have_ended(rank: int) -> None:
    hvd.init()
    for _ in range(5):
        alone = hvd.add_process_set([0])
        if rank == 0:
            hvd.allreduce(torch.ones(3000), process_set=alone)
        assert hvd.remove_process_set(alone)


@on_ranks(3)
def test_a_process_set_with_an_operation_under_way_stays(rank: int) -> None:
    hvd.init()
    again = hvd.add_process_set([1, 2])
    handle = hvd.allreduce_async(torch.ones(2), name="half", process_set=again) if rank == 1 else None
    assert "operations under way" in raised(hvd.HorovodInternalError, partial(hvd.remove_process_set, again))
    if rank == 2:
        handle = hvd.allreduce_async(torch.ones(2), name="half", process_set=again)
    if handle is not None:
        hvd.synchronize(handle)
    assert hvd.remove_process_set(again)


@on_ranks(3, within=20)
def test_a_thread_that_uses_a_process_set_while_it_is_removed_is_told(rank: int) -> None:
    hvd.init()
    members, engine = hvd.add_process_set([0, 1]), context.world().engine
    set_id = members.process_set_id or 0
    known = engine._members.get(set_id, ())
    key = key_of("allreduce", "late", members) if rank == 1 else None
    assert hvd.remove_process_set(members)
    if key is not None:
        operation = allreduce_operation(key, [torch.ones(5)], hvd.Sum, 1.0, 1.0)
        assert "has been removed" in raised(ValueError, partial(engine.submit, operation))
        engine._members[set_id] = known  # and where the other thread had come further
        assert "was removed" in raised(hvd.HorovodInternalError, engine.submit(operation).wait)
        del engine._members[set_id]
    equal(hvd.allreduce(torch.ones(3000)), torch.ones(3000))


# -- join --------------------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_join_with_uneven_batches(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    for step in range(rank + 1):  # rank r has r + 1 batches
        total = hvd.allreduce(torch.full((3,), 1.0), op=hvd.Sum, name=f"step{step}")
        equal(total, torch.full((3,), float(n - step)))
        mean = hvd.allreduce(torch.full((3,), 1.0), name=f"mean{step}")
        equal(mean, torch.full((3,), (n - step) / n))
        equal(hvd.allgather(torch.tensor([rank]), name=f"rows{step}"), list(range(step, n)))
        codec = hvd.Compression.qsgd(bits=8)
        got = hvd.allreduce(torch.full((600,), 1.0), op=hvd.Sum, compression=codec, name="codec")
        assert torch.allclose(got, torch.full((600,), float(n - step)), atol=0.05)
        hvd.allgather(torch.ones(1))  # nameless ones are counted from zero again afterwards
    assert hvd.join() == n - 1
    equal(hvd.allgather(torch.tensor([rank])), list(range(n)))
    equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), [float(n)])  # and all are back
    if rank == 0:
        time.sleep(0.3)
    assert hvd.join() == 0


def broadcast_while_joined(rank: int) -> str:
    hvd.init()
    text = raised(hvd.HorovodInternalError, lambda: hvd.broadcast(torch.ones(1), 1)) if rank else ""
    hvd.join()
    return text


@WORLDS
def test_what_cannot_go_on_without_joined_ranks_says_so(ranks: Ranks, world: int) -> None:
    assert all("joined" in text for text in ranks(world).run(broadcast_while_joined)[1:])


# -- autograd ----------------------------------------------------------------------------------------------------------


@on_ranks(2, 4, within=20.0)
def test_autograd_goes_through(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    ones = torch.ones(3, requires_grad=True)
    (hvd.allreduce(ones) * (rank + 1)).sum().backward()
    equal(ones.grad, torch.full((3,), (n + 1) / 2))
    ones.grad = None
    (hvd.allreduce(ones, op=hvd.Sum, prescale_factor=2.0, name="named") * (rank + 1)).sum().backward()
    equal(ones.grad, torch.full((3,), float(n * (n + 1))))
    ones.grad = None
    a, b = hvd.grouped_allreduce([ones, ones * 2])
    (a + b).sum().backward()
    equal(ones.grad, torch.full((3,), 3.0))
    ones.grad = None
    hvd.allreduce(ones, compression=hvd.Compression.fp16).sum().backward()
    equal(ones.grad, torch.ones(3))

    x = torch.ones(rank + 1, 2, requires_grad=True)
    (hvd.allgather(x) * torch.arange(n * (n + 1) / 2).unsqueeze(1) * (rank + 1)).sum().backward()
    start = rank * (rank + 1) / 2
    expected = torch.arange(start, start + rank + 1).unsqueeze(1).repeat(1, 2) * (n + 1) / 2
    equal(x.grad, expected)
    x.grad = None
    hvd.grouped_allgather([x, x])[1].sum().backward()
    equal(x.grad, torch.ones(rank + 1, 2))

    y = torch.ones(2, requires_grad=True)
    (hvd.broadcast(y, 1) * (rank + 1)).sum().backward()
    equal(y.grad, torch.full((2,), (n + 1) / 2 if rank == 1 else 0.0))

    z = torch.ones(n, requires_grad=True)
    (hvd.alltoall(z) * (rank + 1)).sum().backward()
    equal(z.grad, torch.arange(1.0, n + 1))
    z.grad = None
    got, _ = hvd.alltoall(z, [0] * (n - 1) + [n])
    (got * 5).sum().backward()
    equal(z.grad, torch.full((n,), 5.0))
    z.grad = None
    (hvd.reducescatter(z) * (rank + 1)).sum().backward()
    equal(z.grad, torch.arange(1.0, n + 1))
    z.grad = None
    (hvd.reducescatter(z, op=hvd.Sum) * (rank + 1)).sum().backward()
    equal(z.grad, torch.arange(1.0, n + 1) * n)
    z.grad = None
    hvd.grouped_reducescatter([z])[0].sum().backward()
    equal(z.grad, torch.ones(n))
    least = hvd.allreduce(z, op=hvd.Min)
    assert "op=Min" in raised(RuntimeError, lambda: least.sum().backward())


@on_ranks(2, 4, within=20.0)
def test_autograd_goes_through_gradients(rank: int) -> None:
    """What a penalty on the gradient of the sum of cubes does."""
    hvd.init()
    n = hvd.size()
    mean = (n + 1) / 2
    cases: list[tuple[Callable[[Tensor], Tensor], float]] = [
        (hvd.allreduce, 6 * mean),
        (lambda x: hvd.allreduce(x, op=hvd.Sum, name="twice"), 6 * n * n * n * mean),
        (hvd.allgather, 6 * (rank + 1) / n),
        (lambda x: hvd.broadcast(x, 1), 12 / n if rank == 1 else 0.0),
        (hvd.alltoall, 6.0 * (rank + 1)),
        (lambda x: hvd.alltoall(x, [1] * n)[0], 6.0 * (rank + 1)),
        (hvd.reducescatter, 6 * mean),
    ]
    for operation, expected in cases:
        x = torch.full((n,), rank + 1.0, requires_grad=True)
        (first,) = torch.autograd.grad(operation(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        assert torch.allclose(second, torch.full((n,), expected))


# -- what is refused ---------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_wrong_arguments_are_refused_at_the_call(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    one = torch.ones(2)
    assert "op parameter" in raised(ValueError, lambda: hvd.allreduce(one, average=True, op=hvd.Sum))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        equal(hvd.allreduce(one, average=False), one * n)
        equal(hvd.allreduce(one, True), one)
    assert [w.category for w in caught] == [DeprecationWarning] * 2
    assert "op=9" in raised(ValueError, lambda: hvd.allreduce(one, op=9))
    assert "process_set=[0]: expected" in raised(ValueError, lambda: hvd.allreduce(one, process_set=[0]))  # type: ignore[arg-type]
    assert "contiguous" in raised(ValueError, lambda: hvd.allreduce(torch.ones(2, 3).t()))
    assert "complex64" in raised(ValueError, lambda: hvd.allreduce(one + 0j))
    assert "bool" in raised(ValueError, lambda: hvd.allreduce(one > 0))
    assert "float64" in raised(ValueError, lambda: hvd.allreduce(one.double(), compression=hvd.Compression.onebit()))
    assert "class" in raised(ValueError, lambda: hvd.allreduce(one, compression=hvd.Compression.topk))
    for spoken, remedy in (
        (hvd.Compression.topk, "topk(density="),
        (TopK, "topk(density="),
        (hvd.Compression.onebit, "onebit()"),
        (hvd.Compression.codec, "Compression.codec("),
        ("topk", "Compression.topk(density="),
        (None, "Compression.none"),
    ):
        assert remedy in raised(ValueError, lambda c=spoken: hvd.allreduce(one, compression=c))  # type: ignore[misc]
    assert "TopK is a class" in raised(TypeError, lambda: hvd.Compression.codec(TopK))  # type: ignore[arg-type]
    message = raised(ValueError, lambda: hvd.Compression.codec(TopK(0.1), exchange="two_pas"))
    assert all(word in message for word in ("'two_pas'", "'gather'", "'split'"))
    assert "'gather'" in raised(ValueError, lambda: hvd.Compression.codec(TopK(0.1), exchange="two_pass"))
    assert "error_feedback='yes'" in raised(ValueError, lambda: hvd.Compression.codec(TopK(0.1), error_feedback="yes"))
    assert "seed=0.5" in raised(ValueError, lambda: hvd.Compression.codec(TopK(0.1), seed=0.5))  # type: ignore[arg-type]
    assert "'fp16'" in raised(ValueError, lambda: hvd.allreduce(one, compression="fp16"))
    assert "Max" in raised(ValueError, lambda: hvd.allreduce(one, op=hvd.Max, compression=hvd.Compression.onebit()))
    assert "sparse_allreduce_async" in raised(ValueError, lambda: hvd.allreduce(one.to_sparse()))
    assert "list" in raised(ValueError, lambda: hvd.allreduce([1.0]))  # type: ignore[arg-type]
    assert "int64" in raised(ValueError, lambda: hvd.allreduce(torch.tensor([1]), op=hvd.Adasum))
    assert "scalar" in raised(ValueError, lambda: hvd.allgather(torch.tensor(1.0)))
    assert "scalar" in raised(ValueError, lambda: hvd.reducescatter(torch.tensor(1.0)))
    assert "scalar" in raised(ValueError, lambda: hvd.alltoall(torch.tensor(1.0)))
    assert "root_rank=9" in raised(ValueError, lambda: hvd.broadcast(one, 9))
    rows = torch.ones(n)
    assert "int64" in raised(ValueError, lambda: hvd.alltoall(rows, torch.ones(n, dtype=torch.int64)))
    for wrong in ([1] * (n - 1), [2] * n, [n + 1, -1] + [0] * (n - 2)):
        assert "splits=" in raised(ValueError, partial(hvd.alltoall, rows, wrong))
    for strange in (3, [1.9, 0.1] + [1] * (n - 2), ["1"] * n, "1" * n, [None] * n, [math.inf] * n):
        assert f"splits={strange!r}: expected {n} whole" in raised(ValueError, partial(hvd.alltoall, rows, strange))
    equal(hvd.alltoall(rows, (n / n for _ in range(n)))[0], rows)
    assert f"{n + 1} rows" in raised(ValueError, lambda: hvd.alltoall(torch.ones(n + 1)))
    for operation in (hvd.allreduce, hvd.allreduce_async_, hvd.grouped_allreduce, hvd.reducescatter):
        for factor in (None, "2", [2], one):
            given = [one] if operation is hvd.grouped_allreduce else one
            for which in ("prescale_factor", "postscale_factor"):
                message = raised(ValueError, partial(operation, given, **{which: factor}))  # type: ignore[arg-type]
                assert f"{which}={factor!r}: expected a number" in message
    for none in ([0], None):
        assert f"process_set={none}" in raised(ValueError, partial(hvd.remove_process_set, none))  # type: ignore[arg-type]
    for nobody in (3, None, ["a"], [0.5], "01", [0, 0], [-1], []):
        assert "ranks=" in raised(ValueError, partial(hvd.add_process_set, nobody))  # type: ignore[arg-type]
    hvd.barrier()
    handle = hvd.allreduce_async(one, name="twice") if rank else -1
    if rank:
        assert "allreduce.twice is still under way" in raised(
            ValueError, lambda: hvd.allreduce_async(one, name="twice")
        )
        other = hvd.allgather_async(one, name="twice")
        hvd.barrier()
    else:
        hvd.barrier()
        handle, other = hvd.allreduce_async(one, name="twice"), hvd.allgather_async(one, name="twice")
    equal(hvd.synchronize(handle), one)
    hvd.synchronize(other)
    equal(hvd.allreduce(one, name="twice"), one)  # free again


@on_ranks(2, within=20)
def test_what_a_rank_was_refused_is_not_counted(rank: int) -> None:
    hvd.init()
    x = torch.full((4, 4), float(rank))
    for operation in (hvd.allreduce_, hvd.allgather, hvd.reducescatter):
        if rank:
            assert "contiguous" in raised(ValueError, partial(operation, x[:, ::2]))
        mean = 0.0 if operation is hvd.allgather else 0.5
        equal(operation(x[:, ::2].contiguous())[0], torch.full((2,), mean))


def disagreements(rank: int) -> dict[str, str]:
    hvd.init()
    odd = rank == hvd.size() - 1
    cases: dict[str, Callable[[], Any]] = {
        "shape": lambda: hvd.allreduce(torch.ones(3 + odd), name="case"),
        "dimensions": lambda: hvd.allreduce(torch.ones((2, 2) if odd else (4,)), name="case"),
        "dtype": lambda: hvd.allreduce(torch.ones(3, dtype=torch.float64 if odd else torch.int64), name="case"),
        "op": lambda: hvd.allreduce(torch.ones(3), name="case", op=hvd.Sum if odd else hvd.Average),
        "prescale": lambda: hvd.allreduce(torch.ones(3), name="case", prescale_factor=1.0 + odd),
        "root": lambda: hvd.broadcast(torch.ones(3), int(odd), name="case"),
        "broadcast shape": lambda: hvd.broadcast(torch.ones(3 + odd), 0, name="case"),
        "columns": lambda: hvd.allgather(torch.ones(2, 3 + odd), name="case"),
        "allgather dtype": lambda: hvd.allgather(torch.ones(2).to(torch.int32 if odd else torch.float32), name="case"),
        "members": lambda: hvd.grouped_allreduce([torch.ones(2)] * (2 + odd), name="case"),
        "alltoall dtype": lambda: hvd.alltoall(torch.ones(4).to(torch.int32 if odd else torch.float32), name="case"),
        "scatter": lambda: hvd.reducescatter(torch.ones(4 + odd), name="case"),
        "codec": lambda: hvd.allreduce(
            torch.ones(9), name="case", compression=hvd.Compression.topk(density=0.5 if odd else 0.25)
        ),
        "process set": lambda: hvd.add_process_set([0] if odd else [1]),
        "adasum": lambda: hvd.allreduce(torch.ones(3), name="case", op=hvd.Adasum, postscale_factor=1.0 + odd),
        "sparse shape": lambda: hvd.sparse_allreduce_async(torch.eye(3 + odd).to_sparse(), "case", hvd.Sum)(),  # noqa: PLW0108
    }
    found = {}
    for case, action in cases.items():
        start = time.monotonic()
        found[case] = raised(hvd.HorovodInternalError, action)
        assert time.monotonic() - start < 15
    equal(hvd.allreduce(torch.ones(2), name="case"), torch.ones(2))  # and it goes on
    return found


@WORLDS
def test_ranks_that_disagree_hear_of_it_on_every_rank(ranks: Ranks, world: int) -> None:
    words = {
        "shape": ("shape", "[3]", "[4]"), "dimensions": ("shape", "[2, 2]"), "dtype": ("dtype", "float64", "int64"),
        "op": ("op", "Sum", "Average"), "prescale": ("prescale factor", "2.0"), "root": ("root rank",),
        "broadcast shape": ("shape", "[4]"), "columns": ("shape", "[2, 4]"), "allgather dtype": ("dtype", "int32"),
        "members": ("number of tensors", "3"), "alltoall dtype": ("dtype",), "scatter": ("shape", "[5]"),
        "codec": ("compression", "0.25", "0.5"), "process set": ("ranks", "[0]", "[1]"),
        "adasum": ("postscale factor",), "sparse shape": ("sparse shape", "[4, 4]"),
    }  # fmt: skip
    results = ranks(world).run(disagreements)
    for found in results:
        assert found.keys() == words.keys()
        for case, expected in words.items():
            assert all(word in found[case] for word in (*expected, f"rank {world - 1}")), f"{case}: {found[case]}"
    assert all(found == results[0] for found in results)


@on_ranks(4)
def test_what_all_were_ready_for_arrives_although_some_leave(rank: int) -> None:
    hvd.init()
    handles = [hvd.allreduce_async(torch.full((size,), 1.0), op=hvd.Sum) for size in (1, 2_000_000, 3, 3_000_000)]
    hvd.barrier()
    if rank == 2:
        time.sleep(0.5)
        assert [float(hvd.synchronize(handle)[0]) for handle in handles] == [4.0] * 4
    hvd.shutdown()


@on_ranks(2, within=20)
def test_an_object_that_cannot_be_sent_is_named_on_every_rank(rank: int) -> None:
    hvd.init()
    for call in (
        lambda: hvd.broadcast_object(threading.Lock() if rank == 1 else "read by nobody", 1),
        lambda: hvd.allgather_object(threading.Lock() if rank == 1 else rank),
    ):
        message = raised(ValueError, call)
        assert "rank 1: TypeError: cannot pickle '_thread.lock'" in message
        assert "rank 0" not in message
    assert hvd.broadcast_object(rank, 1) == 1
    assert hvd.allgather_object(rank) == [0, 1]


# -- the timeline ------------------------------------------------------------------------------------------------------


def traced(rank: int, path: str) -> None:
    hvd.init()
    hvd.start_timeline(path, mark_cycles=True)
    hvd.barrier()
    for i in range(3):
        hvd.allreduce(torch.ones(4), name=f"traced{i}")
    hvd.allgather(torch.ones(1), name="rows")
    hvd.stop_timeline()
    hvd.start_timeline(f"{path}.second")
    if rank == 0:
        assert "stop_timeline" in raised(ValueError, lambda: hvd.start_timeline(path))
    hvd.stop_timeline()


def test_the_timeline_is_a_chrome_trace(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks(2).run(traced, str(path))
    events = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    named = {(rows[event["tid"]], event["name"]) for event in spans}
    for i in range(3):
        assert {(f"allreduce.traced{i}", "NEGOTIATE_ALLREDUCE"), (f"allreduce.traced{i}", "ALLREDUCE")} <= named
    assert ("allgather.rows", "ALLGATHER") in named
    assert any(event["name"] == "CYCLE_START" for event in events)
    assert json.loads(Path(f"{path}.second").read_text()) == []


def stopped_meanwhile(rank: int, path: str) -> None:
    hvd.init()
    hvd.start_timeline(path, mark_cycles=True)
    timeline = context.world().engine.timeline
    if timeline is not None:
        mark = timeline.mark
        timeline.mark = lambda name: (mark(name), hvd.stop_timeline())  # type: ignore[assignment, func-returns-value]
    equal(hvd.allreduce(torch.ones(3000)), torch.ones(3000))
    equal(hvd.allreduce(torch.ones(3000)), torch.ones(3000))


def test_a_timeline_may_be_stopped_while_operations_run(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    ranks(2).run(stopped_meanwhile, str(path))
    assert json.loads(path.read_text("utf-8"))


def traced_later(rank: int, folder: str) -> None:
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
        hvd.init()
        hvd.barrier()
        found = list(Path(folder).iterdir())
        hvd.barrier()
        assert not found
        hvd.start_timeline("trace.json")
        hvd.barrier()
        hvd.stop_timeline()


def test_a_dynamic_timeline_is_started_later(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(traced_later, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
