"""`DDP.join(divide_by_initial_world_size=False)`: means are of the ranks that still have data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import CompressState, Identity, OneBit, TopK, compress_hook
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import residuals_of


class Turns(nn.Module):
    """A table with sparse gradients or without, and a layer that every other step leaves out."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.turns, self.last = nn.Embedding(20, 4, sparse=sparse), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, step: int, rank: int) -> Tensor:
        rows = self.table(torch.tensor([[step, 7 + rank], [3, 4]]))
        result: Tensor = self.last(rows if step % 2 else self.turns(rows)).square().sum()
        return result


def train(rank: int, codec: Any, exchange: str, sparse: bool, before: int) -> tuple[list[dict[str, Tensor]], float]:
    """Each rank has a batch more than the one before it: the means of each step on the last, and how far what has gone
    in is from what has come out and what is kept, added up over the ranks."""
    ddp: Any = DistributedDataParallel(Turns(sparse), bucket_cap_mb=1e-4, find_unused_parameters=True)
    if codec is not None:
        state = CompressState(ddp, codec, exchange=exchange, fallback=None)
        ddp.register_comm_hook(state, compress_hook)
    named = dict(ddp.module.named_parameters())
    given = {name: torch.zeros_like(p) for name, p in named.items()}
    means, number = list[dict[str, Tensor]](), 0

    def step() -> None:
        nonlocal number
        loss, size = ddp.module(number, rank), dist.get_world_size()
        for name, grad in zip(named, torch.autograd.grad(loss, [*named.values()], allow_unused=True), strict=True):
            given[name] += 0 if grad is None else grad.to_dense()
        ddp.zero_grad()
        ddp(number, rank).backward()
        means.append({n: p.grad.to_dense().clone() for n, p in named.items() if p.grad is not None})
        present = size if number < before else sum(number < before + 2 + other for other in range(size))
        for name, mean in means[-1].items():
            received[name] += present * mean if rank == size - 1 else 0
        number += 1

    received = {name: torch.zeros_like(p) for name, p in named.items()}
    for _ in range(before):
        step()
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            step()
    if codec is None:
        return means, 0.0
    kept = residuals_of(state.state_dict())
    off = [given[name] - received[name] - kept.get(name, torch.zeros(())) for name in named]
    for x in off:
        dist.all_reduce(x)
    state.close()
    return means, max(float(x.abs().max()) for x in off)


@pytest.mark.parametrize(
    ("codec", "exchange", "before", "sparse"),
    [
        (Identity(), "dense", 3, False),
        (Identity(), "two_pass", 0, True),
        (TopK(1.0), "gather", 1, False),
        (OneBit(), "gather", 0, True),
    ],
)
def test_those_that_have_joined_do_not_count(
    ranks: Ranks, codec: Any, exchange: str, before: int, sparse: bool
) -> None:
    expected = ranks(3).run(train, None, "", sparse, before)[2][0]
    results = ranks(3).run(train, codec, exchange, sparse, before)
    assert all(off < 1e-4 for _, off in results), results
    if codec != OneBit():
        for step, (wanted, found) in enumerate(zip(expected, results[2][0], strict=True)):
            assert wanted.keys() == found.keys()
            for name, mean in wanted.items():
                assert torch.allclose(found[name], mean, atol=1e-5), (step, name)
