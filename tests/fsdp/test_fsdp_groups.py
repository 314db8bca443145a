"""FSDP2 where parameter groups differ, as experts and dense layers do: in their meshes, replicas and codecs."""

from __future__ import annotations

from typing import Any

import fsdp_drawn
import pytest
import torch
from fsdp_drawn import LAYOUTS, Ranks, Sharded, mesh_of, says, verdict
from gradwire import QSGD, Identity, OneBit, compress_fsdp
from lacking import needs_reduce_scatter
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

pytestmark = needs_reduce_scatter


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_with_other_replicas_lose_nothing(ranks: Ranks, layout: str) -> None:
    """One module's groups too, over whose shards others are replicated; "hold" and "raise" at different places."""
    events = ("step", "raise", "hold", "step", "save", "each", "step")
    assert not verdict(ranks, Sharded((2, 2), OneBit(), layout=layout, exclude=True), events)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_identity_is_hsdp_to_the_bit(ranks: Ranks, layout: str) -> None:
    assert not verdict(ranks, Sharded((2, 1), Identity(), layout=layout), ("step", "hold", "each", "step"))


def test_shards_over_different_ranks_lose_nothing(ranks: Ranks) -> None:
    setup = Sharded((1, 4), OneBit(), scatter=True, layout="experts")
    assert not verdict(ranks, setup, ("step", "raise", "step", "local", "step"))


# -- each group's own codec --------------------------------------------------------------------------------------------


def two_kinds() -> Any:
    """Experts whose shards are the replicas of the dense layers, and a head that is sharded over all ranks."""
    torch.manual_seed(2)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    meshes = mesh_of((2, 2))["shard"], mesh_of((2, 2), crossed=True)["shard"], mesh_of((1, 4))["shard"]
    for layer, mesh in zip(model, meshes, strict=True):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=meshes[0])


def by_group(model: Any, codec: Any, **how: Any) -> Any:
    dense, experts = mesh_of((2, 2))["replicate"], mesh_of((2, 2), crossed=True)["replicate"]
    how = {"mesh": {"0.*": dense, "1.*": experts, "*": None}, "fallback": {"2.*": "auto", "*": None}, **how}
    return compress_fsdp(model, codec, **how)


@on_ranks(4)
def test_each_group_has_its_codec_its_ranks_and_its_residuals(rank: int) -> None:
    """And a checkpoint has all of them: one of a single state loads, and the other way round."""
    model, x = two_kinds(), torch.randn(6, 8)
    state = by_group(model, {"1.*": QSGD(), "*": OneBit()}, exclude=["0.bias"])
    for step in range(2):
        model(x).square().sum().backward()
        assert state.step == step + 1
    kept = fsdp_drawn.residuals(state.state_dict())
    assert kept.keys() == {"0.weight", "2.weight", "2.bias"}
    assert all(float(x.to_local().abs().sum()) > 0 for x in kept.values())
    counted = state.statistics()
    assert counted.dense_bytes == 4 * 2 * (72 // 2 + 72 // 2 + 36)
    assert counted.bytes_sent == sum(part.statistics().bytes_sent for part in state.parts)
    assert len(set(counted.decisions.values())) == 3
    state.close()
    model, layouts = two_kinds(), list[Any]()
    for codec in (OneBit(), {"1.*": OneBit(), "*": OneBit()}):
        state = by_group(model, codec)
        if layouts:
            state.load_state_dict(layouts[0])
        else:
            model(x).square().sum().backward()
        layouts.append(state.state_dict())
        state.close()
    for name, residual in fsdp_drawn.residuals(layouts[0]).items():
        assert torch.equal(residual.to_local(), fsdp_drawn.residuals(layouts[1])[name].to_local()), name
    assert layouts[1]["step"] == 1


@on_ranks(4)
def test_means_of_a_group_by_an_unbiased_code_average_out(rank: int) -> None:
    model, x = two_kinds(), torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    found: dict[bool, Tensor] = {}
    for exact in (True, False):
        state = by_group(model, {"1.*": Identity() if exact else QSGD(), "*": Identity()})
        for _ in range(1 if exact else 40):
            model(x).square().sum().backward()
        found[exact] = model[1].weight.grad.to_local().clone()
        model.zero_grad()
        state.close()
    mean, wanted = found[False] / 40, found[True]
    assert not torch.equal(mean, wanted)
    assert float((mean - wanted).norm() / wanted.norm()) < 0.1


@on_ranks(4)
def test_mistakes_are_named_on_every_rank(rank: int) -> None:
    model, dense = two_kinds(), mesh_of((2, 2))["replicate"]
    for words, how in (
        (r"mesh: 'experts.\*' matches none of the model's parameters \('0.weight'", {"mesh": {"experts.*": None}}),
        ("mesh: no pattern fits parameter '0.weight': add '\\*'", {"mesh": {"1.*": None}}),
        ("'1.weight' fits '1.weight' and '\\*' fits '1.bias'.*one pattern", {"mesh": {"1.weight": None, "*": dense}}),
        ("ranks disagree on FSDP's reductions", {"mesh": dense}),
        ("expected a DeviceMesh", {"mesh": {"*": "replicate"}}),
        ("exclude: 'nobody' matches none", {"exclude": ["nobody"]}),
        ("ranks disagree on seed", {"seed": rank % 2}),
        ("expected a codec", {"codec": {"2.*": "QSGD", "*": OneBit()}}),
    ):
        says(words, lambda how=how: by_group(model, **{"codec": OneBit(), **how}))  # type: ignore[misc]
    state = by_group(model, OneBit())  # none of them has left anything behind
    says("has an all-reduce hook already", lambda: by_group(model, OneBit()))
    model(torch.ones(2, 8)).sum().backward()
    assert state.step == 1
    saved = state.state_dict()
    says("the checkpoint has codec TopK", lambda: state.load_state_dict({**saved, "codec": "TopK()"}))
    saved["residuals"]["mean"]["nobody"] = torch.ones(2)
    says("it has 'nobody' of shape", lambda: state.load_state_dict(saved))
    state.close()
