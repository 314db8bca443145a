"""A training step that is compiled, backward and all: each front gives what it gives without torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from fsdp_drawn import mesh_of
from gradwire import CompressState, LocalUpdates, OneBit, TopK, compress_fsdp, compress_hook, sparse_all_reduce
from gradwire.optim import DistributedLion, OneBitAdam, keep_gradients
from lacking import needs_hook, needs_reduce_scatter
from ranks import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import batch, perceptron, wrap

Ranks = Callable[[int], Pool]
Made = tuple[nn.Module, Any, Callable[[], object]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def ddp(model: nn.Module) -> Made:
    wrapped, state = wrap(
        model, TopK(0.1), exchange="gather", ddp={"bucket_cap_mb": 1}
    )  # Dynamo's DDPOptimizer fails for small ones
    return wrapped, sgd(model), lambda: state.step


def ddp_straight(model: nn.Module) -> Made:
    wrapped, state = wrap(model, TopK(0.1), exchange="gather", ddp={"bucket_cap_mb": 1}, warmup_steps=100)
    return wrapped, sgd(model), lambda: state.step


def ddp_bound_late(model: nn.Module) -> Made:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(CompressState(OneBit(), fallback=None), compress_hook)
    return wrapped, sgd(model), int


def local(model: nn.Module) -> Made:
    optimizer = sgd(model)
    return model, optimizer, LocalUpdates(model, optimizer, OneBit(), every=2).step


def local_inside_with(model: nn.Module) -> Made:
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, OneBit(), every=2).__enter__()
    return model, optimizer, int


def adam(model: nn.Module) -> Made:
    return model, OneBitAdam(model.parameters(), warmup_steps=2), int


def lion_in_ddp(model: nn.Module) -> Made:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, keep_gradients)
    return wrapped, DistributedLion(wrapped.parameters(), lr=0.01), int


def horovod(model: nn.Module) -> Made:
    compression: Any = hvd.Compression.codec(TopK(0.1))
    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression), int


def horovod_by_hand(model: nn.Module) -> Made:
    optimizer = sgd(model)

    def average() -> None:
        for place, p in enumerate(model.parameters()):
            p.data.copy_(hvd.allreduce(p.data, name=f"compiled {place}"))

    return model, optimizer, average


def rows_by_hand(model: nn.Module) -> Made:
    optimizer = sgd(model)

    def average() -> None:
        for p in model.parameters():
            flat = p.data.view(-1)
            index = flat.abs().topk(5).indices.sort().values
            flat.copy_(sparse_all_reduce(index, flat[index], flat.numel(), out=torch.empty_like(flat)))

    return model, optimizer, average


def hsdp(model: nn.Module) -> Made:
    mesh = mesh_of((2, 1))
    fully_shard(model, mesh=mesh["shard"])
    compress_fsdp(model, TopK(0.1), mesh=mesh["replicate"], exchange="gather")
    return model, sgd(model), int


def sharded(model: nn.Module) -> Made:
    fully_shard(model, mesh=mesh_of((1, 2))["shard"])
    compress_fsdp(model, OneBit())
    return model, sgd(model), int


QUICK = [ddp, local, adam, horovod, hsdp]
REST = [ddp_straight, ddp_bound_late, local_inside_with, lion_in_ddp, horovod_by_hand, rows_by_hand, sharded]
NEEDS = {hsdp: needs_hook, sharded: needs_reduce_scatter}


def cases(makes: Sequence[Callable[[nn.Module], Made]], *marks: Any) -> list[Any]:
    return [pytest.param(make, marks=[*marks, NEEDS[make]] if make in NEEDS else marks) for make in makes]


def trained(rank: int, make: Callable[[nn.Module], Made], backend: str | None, whole: bool) -> list[Tensor]:
    """Parameters after some steps, compiled by a backend or as they are; whole, or backward and what follows."""
    warnings.simplefilter("ignore")  # Dynamo's own
    torch._dynamo.reset()
    if make.__name__.startswith("horovod"):
        hvd.init()
    plain = perceptron(8, 8, 2)
    model, optimizer, after = make(plain)

    def step(data: Tensor) -> None:
        loss = model(data).square().mean() if whole else data
        loss.backward()
        optimizer.step()
        after()
        optimizer.zero_grad()

    run = step if backend is None else torch.compile(step, backend=backend)
    for number in range(5):
        data = batch(rank, number, perceptron(8, 8, 2))
        run(data if whole else model(data).square().mean())
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in plain.parameters()]


def without_gradwire(model: nn.Module) -> Made:
    return model, sgd(model), int


def same(ranks: Ranks, make: Callable[[nn.Module], Made], whole: bool) -> bool:
    """To the bit, where torch's own steps are: some builds' compiled optimizers round otherwise than eager ones."""
    own, eager, compiled = (
        ranks(2).run(trained, make, backend, whole)
        for make, backend in ((without_gradwire, None), (make, None), (make, "eager"))
    )
    torchs = ranks(2).run(trained, without_gradwire, "eager", whole)
    exact = all(map(torch.equal, own[0], torchs[0]))
    rtol, atol = (0.0, 0.0) if exact else (1e-6, 1e-7)
    return all(
        torch.allclose(a, b, rtol=rtol, atol=atol)
        for one, two in zip(eager, compiled, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("make", [*cases(QUICK), *cases(REST, pytest.mark.slow)])
def test_compiled_steps_do_what_others_do(ranks: Ranks, make: Callable[[nn.Module], Made]) -> None:
    assert same(ranks, make, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("make", cases([*QUICK, *REST]))
def test_so_do_steps_compiled_with_forward(ranks: Ranks, make: Callable[[nn.Module], Made]) -> None:
    assert same(ranks, make, whole=True)
