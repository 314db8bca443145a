"""A training step that is compiled, backward and all: each front gives what it gives without torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from fronts import FRONTS, Front, bound_late, marked, sgd
from gradwire import OneBit, TopK, sparse_all_reduce
from gradwire.optim import keep_gradients
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import batch, perceptron

Make = Callable[[nn.Module], Front]
ONE_MB = {"bucket_cap_mb": 1}  # Dynamo's DDPOptimizer fails for small buckets


def without_gradwire(model: nn.Module) -> Front:
    return Front(model, model, None, sgd(model.parameters()), int)


def read_by_hand(model: nn.Module, **options: Any) -> Front:
    """In DDP, with a step that reads the state."""
    front = FRONTS["ddp"](model, TopK(0.1), exchange="gather", ddp=ONE_MB, **options)
    front.after = lambda: front.state.step
    return front


def local_inside_with(model: nn.Module) -> Front:
    front = FRONTS["local"](model, OneBit(), every=2)
    front.state.__enter__()
    front.after = int
    return front


def lion_in_ddp(model: nn.Module) -> Front:
    front = FRONTS["lion"](model)
    front.run = DistributedDataParallel(model)
    front.run.register_comm_hook(None, keep_gradients)
    return front


def horovod_by_hand(model: nn.Module) -> Front:
    front = without_gradwire(model)
    hvd.init()

    def average() -> None:
        for place, p in enumerate(model.parameters()):
            p.data.copy_(hvd.allreduce(p.data, name=f"compiled {place}"))

    front.after = average
    return front


def rows_by_hand(model: nn.Module) -> Front:
    front = without_gradwire(model)

    def average() -> None:
        for p in model.parameters():
            flat = p.data.view(-1)
            index = flat.abs().topk(5).indices.sort().values
            flat.copy_(sparse_all_reduce(index, flat[index], flat.numel(), out=torch.empty_like(flat)))

    front.after = average
    return front


QUICK: dict[str, Make] = {
    "ddp": read_by_hand,
    "local": partial(FRONTS["local"], codec=OneBit(), every=2),
    "adam": partial(FRONTS["adam"], warmup_steps=2),
    "horovod": partial(FRONTS["horovod"], codec=TopK(0.1)),
    "replicas": partial(FRONTS["replicas"], codec=TopK(0.1), exchange="gather"),
}
REST: dict[str, Make] = {
    "shards": partial(FRONTS["shards"], codec=OneBit()),
    "ddp, straight": partial(read_by_hand, warmup_steps=100),
    "ddp, bound late": partial(bound_late, codec=OneBit()),
    "local, inside with": local_inside_with,
    "lion in ddp": lion_in_ddp,
    "horovod by hand": horovod_by_hand,
    "rows by hand": rows_by_hand,
}


def trained(rank: int, make: Make, backend: str | None, whole: bool) -> list[Tensor]:
    """Parameters after some steps, compiled by a backend or as they are; whole, or backward and what follows."""
    warnings.simplefilter("ignore")  # Dynamo's own
    torch._dynamo.reset()
    front = make(perceptron(8, 8, 2))
    model, optimizer, after = front.run, front.optimizer, front.after

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
    return [p.detach().clone() for p in front.parameters()]


@cache
def exact(ranks: Ranks, whole: bool) -> bool:
    """Some builds' compiled optimizers round otherwise than eager ones."""
    own, torchs = (ranks(2).run(trained, without_gradwire, backend, whole) for backend in (None, "eager"))
    return all(map(torch.equal, own[0], torchs[0]))


def same(ranks: Ranks, make: Make, whole: bool) -> bool:
    """To the bit, where torch's own steps are."""
    eager, compiled = (ranks(2).run(trained, make, backend, whole) for backend in (None, "eager"))
    rtol, atol = (0.0, 0.0) if exact(ranks, whole) else (1e-6, 1e-7)
    return all(
        torch.allclose(a, b, rtol=rtol, atol=atol)
        for one, two in zip(eager, compiled, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("name", [*marked(QUICK), *marked(REST, pytest.mark.slow)])
def test_compiled_steps_do_what_others_do(ranks: Ranks, name: str) -> None:
    assert same(ranks, (QUICK | REST)[name], whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(QUICK | REST))
def test_so_do_steps_compiled_with_forward(ranks: Ranks, name: str) -> None:
    assert same(ranks, (QUICK | REST)[name], whole=True)
