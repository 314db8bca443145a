"""Ranks that have joined: what they still owe to the others, and the others to them."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import OneBit, TopK
from gradwire.hooks.horovod.runtime import context
from test_horovod_operations import horovod_ranks
from torch import Tensor, nn

NUMEL = 1500


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * rank + step))


def applied(p: Tensor, optimizer: Any, rank: int, steps: range) -> Tensor:
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for step in steps:
        optimizer.zero_grad()
        (p * gradient(rank, step)).sum().backward()
        optimizer.step()
        assert p.grad is not None
        total += p.grad
    return total


def mean_residual(optimizer: Any) -> Tensor:
    residuals = optimizer.state_dict()["gradwire"]["residuals"]
    return hvd.allreduce(residuals.get("p", torch.zeros(NUMEL)).double())


@pytest.mark.parametrize("last_of_the_old", [False, True])
@horovod_ranks(2, within=60.0)
def test_what_an_optimizer_that_is_gone_has_left_out_is_not_sent(rank: int, last_of_the_old: bool) -> None:
    """Rank 0 joins without a step. An earlier optimizer with residuals is gone, but in a cycle of references; or it was
    the last that the engine has used. What is missing of the gradients, relative."""
    compression = hvd.Compression.codec(TopK(0.1), exchange="gather")

    def optimizer(p: Tensor) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [("p", p)], compression)

    gc.collect()
    gc.disable()
    try:
        p = nn.Parameter(torch.zeros(NUMEL))
        old = optimizer(p)
        if not last_of_the_old:
            old.scheduled_by = [old]  # as schedulers do
        applied(p, old, rank, range(2))
        del old
        if not last_of_the_old:
            for _ in range(2):
                applied(p, optimizer(p), rank, range(1))
        hvd.shutdown()
        torch.distributed.barrier()
        hvd.init()
        p = nn.Parameter(torch.zeros(NUMEL))
        new = optimizer(p)
        whole = applied(p, new, rank, range(4 * rank))
        hvd.join()
    finally:
        gc.enable()
    whole = hvd.broadcast(whole, 1)
    gradients = sum((gradient(1, step).double() / 2 for step in range(4)), torch.zeros(NUMEL, dtype=torch.float64))
    missing = float((whole + mean_residual(new) - gradients).norm() / gradients.norm())
    assert missing < 1e-5


@horovod_ranks(2)
def test_an_engine_that_has_ended_keeps_nothing(rank: int) -> None:
    hvd.allreduce(torch.ones(1))
    engine = weakref.ref(context.engine())
    hvd.shutdown()
    gc.collect()
    assert engine() is None


@horovod_ranks(3)
def test_an_optimizer_may_be_gone_when_its_rank_joins(rank: int) -> None:
    """The optimizer of the rank that joins first is gone by then."""

    def train(steps: int) -> Any:
        p = nn.Parameter(torch.zeros(NUMEL))
        compression = hvd.Compression.codec(TopK(0.1), exchange="split")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), compression=compression)
        return applied(p, optimizer, rank, range(steps))

    train(3 if rank else 12)
    hvd.join()


@horovod_ranks(3)
def test_a_rank_that_joins_stands_in_with_the_optimizer_of_the_process_set(rank: int) -> None:
    """Every rank has two optimizers, and no two ranks the same two; rank 2 joins while rank 0 goes on with the one that
    they share. What is missing of the gradients, relative."""
    compression = hvd.Compression.codec(OneBit(), error_feedback=True, exchange="two_pass")
    sets = {pair: hvd.add_process_set(pair) for pair in ((0, 1), (0, 2), (1, 2))}
    made: dict[tuple[int, int], tuple[Tensor, Any]] = {}
    for pair, members in sets.items():
        if rank in pair:
            p = nn.Parameter(torch.zeros(NUMEL))
            base = torch.optim.SGD([p], lr=0.1)
            made[pair] = p, hvd.DistributedOptimizer(base, [("p", p)], compression, process_set=members)
    wholes = {pair: applied(*made[pair], rank + sum(pair), range(3)) for pair in made}
    if rank == 0:
        wholes[0, 2] += applied(*made[0, 2], rank + 2, range(3, 9))
    hvd.join()
    missing = {}
    for pair, (_, optimizer) in made.items():
        left = optimizer.state_dict()["gradwire"]["residuals"]["p"].double()
        expected = torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(9 if rank == 0 and pair == (0, 2) else 3):
            expected += gradient(rank + sum(pair), step)
        difference = hvd.allreduce(expected - left, process_set=sets[pair])
        whole = hvd.broadcast(wholes[pair], pair[0], process_set=sets[pair])
        missing[str(pair)] = float((whole - difference).norm() / difference.norm())
    for members in sets.values():
        hvd.remove_process_set(members)
    assert max(missing.values()) < 1e-5, missing


@horovod_ranks(3, within=20.0)
def test_a_gradient_of_gathered_rows_is_that_of_ones_own(rank: int) -> None:
    """Rank 0 has no batch, and in the second round only the forward half of one."""
    for late in (False, True):
        mine = torch.ones(rank + 1, 2, requires_grad=True)
        if rank or late:
            whole = hvd.allgather(mine)
        if rank:
            rows = torch.arange(float(len(whole)))
            (whole * rows.unsqueeze(1)).sum().backward()
            start = sum(r + 1 for r in range(0 if late else 1, rank))
            own = rows[start : start + rank + 1].unsqueeze(1).expand(-1, 2)
            assert mine.grad is not None
            assert torch.allclose(mine.grad, own * (hvd.size() - 1) / hvd.size())
        hvd.join()


@horovod_ranks(2, within=30.0)
def test_threads_have_optimizers_of_their_own(rank: int) -> None:
    """Each thread has an optimizer, and these come to their steps in another order on each rank."""
    found: dict[int, list[nn.Parameter]] = {}
    problems: list[BaseException] = []

    def train(number: int) -> None:
        draw = random.Random(10 * rank + number)
        try:
            for round in range(5):
                parameters = [nn.Parameter(torch.zeros(NUMEL)) for _ in range(2)]
                named = [(f"{number}.{round}.{i}", p) for i, p in enumerate(parameters)]
                base = torch.optim.SGD(parameters, lr=0.1)
                optimizer = hvd.DistributedOptimizer(base, named, hvd.Compression.topk(density=0.1))
                for step in range(3):
                    time.sleep(0.002 * draw.random())
                    optimizer.zero_grad()
                    torch.stack([(p * gradient(rank, step + number)).sum() for p in parameters]).sum().backward()
                    optimizer.synchronize()
                    if step == 2:
                        optimizer.consolidated_state_dict()
                        with optimizer.skip_synchronize():
                            optimizer.step()
                    else:
                        parameters[0].sum().backward()
                        optimizer.step()
                found[number] = parameters
        except BaseException as problem:
            problems.append(problem)
            hvd.shutdown()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    for number in range(3):
        for p in found[number]:
            mine, other = hvd.allgather_object(p.detach())
            assert torch.equal(mine, other)
