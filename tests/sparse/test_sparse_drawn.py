"""`sparse_all_reduce` under calls that nobody would think of: layouts, types, modes, graphs, outputs, and faults.

The law: what comes out is the sum in float64 within rounding, bit for bit the same on all ranks; or every rank raises
the same error, outputs are as they were, and the next call works.
"""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_type

import pytest
import torch
import torch.distributed as dist
from gradwire import sparse_all_reduce
from gradwire.hooks.comm.entry_exchange import EntryExchanger
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.ports import drive
from gradwire.hooks.network import probe
from gradwire.hooks.sparse import all_reduce as sparse
from gradwire.hooks.sparse.validation import ALGORITHMS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from often import by_time
from ranks import Ranks, on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from training import pretend, told

PATTERNS = ("none", "few", "some", "all", "the first", "the last", "both ends", "a stretch", "by turns", "as others")
ENDS = {"the first": [0], "the last": [1], "both ends": [0, 1]}
INDEX_LAYOUTS = ("plain", "a column", "from the middle")
VALUE_LAYOUTS = (*INDEX_LAYOUTS, "one number", "negated")
NUMBERS = ("normal", "wide", "not finite", "zeros")
GRAPHS = ("none", "leaf", "inner")
OUTPUTS = ("none", "plain", "a column", "from the middle", "leaf", "inner", "values", "float32", "bfloat16")
MODES = ("grad", "no grad", "inference", "made in inference")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Side:
    """What one rank brings to a call."""

    pattern: str = "some"
    index_dtype: str = "int64"
    indices: str = "plain"
    values: str = "plain"
    numbers: str = "normal"
    graph: str = "none"
    out: str = "none"
    mode: str = "grad"


@dataclass(frozen=True)
class Call:
    """A call on as many ranks as there are sides. `fault`: what the second rank hands in instead."""

    numel: int
    dtype: str
    op: str
    algorithm: str
    beta: float
    sides: tuple[Side, ...]
    fault: str | None = None
    seed: int = 0
    #: () where values are numbers, (n,) where they are rows of n.
    row: tuple[int, ...] = ()


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(10)


def sparse_vector(size: int) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (size,), check_invariants=True)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


