"""FSDP2 beside tensor and expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_drawn
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_drawn import PLACES, FSDPMeshInfo, HSDPMeshInfo, Ranks, ShardPlacementResult, mesh_of, says
from gradwire import Identity, OneBit, compress_fsdp
from lacking import UNEVEN, needs_dimensions, needs_reduce_scatter
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training import digest

pytestmark = needs_reduce_scatter
ROWS = 6 if UNEVEN else 8


class Columns(nn.Module):
    """Layers that `mesh` divides in its last dimension, and a parameter of which all ranks there have a copy."""

    a: Any
    b: Any
    scale: Any

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name, shape, how in (("a", (ROWS, 8), Shard(0)), ("b", (4, ROWS), Shard(1)), ("scale", (8,), Replicate())):
            placements = [Replicate()] * (mesh.ndim - 1) + [how]
            setattr(self, name, nn.Parameter(distribute_tensor(torch.randn(*shape), mesh, placements)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh((x * self.scale) @ self.a.t()) @ self.b.t()
        return out


def sharded(shape: tuple[int, int, int], whole_mesh: bool = False) -> tuple[Any, DeviceMesh, DeviceMesh]:
    """A model, the mesh of its parameters before FSDP, one of both kinds of parallelism or of one, and all ranks."""
    ranks = DeviceMesh("cpu", torch.arange(4).view(shape), mesh_dim_names=("replicate", "dp", "tp"))
    if not whole_mesh:
        return fully_shard(Columns(ranks["tp"]), mesh=ranks["dp"]), ranks["tp"], ranks
    mesh, dimensions = ranks["dp", "tp"], fsdp.DataParallelMeshDims(shard="dp")
    return fully_shard(Columns(mesh), mesh=mesh, dp_mesh_dims=dimensions), mesh, ranks


def copies(rank: int, scatter: bool, whole_mesh: bool, folder: str) -> str:
    model, mesh, every = sharded((1, 2, 2) if scatter else (2, 1, 2), whole_mesh)
    samples = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    x = DTensor.from_local(samples[rank // 2], mesh, [Shard(0), Replicate()][-mesh.ndim :])
    how: Any = {} if scatter else {"mesh": every["replicate"], "fallback": None}
    state = compress_fsdp(model, Identity(), **how)
    model(x).square().mean().backward()
    state.close()
    alone = Columns(DeviceMesh("cpu", [rank], mesh_dim_names=("tp",)))
    for each in samples:
        alone(DTensor.from_local(each, alone.a.device_mesh)).square().mean().backward()
    times = 4 if scatter and whole_mesh else 2  # there the loss is a mean over both samples
    torch.testing.assert_close(model.a.grad.full_tensor(), alone.a.grad.full_tensor() / times)
    state = compress_fsdp(model, OneBit(), **how)
    for _ in range(2):
        model(x).square().mean().backward()
    state.close()
    saved_and_loaded(model, x, folder, how)
    return digest([model.scale.grad.to_local()])


def saved_and_loaded(model: Any, x: Tensor, folder: str, how: dict[str, Any]) -> None:
    """Residuals by `torch.distributed.checkpoint`."""
    found = []
    for load in (False, True):
        state = compress_fsdp(model, OneBit(), **how)
        if load:
            dcp.load({"gradwire": state}, checkpoint_id=folder)
        else:
            model(x).sum().backward()
            dcp.save({"gradwire": state}, checkpoint_id=folder)
        found.append({name: x.full_tensor() for name, x in fsdp_drawn.residuals(state.state_dict()).items()})
        state.close()
    assert any(float(x.abs().sum()) > 0 for x in found[0].values())
    for name, residual in found[0].items():
        torch.testing.assert_close(found[1][name], residual)


@pytest.mark.parametrize("scatter", [False, True], ids=["between replicas", "between shards"])
@pytest.mark.parametrize(
    "whole_mesh", [False, pytest.param(True, marks=needs_dimensions)], ids=["shards' mesh", "whole mesh"]
)
def test_copies_of_tensor_parallelism_stay_equal(ranks: Ranks, scatter: bool, whole_mesh: bool, tmp_path: Path) -> None:
    """Their messages hold other parameters, too, which differ on the ranks that have the copies."""
    a, b, c, d = ranks(4).run(copies, scatter, whole_mesh, str(tmp_path))
    assert (a, c) == (b, d)


@on_ranks(4)
def test_ranks_with_different_experts_are_no_replicas(rank: int) -> None:
    """Also where FSDP itself shards over one rank."""
    model, tp, every = sharded((2, 1, 2))
    says("ranks disagree on shard", lambda: compress_fsdp(model, OneBit(), mesh=tp))
    compress_fsdp(model, OneBit(), mesh=every["replicate"], fallback=None).close()


class Experts(nn.Module):
    """Dense layers, and two experts that `ep` divides, each for the samples of its own rank."""

    def __init__(self, ep: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(8, 8)
        self.experts = nn.ParameterDict({"up": distribute_tensor(torch.randn(2, 8, 6), ep, [Shard(0)])})
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        up = self.experts["up"]
        assert isinstance(up, DTensor)
        found: Tensor = self.out(torch.einsum("bi,eij->bj", torch.tanh(self.dense(x)), up.to_local()))
        return found


def with_experts(native: bool) -> Any:
    """In one call of `fully_shard`, as TorchTitan does: dense layers over both ranks of a replica, experts over one."""
    mesh = mesh_of((2, 2))
    apart = DeviceMesh("cpu", mesh.mesh.view(2, 1, 2), mesh_dim_names=("replicate", "efsdp", "ep"))
    model = Experts(apart["ep"])
    info = HSDPMeshInfo(apart["replicate", "efsdp"], 1, 0) if native else FSDPMeshInfo(apart["efsdp"], 0)
    experts = set(model.experts.values())
    return fully_shard(
        model, mesh=mesh if native else mesh["shard"],
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), info) if p in experts else None,
    )  # fmt: skip


def with_expert_parallelism(rank: int, folder: str) -> None:
    native, ours, mesh = with_experts(native=True), with_experts(native=False), mesh_of((2, 2))
    says("ranks disagree on", lambda: compress_fsdp(ours, Identity(), mesh=mesh["shard"]))  # experts are no replicas
    state = compress_fsdp(ours, Identity(), mesh=mesh["replicate"], fallback=None)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))
    for model in (native, ours):
        model(x).square().mean().backward()
    for p, q in zip(native.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())
    state.close()
    saved_and_loaded(ours, x, folder, {"mesh": mesh["replicate"], "fallback": None})


@PLACES
def test_beside_expert_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(with_expert_parallelism, str(tmp_path))
