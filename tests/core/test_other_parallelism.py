"""Compression beside other kinds of parallelism: as without it where the codec loses nothing; replicas stay equal."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import Codec, CompressState, Identity, OneBit, compress_hook
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import digest, perceptron

STEPS = 4


def compress(ddp: DistributedDataParallel, codec: Codec | None) -> CompressState | None:
    if codec is None:
        return None
    state = CompressState(ddp, codec, exchange="gather", fallback=None)
    ddp.register_comm_hook(state, compress_hook)
    return state


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def tensor_parallel(codec: Codec | None) -> tuple[list[float], list[Tensor]]:
    """Two replicas, each of two ranks that share every layer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = DistributedDataParallel(model, device_mesh=mesh["replicate"])
    return train(ddp, codec, mesh["replicate"].get_local_rank(), mesh["replicate"].get_group())


def zero_redundancy(codec: Codec | None) -> tuple[list[float], list[Tensor]]:
    """Each rank keeps the optimizer's state of some of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of itself

    ddp = DistributedDataParallel(perceptron(16, 16))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    return train(ddp, codec, dist.get_rank(), None, optimizer)


def compiled_inside(codec: Codec | None) -> tuple[list[float], list[Tensor]]:
    ddp = DistributedDataParallel(torch.compile(perceptron(16, 16), backend="aot_eager"))
    return train(ddp, codec, dist.get_rank(), None)


def compiled_outside(codec: Codec | None) -> tuple[list[float], list[Tensor]]:
    ddp = DistributedDataParallel(perceptron(16, 16))
    return train(ddp, codec, dist.get_rank(), None, compiled=torch.compile(ddp, backend="aot_eager"))


def train(
    ddp: DistributedDataParallel,
    codec: Codec | None,
    replica: int,
    group: Any,
    optimizer: Any = None,
    compiled: Any = None,
) -> tuple[list[float], list[Tensor]]:
    state = compress(ddp, codec)
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = batch(step, replica)
        loss = ((ddp if compiled is None else compiled)(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(float(mean))
    if state is not None:
        assert state.step == STEPS
        state.close()
    return losses, list(ddp.parameters())


def pipeline(codec: Codec | None) -> tuple[list[float], list[Tensor]]:
    """Two stages, each of two replicas; a step has four microbatches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "stage"))
    stage, replica = mesh["stage"].get_local_rank(), mesh["replicate"].get_local_rank()
    torch.manual_seed(stage)
    # Else DDP rebuilds its buckets, with or without a hook, from what a schedule's microbatches have shown it.
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    ddp = DistributedDataParallel(model, device_mesh=mesh["replicate"], find_unused_parameters=True)
    state = compress(ddp, codec)
    # With their shapes given no backward pass is run to learn them, whose gradient would leave a residual.
    like = torch.empty(2, 16, requires_grad=True)
    shapes: dict[str, Any] = {"input_args": (like if stage else like.detach(),), "output_args": (like,)}
    whole = PipelineStage(ddp, stage, 2, torch.device("cpu"), group=mesh["stage"].get_group(), **shapes)
    schedule = ScheduleGPipe(whole, 4, loss_fn=nn.functional.mse_loss)
    # Older schedules leave the sum over microbatches in the gradients.
    rate = 0.05 if "scale_grads" in inspect.signature(ScheduleGPipe).parameters else 0.05 / 4
    optimizer, losses = torch.optim.SGD(ddp.parameters(), lr=rate, momentum=0.9), []
    for step in range(STEPS):
        x, found = batch(step, replica), list[Tensor]()
        optimizer.zero_grad()
        if stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=found)
        optimizer.step()
        mean = torch.stack(found).mean().detach() if found else torch.zeros(())
        dist.all_reduce(mean)
        losses.append(float(mean))
    if state is not None:
        assert state.step == STEPS
        state.close()
    return losses, list(ddp.parameters())


KINDS = (tensor_parallel, pipeline, zero_redundancy, compiled_inside, compiled_outside)


def compare(rank: int, kind: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        torch._dynamo.reset()
        run = next(run for run in KINDS if run.__name__ == kind)
        (plain, wanted), (losses, found) = run(None), run(Identity())
        assert losses == pytest.approx(plain, rel=1e-6)
        for one, other in zip(wanted, found, strict=True):
            assert float((one - other).detach().norm()) <= 1e-6 * float(one.detach().norm())
        losses, found = run(OneBit())
        assert losses[1:] != plain[1:]
        assert losses == pytest.approx(plain, rel=8e-3)
        return digest(found)


@pytest.mark.parametrize("kind", [run.__name__ for run in KINDS])
def test_compression_beside(ranks: Ranks, kind: str) -> None:
    digests = ranks(2 if kind.startswith("compiled") else 4).run(compare, kind)
    replicas = [digests[0::2], digests[1::2]] if kind in ("tensor_parallel", "pipeline") else [digests]
    assert all(len(set(some)) == 1 for some in replicas)