SOUND: dict[str, Any] = {"indices": torch.tensor([1, 4, 7]), "values": torch.ones(3), "numel": 10}
#: What rank 1 may hand in instead, and what every rank is told then.
FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "beyond": (lambda: {"indices": torch.tensor([1, 4, 10])}, ["rank 1: index 10 is out of range"]),
    "far beyond": (lambda: {"indices": torch.tensor([1, 4, 4 + (1 << 32)])}, ["rank 1: index 4294967300 is out of"]),
    "negative": (lambda: {"indices": torch.tensor([-3, 1, 4])}, ["rank 1: index -3 is out of range"]),
    "unsorted": (lambda: {"indices": torch.tensor([4, 1, 7])}, ["rank 1", "position 1", "sort them"]),
    "duplicate": (lambda: {"indices": torch.tensor([1, 4, 4])}, ["rank 1", "position 2", "coalesce"]),
    "lengths": (lambda: {"values": torch.ones(2)}, ["rank 1: 3 indices", "2 values"]),
    "no row": (lambda: {"values": torch.ones(3, 0)}, ["rank 1: values must be"]),
    "float64": (lambda: {"values": torch.ones(3).double()}, ["rank 1: values must be", "float64"]),
    "row": (lambda: {"values": torch.ones(3, 11)}, ["disagree on "]),
    "kind": (lambda: {"indices": torch.ones(3)}, ["rank 1: indices must be", "torch.float32"]),
    "no tensor": (lambda: {"values": [1.0, 2.0, 3.0]}, ["rank 1: values must be", "a list"]),
    "cube": (lambda: {"values": torch.ones(3, 1, 1)}, ["rank 1: values must be", "(3, 1, 1)"]),
    "meta": (lambda: {"values": torch.ones(3, device="meta")}, ["rank 1: values must be", "meta"]),
    "all meta": (
        lambda: {"indices": torch.zeros(3, dtype=torch.int64, device="meta"), "values": torch.ones(3, device="meta")},
        ["rank 1: indices must be", "meta"],
    ),
    "fake": (lambda: {"values": fake()}, ["rank 1: values must be", "FakeTensor"]),
    "sparse": (lambda: {"values": sparse_vector(3)}, ["rank 1: values must be", "torch.sparse_coo"]),
    "numel": (lambda: {"numel": 11}, ["disagree on numel", "has 10", "rank 1 has 11"]),
    "no numel": (lambda: {"numel": None}, ["rank 1: numel=None"]),
    "op": (lambda: {"op": "sum"}, ["disagree on op", "has mean", "rank 1 has sum"]),
    "unknown op": (lambda: {"op": "max"}, ["rank 1: op='max'", "'mean', 'sum'"]),
    "a tensor for an op": (lambda: {"op": torch.ones(2)}, ["rank 1: op=tensor"]),
    "unspeakable": (lambda: {"op": Unspeakable()}, ["rank 1: no words"]),
    "dtype": (lambda: {"values": torch.ones(3).bfloat16()}, ["disagree on dtype", "bfloat16"]),
    "algorithm": (lambda: {"algorithm": "gather"}, ["disagree on algorithm", "rank 1 has gather"]),
    "out": (lambda: {"out": torch.zeros(9)}, ["rank 1: out must be", "(10,)", "(9,)"]),
    "out of another type": (lambda: {"out": "here"}, ["rank 1: out must be", "a str"]),
    "out of one address": (lambda: {"out": torch.zeros(1).expand(10)}, ["rank 1", "at one address", "clone()"]),
    "out of rows that overlap": (
        lambda: {"values": torch.ones(3, 2), "out": torch.zeros(11).unfold(0, 2, 1)},
        ["rank 1: rows of out overlap", "strides of (1, 1)", "clone()"],
    ),
    "out elsewhere": (lambda: {"out": torch.zeros(10, device="meta")}, ["rank 1: out must be", "on meta"]),
    "sparse out": (lambda: {"out": sparse_vector(10)}, ["rank 1: out must be", "torch.sparse_coo"]),
    "out of inference mode": (lambda: {"out": inference()}, ["rank 1: out cannot be written to", "InferenceMode"]),
}


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers, but for those of "one number"."""
    if layout == "a column":
        return torch.stack([x, torch.full_like(x, 77)], dim=1)[:, 0]
    if layout == "from the middle":
        return torch.cat([torch.full_like(x[:1], 77), x, x])[min(1, len(x)) : min(1, len(x)) + len(x)]
    if layout == "one number":
        return x[:1].expand(len(x), *x.shape[1:]) if len(x) else x
    if layout == "negated" and x.dtype == torch.float32:
        return torch.complex(x, -x).conj().imag
    return x


def numbers(kind: str, k: int, generator: torch.Generator) -> Tensor:
    if kind == "zeros":
        return torch.tensor([0.0, -0.0]).repeat(k)[:k]
    x = torch.randn(k, generator=generator)
    if kind == "wide":
        x *= 10.0 ** torch.randint(-4, 3, (k,), generator=generator)
    if kind == "not finite":
        strange = torch.tensor([float("nan"), float("inf"), -float("inf")])
        x[::3] = strange[torch.randint(0, 3, (len(x[::3]),), generator=generator)]
    return x


def entries(call: Call, rank: int) -> tuple[Tensor, Tensor]:
    """Indices and values of a rank: any rank can tell what another has."""
    side, numel = call.sides[rank], call.numel
    shared, own = (torch.Generator().manual_seed(1000 * call.seed + s) for s in (999, rank))
    share = {"none": 0.0, "few": 0.01, "all": 1.0}.get(side.pattern, 0.3)
    if side.pattern in ENDS:
        indices = torch.tensor(ENDS[side.pattern]).mul(numel - 1).unique()
    elif side.pattern == "by turns":
        indices = torch.arange(min(rank, numel), numel, len(call.sides))
    elif side.pattern == "a stretch":
        start = int(torch.randint(numel, (1,), generator=shared))
        indices = torch.arange(start, min(numel, start + 1 + numel // 50 * (1 + rank)))
    else:
        drawn = torch.rand(numel, generator=shared if side.pattern == "as others" else own)
        indices = (drawn < share).nonzero().view(-1)
    values = numbers(side.numbers, len(indices) * math.prod(call.row), own).to(DTYPES[call.dtype])
    return indices.to(getattr(torch, side.index_dtype)), laid_out(values.view(-1, *call.row), side.values)


def output(side: Side, values: Tensor, numel: int) -> Tensor | None:
    blank = torch.full((numel, *values.shape[1:]), 5.0, dtype=DTYPES.get(side.out, values.dtype))
    if side.out == "none":
        return None
    if side.out == "leaf":
        return blank.requires_grad_()
    if side.out == "inner":
        return blank.requires_grad_() * 1
    if side.out == "values" and len(values) == numel and values.is_contiguous():
        return values
    return laid_out(blank, side.out)


def arguments(call: Call, rank: int) -> dict[str, Any]:
    side = call.sides[rank]
    with torch.inference_mode(side.mode in ("inference", "made in inference")):
        indices, values = entries(call, rank)
        if side.graph != "none" and not torch.is_inference_mode_enabled():
            values = values.detach().requires_grad_()
        if side.graph == "inner":
            values = laid_out(values * 1, side.values)
    with torch.inference_mode(side.mode == "inference"):
        out = output(
            side, values if not values.requires_grad and side.mode != "made in inference" else values[:0], call.numel
        )
    found = {
        "indices": laid_out(indices, side.indices),
        "values": values,
        "numel": call.numel,
        "op": call.op,
        "algorithm": call.algorithm,
        "out": out,
    }
    if call.fault is not None and rank == 1:
        found = SOUND | FAULTS[call.fault][0]()
    return found


def reference(call: Call) -> tuple[Tensor, Tensor]:
    """In float64: the result, and the sum of magnitudes."""
    total, magnitude = torch.zeros(2, call.numel, *call.row, dtype=torch.float64)
    for rank in range(len(call.sides)):
        indices, values = entries(call, rank)
        total[indices.long()] += values.double()
        magnitude[indices.long()] += values.double().abs()
    scale = 1.0 / len(call.sides) if call.op == "mean" else 1.0
    return total * scale, magnitude * scale


def perform(rank: int, call: Call) -> tuple[str, str, str]:
    """An error's text, or the result's type and its bits."""
    given, mode = arguments(call, rank), call.sides[rank].mode
    out = given.get("out") if call.fault is None or rank != 1 else None
    before = None if out is None else out.detach().clone()
    real, probe.calibration = probe.calibration, pretend(call.beta)
    try:
        with torch.no_grad() if mode == "no grad" else torch.inference_mode(mode == "inference"):
            result = sparse_all_reduce(**given)
    except (TypeError, ValueError, RuntimeError) as error:
        assert out is None or same(out.detach(), before)
        return f"{type(error).__name__}: {error}", "", ""
    finally:
        probe.calibration = real
    wanted, magnitude = reference(call)
    if out is None:
        indices, values = result
        assert (indices.dtype, values.dtype) == (given["indices"].dtype, given["values"].dtype)
        assert not values.requires_grad
        assert bool((indices[1:] > indices[:-1]).all())
        got = torch.zeros(call.numel, *call.row, dtype=values.dtype).index_put_((indices.long(),), values)
        union = torch.cat([entries(call, other)[0].long() for other in range(len(call.sides))]).unique()
        assert torch.equal(indices.long(), union)
    else:
        assert result is out
        got = out.detach()
    types = torch.finfo(DTYPES[call.dtype]), torch.finfo(got.dtype)
    bound = magnitude * sum((info.eps for info in types), len(call.sides) * 2.0**-23)
    bound += sum(info.smallest_normal * info.eps for info in types)
    close = (got.double() - wanted).abs() <= bound
    assert bool((close | same_place(got.double(), wanted)).all()), (got, wanted)
    # Zeros may have either sign, and torch rounds to NaNs of other bits where memory has gaps.
    canonical = (got.contiguous() + 0).masked_fill_(got.isnan(), torch.nan)
    return "", str(got.dtype), hashlib.sha256(canonical.view(torch.uint8).numpy().tobytes()).hexdigest()


def same_place(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and bool(same_place(a, b).all())


def perform_all(rank: int, calls: list[Call]) -> list[tuple[str, str, str]]:
    found = []
    for call in calls:
        try:
            found.append(perform(rank, call))
        except (
            AssertionError
        ):  # after the exchange: the next call is in step, and a failure shrinks on the same processes
            found.append((traceback.format_exc(limit=-1), "", ""))
    for room in sparse._pools.get(dist.group.WORLD, {}).values():
        assert not any(memory.requires_grad or memory.is_inference() for memory in room._memory.values())
    return found


sides = st.builds(
    Side,
    pattern=st.sampled_from(PATTERNS),
    index_dtype=st.sampled_from(("int64", "int32")),
    indices=st.sampled_from(INDEX_LAYOUTS),
    values=st.sampled_from(VALUE_LAYOUTS),
    numbers=st.sampled_from(NUMBERS),
    graph=st.sampled_from(GRAPHS),
    out=st.sampled_from(OUTPUTS),
    mode=st.sampled_from(MODES),
)


@st.composite
def calls(draw: st.DrawFn, world_size: int) -> Call:
    if world_size > 1 and draw(st.integers(0, 3)) == 3:
        faulty = tuple(Side() if rank == 1 else draw(sides) for rank in range(world_size))
        return Call(10, "float32", "mean", "auto", 1e-9, faulty, draw(st.sampled_from(tuple(FAULTS))))
    return Call(
        numel=draw(st.one_of(st.integers(1, 40), st.integers(1, 5000), st.sampled_from([1 << 17, 1 << 20]))),
        row=draw(st.sampled_from([(), (), (1,), (7,)])),
        dtype=draw(st.sampled_from(tuple(DTYPES))),
        op=draw(st.sampled_from(("mean", "sum"))),
        algorithm=draw(st.sampled_from(("auto", *ALGORITHMS))),
        beta=draw(st.sampled_from([1e-11, 1e-9, 1e-7])),
        sides=tuple(draw(st.lists(sides, min_size=world_size, max_size=world_size))),
        seed=draw(st.integers(0, 99)),
    )


sequences = st.sampled_from([1, 2, 2, 3, 4, 8]).flatmap(
    lambda world_size: st.lists(calls(world_size), min_size=1, max_size=3)
)


#: Each layout, graph and mode by every algorithm, in the memory of the call before.
EACH = [
    Call(40, "float32", "sum", algorithm, 1e-9, sides)
    for algorithm in ALGORITHMS
    for sides in (
        (
            Side(values="negated", indices="a column", mode="inference"),
            Side(values="a column", graph="leaf", out="inner"),
        ),
        (Side(values="from the middle", graph="inner", out="leaf"), Side(values="one number", out="inner")),
    )
]


def some_of_eight(pattern: str) -> tuple[Side, ...]:
    numbers = {1: "not finite"}
    return tuple(Side(pattern if rank % 3 else "none", numbers=numbers.get(rank, "normal")) for rank in range(8))


#: Each pattern by every algorithm, on some of eight ranks, of which one has numbers that are not finite; and on one.
PLACES = [
    Call(numel, "float32", "mean", algorithm, 1e-9, some_of_eight(pattern))
    for algorithm in ALGORITHMS
    for numel, pattern in ((1, "all"), *((5003, pattern) for pattern in PATTERNS))
]
ALONE = [Call(40, "float32", "sum", algorithm, 1e-9, (Side(),)) for algorithm in ALGORITHMS]
#: Each fault, and a sound call, for which the group must be in step.
REFUSED = [Call(10, "float32", "mean", "auto", 1e-9, (Side(),) * 3, fault) for fault in (*FAULTS, None)]


@settings(max_examples=by_time(14, 5000), deadline=None, suppress_health_check=list(HealthCheck))
@example(sequence=EACH)
@example(sequence=PLACES)
@example(sequence=ALONE)
@example(sequence=REFUSED)
@given(sequence=sequences)
def test_any_calls(ranks: Ranks, sequence: list[Call]) -> None:
    """Calls one after the other on the same processes; the ranks' results are held against each other."""
    results = ranks(len(sequence[0].sides)).run(perform_all, sequence)
    for call, found in zip(sequence, zip(*results, strict=True), strict=True):
        errors = {error for error, _, _ in found}
        assert len(errors) == 1, found
        (error,) = errors
        if call.fault is None:
            assert not error
        else:
            assert all(word in error for word in FAULTS[call.fault][1]), (call.fault, error)
        bits = {(dtype, digest) for _, dtype, digest in found}
        assert len(bits) == len({dtype for dtype, _ in bits}), "ranks differ"


