"""FSDP2 beside tensor and expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_drawn import Ranks, says
from gradwire import OneBit, compress_fsdp
from lacking import needs_reduce_scatter
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training import digest

pytestmark = needs_reduce_scatter


class Columns(nn.Module):
    """Layers that `mesh` divides, and a parameter of which all ranks there have a copy."""

    a: Tensor
    b: Tensor
    scale: Tensor

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name, shape, how in (("a", (6, 8), Shard(0)), ("b", (4, 6), Shard(1)), ("scale", (8,), Replicate())):
            setattr(self, name, nn.Parameter(distribute_tensor(torch.randn(*shape), mesh, [how])))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh((x * self.scale) @ self.a.t()) @ self.b.t()
        return out


def sharded(shape: tuple[int, int, int]) -> tuple[Any, DeviceMesh]:
    whole = DeviceMesh("cpu", torch.arange(4).view(shape), mesh_dim_names=("replicate", "dp", "tp"))
    return fully_shard(Columns(whole["tp"]), mesh=whole["dp"]), whole


def copies(rank: int, scatter: bool) -> str:
    model, whole = sharded((1, 2, 2) if scatter else (2, 1, 2))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(rank // 2))
    how: Any = {} if scatter else {"mesh": whole["replicate"], "fallback": None}
    state = compress_fsdp(model, OneBit(), **how)
    for _ in range(2):
        model(DTensor.from_local(x, whole["tp"], [Replicate()])).square().mean().backward()
    state.close()
    return digest([model.scale.grad.to_local()])


@pytest.mark.parametrize("scatter", [False, True], ids=["between replicas", "between shards"])
def test_copies_of_tensor_parallelism_stay_equal(ranks: Ranks, scatter: bool) -> None:
    """Their messages hold other parameters, too, which differ on the ranks that have the copies."""
    a, b, c, d = ranks(4).run(copies, scatter)
    assert (a, c) == (b, d)


@on_ranks(4)
def test_ranks_with_different_experts_are_no_replicas(rank: int) -> None:
    """Also where FSDP itself shards over one rank."""
    model, whole = sharded((2, 1, 2))
    says("ranks disagree on shard", lambda: compress_fsdp(model, OneBit(), mesh=whole["tp"]))
    compress_fsdp(model, OneBit(), mesh=whole["replicate"], fallback=None).close()
