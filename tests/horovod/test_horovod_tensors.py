"""Every operation of the Horovod interface on tensors of any shape, stride and dtype: the right result, or a ValueError
at the call, on every rank, and an engine that goes on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import TopK
from gradwire.hooks.horovod.runtime.handles import COMPRESSIBLE, FLOATING, SUMMABLE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lacking import no_default_device
from ranks import Pool, on_ranks
from test_horovod_operations import equal, raised
from torch import Tensor, nn

Ranks = Callable[[int], Pool]

SHAPES = ((), (0,), (1,), (4,), (1, 1), (2, 1), (1, 4), (4, 3), (2, 0), (0, 1), (1, 1, 1), (2, 1, 3), (1, 2, 1))
LAYOUTS = ("plain", "odd", "offset", "transposed", "gapped", "expanded", "view")
DTYPES = (
    *SUMMABLE, torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
OPERATIONS = (
    "allreduce", "allreduce_", "grouped_allreduce", "adasum", "compressed", "sparse", "allgather", "broadcast",
    "broadcast_", "broadcast_parameters", "alltoall", "reducescatter",
)  # fmt: skip
#: What an operation needs of the dtype, where it needs anything.
TAKES = {
    **dict.fromkeys(("allreduce", "allreduce_", "grouped_allreduce", "sparse", "reducescatter"), SUMMABLE),
    "adasum": FLOATING,
    "compressed": COMPRESSIBLE,
}
RANKS = 2
ROWS = 5


@dataclass(frozen=True)
class Case:
    operation: str
    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype


CASES = st.builds(
    Case, st.sampled_from(OPERATIONS), st.sampled_from(SHAPES), st.sampled_from(LAYOUTS), st.sampled_from(DTYPES)
)


def tensor_of(case: Case, rank: int) -> Tensor:
    """Small whole numbers, which every dtype holds, in the memory that the case asks for."""
    values = ((torch.arange(math.prod(case.shape)) + rank) % 3).view(case.shape).to(case.dtype)
    if case.layout == "odd":
        strides = [97 if size == 1 else step for size, step in zip(values.shape, values.stride(), strict=True)]
        return values.as_strided(values.shape, strides)
    if case.layout == "offset":
        return torch.cat([values.new_zeros(3), values.view(-1)])[3:].view(case.shape)
    if case.layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if case.layout == "gapped" and values.dim():
        return torch.stack([values, values], -1)[..., 0]
    if case.layout == "expanded" and values.dim() and len(values):
        return values[:1].expand(case.shape)
    if case.layout == "view" and values.is_complex():
        return values.conj()
    if case.layout == "view" and case.dtype in FLOATING:
        return torch._neg_view(values)
    return values


def wide(x: Tensor) -> Tensor:
    if x.is_sparse:
        values = wide(x._values())
        return values.new_zeros(x.shape).index_add_(0, x._indices()[0], values)
    x = x.resolve_conj().resolve_neg()
    return x.to(torch.complex128) if x.is_complex() else x.double()


def rows_of(case: Case, rank: int) -> Tensor:
    """A sparse tensor of `ROWS` rows, with the case's tensor as its values: of one row, where there are two or less."""
    values = tensor_of(case, rank)
    indices = (torch.arange(len(values)) // 2 + rank) % ROWS
    shape = (ROWS, *values.shape[1:])
    return torch.sparse_coo_tensor(indices.unsqueeze(0), values, shape, check_invariants=True)


def is_refused(case: Case, x: Tensor) -> bool:
    if case.dtype not in TAKES.get(case.operation, DTYPES):
        return True
    if case.operation == "broadcast_parameters":
        return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
    if case.operation == "sparse":
        return False
    if not x.is_contiguous():
        return True
    if case.operation == "alltoall":
        return x.dim() == 0 or len(x) % RANKS != 0
    return x.dim() == 0 and case.operation in ("allgather", "reducescatter")


def carry_out(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """What the operation gives, and what it should."""
    x = tensor_of(case, rank)
    every = [wide(tensor_of(case, other)) for other in range(RANKS)]
    total = torch.stack(every).sum(0)
    operation: Any = getattr(hvd, case.operation, None)
    if case.operation in ("allreduce", "allreduce_"):
        return operation(x, op=hvd.Sum), total
    if case.operation == "grouped_allreduce":
        a, b = hvd.grouped_allreduce([x, tensor_of(case, rank)], op=hvd.Sum)
        return (a, total) if rank else (b, total)
    if case.operation == "adasum":
        return hvd.allreduce(tensor_of(case, 0), op=hvd.Adasum), every[0]
    if case.operation == "compressed":
        everything = hvd.Compression.codec(TopK(1.0), error_feedback=False)
        return hvd.allreduce(x, op=hvd.Sum, compression=everything, name="everything"), total
    if case.operation == "sparse":
        sums = torch.stack([wide(rows_of(case, other)) for other in range(RANKS)]).sum(0)
        return hvd.sparse_allreduce_async(rows_of(case, rank), None, hvd.Sum)(), sums
    if case.operation == "allgather":
        return hvd.allgather(x), torch.cat(every)
    if case.operation in ("broadcast", "broadcast_"):
        return operation(x, root_rank=1), every[1]
    if case.operation == "broadcast_parameters":
        hvd.broadcast_parameters({"x": x}, root_rank=1)
        return x, every[1]
    if case.operation == "alltoall":
        return hvd.alltoall(x), torch.cat([e.chunk(RANKS)[rank] if e.numel() else e[: len(e) // 2] for e in every])
    got = hvd.reducescatter(x, op=hvd.Sum)
    share = -(-len(total) // RANKS)
    return got, total[:share] if rank == 0 else total[share:]


def outcome(rank: int, case: Case) -> str:
    """What is wrong with a case, on this rank; "" if nothing."""
    hvd.init()
    if case.operation == "sparse" and not case.shape:
        return ""
    refused, problem = is_refused(case, tensor_of(case, rank)), ""
    try:
        got, expected = carry_out(case, rank)
        if refused:
            problem = "not refused"
        elif got.dtype != case.dtype:
            problem = f"has become {got.dtype}"
        elif got.shape != expected.shape or not torch.equal(wide(got), expected):
            problem = f"{wide(got).tolist()} instead of {expected.tolist()}"
    except ValueError as error:
        problem = "" if refused else f"refused: {error}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        hvd.shutdown()  # a new engine for the next case
        torch.distributed.barrier()
    return problem


def check(ranks: Ranks, case: Case) -> None:
    assert ranks(RANKS).run(outcome, case) == [""] * RANKS


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(CASES)
def test_operations_take_any_tensor_or_refuse_it(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CASES)
def test_operations_take_any_tensor_or_refuse_it_at_length(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@on_ranks(2)
def test_tensors_without_memory_are_refused(rank: int) -> None:
    hvd.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such tensors are deprecated
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for tensor, word in (
        (torch.ones(3, device="meta"), "meta"),
        (quantized, "quantized"),
        (torch.ones(3).to_sparse(), "dense"),
    ):
        assert word in raised(ValueError, lambda x=tensor: hvd.allgather(x))  # type: ignore[misc]
        assert word in raised(ValueError, lambda x=tensor: hvd.broadcast_parameters([x], 0))  # type: ignore[misc]
    equal(hvd.allreduce(torch.ones(2)), torch.ones(2))


@on_ranks(2)
def test_a_sparse_gradient_of_a_single_row(rank: int) -> None:
    hvd.init()
    for dimensions in (1, 3):
        embedding = nn.Embedding(5, dimensions, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
        before = embedding.weight.detach().clone()
        embedding(torch.tensor([rank, rank])).sum().backward()  # coalesces to a single row
        optimizer.step()
        expected = torch.zeros(5, dimensions)
        expected[:2] = 1.0
        assert torch.allclose(before - embedding.weight.detach(), expected, atol=1e-6)


@on_ranks(2)
def test_gradients_that_are_expanded_or_have_a_graph(rank: int) -> None:
    hvd.init()
    p, q = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0))
    p.grad = torch.full((1, 3), rank + 1.0).expand(2, 3)
    q.grad = torch.full((3, 2), rank + 1.0, requires_grad=True).t()  # as with create_graph=True
    optimizer.step()
    equal(p, torch.full((2, 3), -1.5))
    equal(q, torch.full((2, 3), -1.5))


@on_ranks(2)
def test_what_was_made_in_inference_mode_is_taken(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    with torch.inference_mode():
        x = torch.full((6,), rank + 1.0)
        mean = torch.full((6,), (n + 1) / 2)
        equal(hvd.allreduce(x), mean)
        equal(hvd.broadcast(x, n - 1), torch.full((6,), float(n)))
        equal(hvd.allgather(x)[-6:], torch.full((6,), float(n)))
        equal(hvd.alltoall(x)[: 6 // n], torch.ones(6 // n))
        equal(hvd.reducescatter(x), mean[: 6 // n])
        assert hvd.broadcast_object("x", 1) == "x"
        equal(hvd.allreduce_(x[1:-1]), mean[1:-1])
        hvd.grouped_allreduce_([x, y := torch.full((2, 3), float(rank))], op=hvd.Max)
        equal(torch.cat([x, y.view(-1)]), torch.cat([torch.tensor([n]), mean[1:-1], torch.tensor([n] + [n - 1] * 6)]))
        hvd.broadcast_(x.fill_(rank), 1)
        hvd.broadcast_parameters({"y": y.fill_(rank)}, 1)
        equal(torch.cat([x, y.view(-1)]), torch.ones(12))


@on_ranks(2)
def test_the_default_device_is_nothing_to_the_operations(rank: int) -> None:
    hvd.init()
    n = hvd.size()
    x = torch.ones(rank, 2, requires_grad=True)
    torch.set_default_device("meta")
    try:
        assert hvd.broadcast_object("x" * (rank + 1)) == "x"
        assert hvd.allgather_object(rank) == list(range(n))
        gathered = hvd.allgather(x)
        gathered.sum().backward()
    finally:
        no_default_device()
    assert gathered.shape == (n * (n - 1) // 2, 2)
    equal(x.grad, torch.ones(rank, 2))