@pytest.mark.parametrize("pattern", ["some", "a stretch", "as others", "by turns"])
@on_ranks(4)
def test_owners_get_equal_shares(rank: int, pattern: str) -> list[int]:
    exchanger = EntryExchanger(100_000, torch.float32, torch.device("cpu"), Group(dist.group.WORLD))
    indices = entries(Call(100_000, "float32", "sum", "split", 1e-9, (Side(pattern, "int32"),) * 4), rank)[0]
    bounds: list[int] = drive(exchanger.balanced_bounds(indices))
    cuts = torch.searchsorted(indices, torch.tensor(bounds, dtype=torch.int32))
    shares = cuts[1:] - cuts[:-1]
    dist.all_reduce(shares)
    assert (bounds[0], bounds[-1]) == (0, 100_000)
    assert int(shares.max()) <= 1.1 * float(shares.float().mean())
    return bounds


def outside(rank: int, how: str) -> str:
    """The error of a rank that has no group to call with."""
    group: Any = dist.GroupMember.NON_GROUP_MEMBER if how == "not in it" else "gloo"
    return told(lambda: sparse_all_reduce(torch.tensor([0]), torch.ones(1), 10, group=group))


@pytest.mark.parametrize("how", ["not in it", "no group"])
def test_a_rank_outside_is_told(ranks: Ranks, how: str) -> None:
    (said,) = ranks(1).run(outside, how)
    assert "expected a process group that this rank is in" in said


def types(indices: Tensor, values: Tensor, out: Tensor, maybe: Tensor | None) -> None:
    """Read by mypy."""
    assert_type(sparse_all_reduce(indices, values, 10), tuple[Tensor, Tensor])
    assert_type(sparse_all_reduce(indices, values, 10, out=None), tuple[Tensor, Tensor])
    assert_type(sparse_all_reduce(indices, values, 10, op="sum", algorithm="split", out=out), Tensor)
    assert_type(sparse_all_reduce(indices, values, 10, out=maybe), Tensor | tuple[Tensor, Tensor])
    sparse_all_reduce(indices, values, 10, op="max")  # type: ignore[call-overload]
    sparse_all_reduce(indices, values, 10, algorithm="gahter")  # type: ignore[call-overload]
