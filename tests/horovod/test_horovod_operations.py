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
from gradwire import CODECS, QSGD, Codec, TopK
from gradwire.compress import SparseCodec
from gradwire.hooks.horovod.runtime import context
from ranks import Ranks, on_ranks
from torch import Tensor

#: `on_ranks` under Horovod.
horovod_ranks = partial(on_ranks, before=hvd.init)
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


@pytest.mark.parametrize(("name", "bits", "large"), [("fp16", 12, math.inf), ("bf16", 9, 2.0**17)])
@horovod_ranks(2)
def test_half_precision_rounds_on_the_way(rank: int, name: str, bits: int, large: float) -> None:
    """The last bit of the mantissa is gone; float16 has no room for a large number."""
    half = getattr(hvd.Compression, name)
    x, rounded = torch.tensor([1.0 + 2.0**-bits, 2.0**17]), torch.tensor([1.0, large])
    equal(hvd.allreduce(x, compression=half), rounded)
    equal(hvd.grouped_allreduce([x], compression=half)[0], rounded)
    equal(hvd.reducescatter(x, compression=half), rounded[rank : rank + 1])
    equal(hvd.allreduce(torch.tensor([2049, 5]), op=hvd.Sum, compression=half), [4098, 10])
    compressed, ctx = half.compress(x)
    assert (compressed.itemsize, half.decompress(compressed, ctx).dtype) == (2, torch.float32)
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=half)
    (p * x).sum().backward()
    optimizer.synchronize()
    equal(p.grad, rounded)


