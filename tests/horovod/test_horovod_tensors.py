"""Tensors that are unusual in other ways than their shape, stride and dtype, which are drawn."""

from __future__ import annotations

import warnings

import gradwire.hooks.horovod as hvd
import torch
from lacking import no_default_device
from test_horovod_operations import equal, horovod_ranks, raised
from torch import nn


@horovod_ranks(2)
def test_tensors_without_memory_are_refused(rank: int) -> None:
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


@horovod_ranks(2)
def test_a_sparse_gradient_of_a_single_row(rank: int) -> None:
    for dimensions in (1, 3):
        embedding = nn.Embedding(5, dimensions, sparse=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0))
        before = embedding.weight.detach().clone()
        embedding(torch.tensor([rank, rank])).sum().backward()  # coalesces to a single row
        optimizer.step()
        expected = torch.zeros(5, dimensions)
        expected[:2] = 1.0
        assert torch.allclose(before - embedding.weight.detach(), expected, atol=1e-6)


@horovod_ranks(2)
def test_gradients_that_are_expanded_or_have_a_graph(rank: int) -> None:
    p, q = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0))
    p.grad = torch.full((1, 3), rank + 1.0).expand(2, 3)
    q.grad = torch.full((3, 2), rank + 1.0, requires_grad=True).t()  # as with create_graph=True
    optimizer.step()
    equal(p, torch.full((2, 3), -1.5))
    equal(q, torch.full((2, 3), -1.5))


@horovod_ranks(2)
def test_what_was_made_in_inference_mode_is_taken(rank: int) -> None:
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


@horovod_ranks(2)
def test_the_default_device_is_nothing_to_the_operations(rank: int) -> None:
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
