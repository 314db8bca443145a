"""Horovod's operations as nobody would call them: drawn, of all kinds, on all ranks and on process sets, on tensors of
any shape, stride and dtype, submitted in another order on each rank, synchronized in yet another, beside ranks that
have joined, and after. Each gives the right result, or is refused at the call, and the engine goes on."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import Identity
from gradwire.hooks.horovod.runtime.handles import COMPRESSIBLE, FLOATING, SUMMABLE
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ranks import Pool, Ranks
from torch import Tensor
from training import digest

#: What goes on beside ranks that have joined.
JOINABLE = ("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_", "allgather", "grouped_allgather",
            "sparse_allreduce", "objects")  # fmt: skip
KINDS = (
    *JOINABLE,
    "broadcast",
    "broadcast_",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
    "object",
    "barrier",
)
#: These have no asynchronous form.
WAITING = ("objects", "object", "barrier", "broadcast_parameters")
SHAPES = ((), (0,), (1,), (4,), (1, 1), (2, 1), (1, 4), (4, 3), (2, 0), (0, 1), (1, 1, 1), (2, 1, 3), (1, 2, 1))
LAYOUTS = ("plain", "odd", "offset", "transposed", "gapped", "expanded", "view")
DTYPES = (
    *SUMMABLE, torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
SETS: dict[int, tuple[tuple[int, ...], ...]] = {2: (), 3: ((0, 1), (1, 2), (0, 2)), 4: ((0, 1), (1, 2, 3), (0, 3))}
COMPRESSIONS = {"none": hvd.Compression.none, "half": hvd.Compression.fp16, "brain": hvd.Compression.bf16,
                "codec": hvd.Compression.codec(Identity())}  # fmt: skip
#: Rows of a sparse tensor.
ROWS = 5


@dataclass(frozen=True)
class Call:
    """One operation.

    Attributes:
        second: dtype of the second tensor of a group.
        uneven: ranks have different numbers of rows, or split theirs in unequal parts.
        here: the ranks that have not joined, which take part with zeros or no rows.
        waits: the synchronous form.
    """

    kind: str
    shape: tuple[int, ...]
    layout: str = "plain"
    dtype: torch.dtype = torch.float32
    second: torch.dtype | None = None
    op: int = hvd.Sum
    scales: tuple[float, float] = (1.0, 1.0)
    compression: str = "none"
    uneven: bool = False
    members: tuple[int, ...] = (0, 1)
    here: tuple[int, ...] = (0, 1)
    root: int = 1
    waits: bool = True
    number: int = 0
    named: bool = True

    @property
    def grouped(self) -> bool:
        return self.kind.startswith("grouped")

    @property
    def reduces(self) -> bool:
        return "reduce" in self.kind

    def tensor(self, rank: int, index: int = 0) -> Tensor:
        """Small whole numbers, which every dtype holds, in the memory that is asked for."""
        dtype = self.second if index and self.second else self.dtype
        shape = (self.shape[0] + rank, *self.shape[1:]) if self.uneven and "allgather" in self.kind else self.shape
        generator = torch.Generator().manual_seed(100 * self.number + 10 * index + rank)
        values = torch.randint(-2 if dtype.is_signed else 0, 3, shape, generator=generator).to(dtype)
        if self.layout == "odd":
            strides = [97 if size == 1 else step for size, step in zip(values.shape, values.stride(), strict=True)]
            return values.as_strided(values.shape, strides)
        if self.layout == "offset":
            return torch.cat([values.new_zeros(3), values.view(-1)])[3:].view(shape)
        if self.layout == "transposed" and values.dim() > 1:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if self.layout == "gapped" and values.dim():
            return torch.stack([values, values], -1)[..., 0]
        if self.layout == "expanded" and values.dim() and len(values):
            return values[:1].expand(shape)
        if self.layout == "view" and values.is_complex():
            return values.conj()
        return torch._neg_view(values) if self.layout == "view" and dtype in FLOATING else values

    def rows(self, rank: int) -> Tensor:
        """A sparse tensor with the call's tensor as its values, two of which share a place, of one sparse dimension or,
        by turns, two."""
        values = self.tensor(rank)
        indices = (torch.arange(len(values)) // 2 + rank) % ROWS
        both = [indices, (indices + 1) % ROWS][: 1 + self.number % 2]
        shape = (*[ROWS] * len(both), *values.shape[1:])
        return torch.sparse_coo_tensor(torch.stack(both), values, shape, check_invariants=True)

    def object(self, rank: int) -> Any:
        return self.number, rank, "x" * 4 * math.prod(self.shape)

    def sent(self, rank: int) -> list[int]:
        """How many rows a member sends to each other one by alltoall."""
        ways, place = len(self.members), self.members.index(rank)
        if not self.uneven:
            return [self.shape[0] // ways] * ways
        counts = [self.shape[0] // 2, *[0] * (ways - 2), self.shape[0] - self.shape[0] // 2]
        return counts[place:] + counts[:place]

    def refused(self) -> bool:
        x = self.tensor(self.root)
        takes: Sequence[torch.dtype] = SUMMABLE if self.reduces else DTYPES
        takes = FLOATING if self.op == hvd.Adasum and self.reduces else takes
        takes = COMPRESSIBLE if self.compression == "codec" else takes
        if self.dtype not in takes:
            return True
        if self.kind == "broadcast_parameters":
            return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
        if self.kind == "sparse_allreduce":
            return False
        if not x.is_contiguous():
            return True
        if self.kind == "alltoall":
            return x.dim() == 0 or (not self.uneven and len(x) % len(self.members) != 0)
        return x.dim() == 0 and ("allgather" in self.kind or "scatter" in self.kind)

    def begin(self, rank: int, process_set: hvd.ProcessSet) -> Callable[[], Any]:
        """Submit it, unless it waits; what gives the result."""
        if self.kind == "barrier":
            return lambda: hvd.barrier(process_set)
        options: dict[str, Any] = {"process_set": process_set, "name": f"drawn {self.number}" if self.named else None}
        if self.kind == "objects":
            return lambda: hvd.allgather_object(self.object(rank), **options)
        if self.kind == "object":
            return lambda: hvd.broadcast_object(self.object(rank), self.root, **options)
        tensors: Any = [self.tensor(rank, index) for index in range(1 + self.grouped)]
        given = tensors if self.grouped else tensors[0]
        if self.kind == "broadcast_parameters":
            broadcast: Any = hvd.broadcast_parameters
            return lambda: broadcast({"x": given}, self.root) or given
        if self.kind == "sparse_allreduce":
            return hvd.sparse_allreduce_async(self.rows(rank), op=self.op, **options)
        if self.reduces:
            options |= {"op": self.op, "prescale_factor": self.scales[0], "postscale_factor": self.scales[1]}
        if self.compression != "none":
            options["compression"] = COMPRESSIONS[self.compression]
        if self.kind.startswith("broadcast"):
            options["root_rank"] = self.root
        if self.kind == "alltoall" and self.uneven:
            counts = self.sent(rank)
            options["splits"] = counts if self.number % 2 else torch.tensor(counts, dtype=torch.int32)
        in_place = self.kind.endswith("_")
        name = self.kind.removesuffix("_") + "_async" * (not self.waits) + "_" * in_place
        function: Any = getattr(hvd, name)
        if self.waits:
            return lambda: self.checked(function(given, **options), rank, tensors)
        handle = function(given, **options)
        return lambda: self.checked(hvd.synchronize(handle), rank, tensors)

    def checked(self, result: Any, rank: int, tensors: list[Tensor]) -> Any:
        """The result, if it is in the tensors that were given, or else these are as they were."""
        if self.kind.endswith("_"):
            found = result if self.grouped else [result]
            return result if all(a is b for a, b in zip(found, tensors, strict=True)) else "elsewhere"
        same = all(torch.equal(wide(x), wide(self.tensor(rank, index))) for index, x in enumerate(tensors))
        return result if same else "written to its input"

    def expected(self, rank: int) -> Any:
        present = [member for member in self.members if member in self.here]
        if self.kind == "objects":
            return [self.object(r) for r in present]
        if self.kind == "object":
            return self.object(self.root)
        if self.kind == "barrier":
            return None
        if self.kind.startswith("broadcast"):
            return wide(self.tensor(self.root))
        if self.kind == "alltoall":
            place = self.members.index(rank)
            parts = [wide(self.tensor(r)).split(self.sent(r))[place] for r in self.members]
            received = torch.tensor([self.sent(r)[place] for r in self.members], dtype=torch.int32)
            return (torch.cat(parts), received) if self.uneven or not self.waits else torch.cat(parts)
        results = [self._expected(rank, index, present) for index in range(1 + self.grouped)]
        return results if self.grouped else results[0]

    def _expected(self, rank: int, index: int, present: Sequence[int]) -> Tensor:
        every = [wide(self.rows(r) if "sparse" in self.kind else self.tensor(r, index)) for r in self.members]
        if "allgather" in self.kind:
            return torch.cat([x for r, x in zip(self.members, every, strict=True) if r in present])
        every = [x if r in present else torch.zeros_like(x) for r, x in zip(self.members, every, strict=True)]
        scales = (1.0, 1.0) if "sparse" in self.kind else self.scales
        total = reduced(every, self.op, *scales, whole=not self.tensor(rank, index).is_floating_point())
        return total.tensor_split(len(every))[self.members.index(rank)] if "scatter" in self.kind else total

    def same(self, got: Any, expected: Any) -> bool:
        if isinstance(expected, Tensor):
            rounded = self.compression in ("half", "brain") or got.dtype.itemsize < 4
            off = 1e-2 if rounded else 1e-12 if got.dtype == torch.float64 else 1e-5
            return bool(got.shape == expected.shape and torch.allclose(wide(got), wide(expected), off, off))
        if isinstance(expected, list | tuple):
            return len(got) == len(expected) and all(map(self.same, got, expected))
        return bool(got == expected)


def wide(x: Tensor) -> Tensor:
    if x.is_sparse:
        values = wide(x._values())
        return values.new_zeros(x.shape).index_put_(tuple(x._indices()), values, accumulate=True)
    x = x.resolve_conj().resolve_neg()
    return x.to(torch.complex128) if x.is_complex() else x.double()


def reduced(every: list[Tensor], op: int, prescale: float, postscale: float, whole: bool) -> Tensor:
    """The reduction of float64 tensors; of `whole` numbers each scaling and the average truncate toward zero."""
    cut: Callable[[Tensor], Tensor] = torch.trunc if whole else lambda x: x
    every = [cut(x * prescale) for x in every]
    if op == hvd.Adasum:
        return adasum(every) * postscale
    rows = torch.stack(every)
    reductions: dict[int, Any] = {hvd.Min: rows.amin, hvd.Max: rows.amax, hvd.Product: rows.prod}
    total = reductions.get(op, rows.sum)(0)
    return cut(cut(total / len(every) if op == hvd.Average else total) * postscale)


def adasum(vectors: list[Tensor]) -> Tensor:
    """From the paper's equation; a vector of zeros changes nothing."""

    def share(of: Tensor, other: Tensor) -> Tensor:
        square = of.square().sum()
        return of * (1 - (of * other).sum() / (2 * square)) if square else of

    while len(vectors) > 1:
        vectors = [share(a, b) + share(b, a) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


# -- many, in any order ------------------------------------------------------------------------------------------------


def call(draw: random.Random, number: int, members: tuple[int, ...], here: tuple[int, ...]) -> Call:
    """One that is not refused."""
    kind = draw.choice(JOINABLE if set(members) - set(here) else KINDS)
    sync, whole = draw.random() < 0.3 or kind in WAITING, len(members) in (1, 2, 4)
    ops = [hvd.Average, hvd.Sum]
    if "sparse" not in kind:
        ops += [hvd.Min, hvd.Max, hvd.Product, *([hvd.Adasum] if whole and "scatter" not in kind else [])]
    op = draw.choice(ops)
    compressions = ["none"]
    if sync and kind in ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"):
        compressions += ["half", "brain"]
        compressions += ["codec"] * 2 if "scatter" not in kind and op in (hvd.Average, hvd.Sum) else []
    compression = draw.choice(compressions)
    group = kind.startswith("grouped") and compression != "codec" and op != hvd.Adasum and draw.random() < 0.5
    while True:
        shape = draw.choice([*SHAPES, (12, 2), (600, 2), (3000, 2)])
        uneven = bool(shape) and draw.random() < 0.5
        found = Call(
            kind,
            shape,
            "plain" if uneven or draw.random() < 0.7 else draw.choice(LAYOUTS),
            draw.choice(DTYPES if draw.random() < 0.5 else FLOATING),
            draw.choice(SUMMABLE) if group else None,
            op,
            draw.choice([(1.0, 1.0), (0.75, 3.0), (0.5, 1.75)]),
            compression,
            uneven,
            members,
            here,
            draw.choice(members),
            sync,
            number,
            draw.random() < 0.7,
        )
        if (shape or "sparse" not in kind) and not found.refused():
            return found


def script(draw: random.Random, size: int) -> list[list[list[Call]]]:
    """Phases, after each of which all ranks join, of rounds of calls."""
    phases, number = [], 0
    for _ in range(draw.randint(1, 3)):
        here, rounds = tuple(range(size)), []
        for _ in range(draw.randint(1, 4)):
            calls = []
            for _ in range(draw.randint(1, 6)):
                number += 1
                calls.append(call(draw, number, draw.choice([tuple(range(size)), *SETS[size]]), here))
            rounds.append(calls)
            if len(here) > 1 and draw.random() < 0.4:
                here = tuple(sorted(draw.sample(here, len(here) - 1)))
        phases.append(rounds)
    return phases


def play(rank: int, phases: Sequence[Sequence[Sequence[Call]]], seed: int) -> tuple[list[Any], dict[int, str]]:
    """The faults on this rank, and digests of the results that all ranks share."""
    size, draw = hvd.size(), random.Random(seed + rank)
    sets = {members: hvd.add_process_set(list(members)) for members in SETS[size]}
    sets[tuple(range(size))] = hvd.global_process_set
    hvd.allreduce(torch.ones(1), name="known", compression=COMPRESSIONS["codec"])  # who joins must know of it
    wrong, digests = [], {}

    def check(call: Call, result: Callable[[], Any]) -> None:
        got = result()
        if not call.same(got, call.expected(rank)):
            wrong.append((call, got))
        if "allreduce" in call.kind and "sparse" not in call.kind:
            digests[call.number] = digest([torch.cat([wide(x).reshape(-1) for x in (got if call.grouped else [got])])])

    for rounds in phases:
        later = []
        for calls in rounds:
            mine = [call for call in calls if rank in call.members and rank in call.here]
            # Nameless ones are told apart by their order.
            free = [call for call in mine if not call.waits and call.named]
            ordered = [call for call in mine if not call.waits and not call.named]
            draw.shuffle(free)
            while free or ordered:
                take = ordered if not free or (ordered and draw.random() < 0.5) else free
                call = take.pop(0)
                later.append((call, call.begin(rank, sets[call.members])))
            for call in mine:
                if call.waits:  # all ranks call them in one order
                    check(call, call.begin(rank, sets[call.members]))
            draw.shuffle(later)
            while later and draw.random() < 0.8:
                check(*later.pop())
        hvd.join()
        while later:
            check(*later.pop())
    for members in SETS[size]:
        assert hvd.remove_process_set(sets[members])
    return wrong, digests


def played(rank: int, seeds: Sequence[int]) -> list[tuple[list[Any], dict[int, str]]]:
    hvd.init()
    return [play(rank, script(random.Random(n), hvd.size()), n) for n in seeds]


def check_scripts(pool: Pool, seeds: Sequence[int]) -> None:
    for number, results in zip(seeds, zip(*pool.run(played, seeds, within=60.0), strict=True), strict=True):
        assert [wrong for wrong, _ in results] == [[]] * len(results), f"script {number}"
        equal: dict[int, str] = {}
        for _, digests in results:
            assert all(equal.setdefault(call, found) == found for call, found in digests.items()), f"script {number}"


@pytest.mark.parametrize("world", [2, 3, 4])
def test_drawn_operations(ranks: Ranks, world: int) -> None:
    check_scripts(ranks(world), range(20))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_drawn_operations_for_long(ranks: Ranks, world: int) -> None:
    """`GRADWIRE_DRAWN_SECONDS` says how long."""
    end = time.monotonic() + float(os.environ.get("GRADWIRE_DRAWN_SECONDS", "60")) / 3
    while time.monotonic() < end:
        check_scripts(ranks(world), [random.SystemRandom().getrandbits(24) for _ in range(20)])


# -- one, of any tensor ------------------------------------------------------------------------------------------------

FORMS = (
    ("allreduce", hvd.Adasum, "none"), ("allreduce", hvd.Sum, "codec"), ("broadcast_parameters", hvd.Sum, "none"),
    *((kind, hvd.Sum, "none") for kind in KINDS if kind not in WAITING),
)  # fmt: skip
CALLS = st.builds(
    lambda form, shape, layout, dtype: Call(form[0], shape, layout, dtype, op=form[1], compression=form[2]),
    st.sampled_from(FORMS), st.sampled_from(SHAPES), st.sampled_from(LAYOUTS), st.sampled_from(DTYPES),
)  # fmt: skip


def outcome(rank: int, call: Call) -> str:
    """The fault of a call on this rank; "" if there is none."""
    hvd.init()
    problem = ""
    try:
        got = call.begin(rank, hvd.global_process_set)()
        if call.refused():
            problem = "not refused"
        elif (got[0] if call.grouped else got).dtype != call.dtype:
            problem = "has another dtype"
        elif not call.same(got, call.expected(rank)):
            problem = f"{got} instead of {call.expected(rank)}"
    except ValueError as error:
        problem = "" if call.refused() else f"refused: {error}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        hvd.shutdown()  # a new engine for the next call
        torch.distributed.barrier()
    return problem


def check(ranks: Ranks, call: Call) -> None:
    assume(call.shape or "sparse" not in call.kind)
    assert ranks(2).run(outcome, call) == ["", ""]


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(CALLS)
def test_operations_take_any_tensor_or_refuse_it(ranks: Ranks, call: Call) -> None:
    check(ranks, call)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CALLS)
def test_operations_take_any_tensor_or_refuse_it_at_length(ranks: Ranks, call: Call) -> None:
    check(ranks, call)