@horovod_ranks(3)
def test_the_average_of_large_integers(rank: int) -> None:
    """Where 1/n would be off by one unit in the last place."""
    equal(hvd.allreduce(torch.tensor([(1 << 62) // 3 + 1])), [(1 << 62) // 3 + 1])


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


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@horovod_ranks(2)
def test_nameless_tensors_are_compressed_only_where_nothing_stays_behind(rank: int) -> None:
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


@horovod_ranks(2)
def test_a_name_with_a_residual_keeps_its_shape(rank: int) -> None:
    codec = hvd.Compression.topk(density=0.5)
    hvd.allreduce(torch.ones(6), compression=codec, name="reshaped")
    assert "(6,)" in raised(ValueError, lambda: hvd.allreduce(torch.ones(4), compression=codec, name="reshaped"))
    equal(hvd.allreduce(torch.ones(6), compression=codec, name="reshaped")[-1], 2.0)
    unbiased = hvd.Compression.qsgd(bits=8)
    for numel in (300, 200, 300):
        assert hvd.allreduce(torch.ones(numel), compression=unbiased, name="reshaped").shape == (numel,)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@horovod_ranks(2)
def test_what_is_left_out_of_a_named_tensor_comes_later(rank: int, codec: Codec) -> None:
    x = torch.arange(1.0, 301.0)
    total = sum((hvd.allreduce(x, name="kept", compression=codec, op=hvd.Sum) for _ in range(40)), torch.zeros(300))
    assert abs(float(total.sum() / (40 * hvd.size() * x.sum())) - 1) < 0.1 or isinstance(codec, SparseCodec)
    if isinstance(codec, TopK):
        assert (total != 0).sum() > 3 * codec.k(300)
        assert (hvd.allreduce(x, name="new", compression=codec) != 0).sum() == codec.k(300)
    a, b = hvd.grouped_allreduce([x, -x], name="pair", compression=codec)
    assert a.shape == b.shape == x.shape


@horovod_ranks(3)
def test_adasum_needs_a_power_of_two(rank: int) -> None:
    assert "power of two" in raised(ValueError, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum))


# -- process sets ------------------------------------------------------------------------------------------------------


@horovod_ranks(2, 4)
def test_process_sets(rank: int) -> None:
    n, world = hvd.size(), hvd.global_process_set
    assert (world.process_set_id, world.ranks, world.rank(), world.size()) == (0, list(range(n)), rank, n)
    even, odd = hvd.ProcessSet(range(0, n, 2)), hvd.ProcessSet(range(1, n, 2))
    assert (even.process_set_id, even.included(), even.size()) == (None, None, None)
    assert "not registered" in raised(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=even))
    assert hvd.add_process_set(even) is even
    hvd.add_process_set(odd)
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert (mine.included(), mine.rank(), mine.size()) == (True, rank // 2, n // 2)
    assert (other.included(), other.rank()) == (False, None)
    equal(hvd.allreduce(torch.tensor([float(rank)]), name="x", process_set=mine), [sum(mine.ranks) / len(mine.ranks)])
    equal(hvd.allreduce(torch.tensor([float(rank)]), name="x"), [(n - 1) / 2])
    # The root is a global rank, and it has to be in the set.
    assert "root_rank" in raised(ValueError, lambda: hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine))
    assert f"rank {rank} is not in" in raised(ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=other))
    for twin in (hvd.ProcessSet(even.ranks), hvd.ProcessSet(range(n))):
        assert "exists already" in raised(ValueError, partial(hvd.add_process_set, twin))
    assert "below" in raised(ValueError, lambda: hvd.add_process_set([0, n]))
    assert [hvd.remove_process_set(gone) for gone in (odd, odd, world)] == [True, False, False]
    again = hvd.add_process_set(list(range(1, n, 2)))
    assert again.process_set_id not in (None, even.process_set_id)
    assert hvd.remove_process_set(again)
    assert hvd.remove_process_set(even)


@horovod_ranks(3)
def test_a_process_set_with_an_operation_under_way_stays(rank: int) -> None:
    again = hvd.add_process_set([1, 2])
    handle = hvd.allreduce_async(torch.ones(2), name="half", process_set=again) if rank == 1 else None
    assert "operations under way" in raised(hvd.HorovodInternalError, partial(hvd.remove_process_set, again))
    if rank == 2:
        handle = hvd.allreduce_async(torch.ones(2), name="half", process_set=again)
    if handle is not None:
        hvd.synchronize(handle)
    assert hvd.remove_process_set(again)


# -- join --------------------------------------------------------------------------------------------------------------


@horovod_ranks(2, 4)
def test_join_returns_the_last_rank(rank: int) -> None:
    n = hvd.size()
    if rank:
        assert "joined" in raised(hvd.HorovodInternalError, lambda: hvd.broadcast(torch.ones(1), 1))
    assert hvd.join() >= 0
    for step in range(rank + 1):  # rank r has r + 1 batches
        hvd.allreduce(torch.ones(3), name=f"mean{step}")
    assert hvd.join() == n - 1
    if rank == 0:
        time.sleep(0.3)
    assert hvd.join() == 0


# -- autograd ----------------------------------------------------------------------------------------------------------


@horovod_ranks(2, 4, within=20.0)
def test_autograd_goes_through_and_through_gradients(rank: int) -> None:
    """The first and second derivative of a sum of cubes, as for a penalty on gradients: rank r has r + 1 everywhere."""
    n = hvd.size()
    mine, mean = rank + 1.0, (n + 1) / 2
    own = torch.arange(n) <= rank
    half, last = hvd.Compression.fp16, [0] * (n - 1) + [n]
    averaged, copied = (3 * mean**2, 6 * mean), (3 * mine**2, 6 * mine)
    summed, gathered = (3 * n**3 * mean**2, 6 * n**3 * mean), (3 * mine**2, 6 * mine / n)
    cases: list[tuple[Callable[[Tensor], Tensor], tuple[Any, Any]]] = [
        (hvd.allreduce, averaged),
        (lambda x: hvd.allreduce(x, compression=half), averaged),
        (lambda x: hvd.allreduce(x, op=hvd.Sum, name="twice"), summed),
        (lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), (8 * summed[0], 8 * summed[1])),
        (lambda x: torch.cat(hvd.grouped_allreduce([x, 2 * x])), (9 * averaged[0], 9 * averaged[1])),
        (lambda x: hvd.allgather(x[own]), (own * gathered[0], own * gathered[1])),
        (lambda x: hvd.grouped_allgather([x, x])[1], gathered),
        (lambda x: hvd.broadcast(x, 1), (12.0, 12 / n) if rank == 1 else (0.0, 0.0)),
        (hvd.alltoall, copied),
        (lambda x: hvd.alltoall(x, [1] * n)[0], copied),
        (lambda x: hvd.alltoall(x, last)[0], copied),
        (hvd.reducescatter, averaged),
        (lambda x: hvd.grouped_reducescatter([x])[0], averaged),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), summed),
    ]
    for operation, expected in cases:
        x = torch.full((n,), mine, requires_grad=True)
        (first,) = torch.autograd.grad(operation(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        for found, value in zip((first, second), expected, strict=True):
            assert torch.allclose(found, torch.as_tensor(value).expand(n).to(found))
    least = hvd.allreduce(x, op=hvd.Min)
    assert "op=Min" in raised(RuntimeError, lambda: least.sum().backward())


# -- what is refused ---------------------------------------------------------------------------------------------------


@horovod_ranks(2, 4)
def test_wrong_arguments_are_refused_at_the_call(rank: int) -> None:
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
    assert "Min" in raised(ValueError, lambda: hvd.sparse_allreduce_async(one.to_sparse(), None, hvd.Min))
    assert "list" in raised(ValueError, lambda: hvd.allreduce([1.0]))  # type: ignore[arg-type]
    assert "int64" in raised(ValueError, lambda: hvd.allreduce(torch.tensor([1]), op=hvd.Adasum))
    for scattered in (hvd.allgather, hvd.reducescatter, hvd.alltoall):
        assert "scalar" in raised(ValueError, partial(scattered, torch.tensor(1.0)))
    topk = hvd.Compression.topk(density=0.5)
    assert "TopK" in raised(ValueError, lambda: hvd.reducescatter(torch.ones(n), compression=topk))
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


@horovod_ranks(2, within=20)
def test_what_a_rank_was_refused_is_not_counted(rank: int) -> None:
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


@horovod_ranks(4)
def test_what_all_were_ready_for_arrives_although_some_leave(rank: int) -> None:
    handles = [hvd.allreduce_async(torch.full((size,), 1.0), op=hvd.Sum) for size in (1, 2_000_000, 3, 3_000_000)]
    hvd.barrier()
    if rank == 2:
        time.sleep(0.5)
        assert [float(hvd.synchronize(handle)[0]) for handle in handles] == [4.0] * 4
    hvd.shutdown()


@horovod_ranks(2, within=20)
def test_an_object_that_cannot_be_sent_is_named_on_every_rank(rank: int) -> None:
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
    hvd.start_timeline(f"{path}.second")  # which ends the first
    hvd.stop_timeline()


def test_the_timeline_is_a_chrome_trace(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = time.time() * 1e6
    ranks(2).run(traced, str(path))
    events = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert before - 1 <= events.pop(0)["args"]["start_time_since_epoch_in_micros"] <= time.time() * 1e6
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    named = {(rows[event["tid"]], event["name"]) for event in spans}
    for i in range(3):
        assert {(f"allreduce.traced{i}", "NEGOTIATE_ALLREDUCE"), (f"allreduce.traced{i}", "ALLREDUCE")} <= named
    assert ("allgather.rows", "ALLGATHER") in named
    assert any(event["name"] == "CYCLE_START" for event in events)
    assert len(json.loads(Path(f"{path}.second").read_text())) == 1


def stopped_meanwhile(rank: int, path: str) -> None:
    hvd.init()
    hvd.start_timeline(path, mark_cycles=True)
    timeline = context.engine().timeline
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
