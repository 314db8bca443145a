"""FSDP2 since torch 2.15, in both forms of `compress_fsdp`: gradients of several dtypes in one group, and passes that
the caller finalizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_drawn import Ranks, mesh_of
from gradwire import Codec, Identity, OneBit, compress_fsdp
from lacking import needs, needs_fsdp
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

BY_HAND = needs_fsdp("set_manual_backward_finalization")
#: FSDP heeds `grad_dtype` since the same version.
MIXED = needs("FSDP2 with grad_dtype", hasattr(FSDPModule, "set_manual_backward_finalization"))
FORMS = pytest.mark.parametrize("scatter", [False, True], ids=["between replicas", "between shards"])
#: One state, and one for each group.
CODECS = pytest.mark.parametrize("codec", [OneBit(), {"1.*": OneBit(), "*": OneBit()}], ids=["one", "by group"])


class Block(nn.Module):
    """A layer and a scale, whose gradients may be of another dtype; `skips` leaves out one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear, self.shift = nn.Parameter(torch.ones(9)), nn.Linear(9, 9), nn.Parameter(torch.zeros(9))
        self.skips = ""

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.skips == "scale" else x * self.scale
        return torch.tanh(x if self.skips == "linear" else self.linear(x)) + self.shift


def models(scatter: bool, count: int, **policy: Any) -> tuple[list[Any], Any]:
    """Equal ones, sharded; the first over replicas too, by FSDP; and the mesh that `compress_fsdp` takes."""
    mesh, found = mesh_of((1, 2) if scatter else (2, 2)), []
    for number in range(count):
        torch.manual_seed(4)
        model: Any = nn.Sequential(Block(), Block()).to(policy.get("dtype"))
        for block in model:
            for name, dtype in policy.get("grads", {}).items():
                block.get_parameter(name).grad_dtype = dtype
        over = mesh if number == 0 and not scatter else mesh["shard"]
        for part in (model[1], model):
            fully_shard(part, mesh=over, mp_policy=policy.get("mp", MixedPrecisionPolicy()))
        found.append(model)
    return found, None if scatter else mesh["replicate"]


def grads_of(model: nn.Module) -> list[Tensor]:
    grads: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    return [grad.to_local().clone() for grad in grads]


def compressed(model: nn.Module, codec: Codec | dict[str, Codec], mesh: Any) -> Any:
    """By a way that no measurement decides."""
    how: dict[str, Any] = {} if mesh is None else {"exchange": "gather"}
    return compress_fsdp(model, codec, mesh=mesh, **how)


def finalized(rank: int, codec: Any, scatter: bool, passes: int, asynchronous: bool) -> None:
    """By hand as by FSDP; with several passes these are reduced in the end alone."""
    (_, *ours), mesh = models(scatter, 3)
    states = [compressed(model, codec, mesh) for model in ours]
    for step in range(3):
        for model, by_hand in zip(ours, (False, True), strict=True):
            torch.manual_seed(10 * step + rank)
            model.set_manual_backward_finalization(by_hand)
            for number in range(passes):
                model.set_requires_gradient_sync(number == passes - 1 and (passes == 1 or not by_hand))
                model(torch.randn(4, 9)).square().mean().backward()
            if by_hand:
                model.set_requires_gradient_sync(True)
                handle = model.finalize_backward(async_op=asynchronous)
                if asynchronous:
                    handle.wait()
        a, b = (grads_of(model) for model in ours)
        assert len(a) == len(b) == 8
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), step
        assert [state.step for state in states] == [step + 1] * 2
        for model in ours:
            model.zero_grad()
    for state in states:
        state.close()


@BY_HAND
@FORMS
@CODECS
@pytest.mark.parametrize(("passes", "asynchronous"), [(1, False), (2, True)], ids=["one pass", "two, waited for later"])
def test_a_pass_that_the_caller_finalizes(
    ranks: Ranks, codec: Any, scatter: bool, passes: int, asynchronous: bool
) -> None:
    ranks(2 if scatter else 4).run(finalized, codec, scatter, passes, asynchronous)


def given_up(rank: int, codec: Any, scatter: bool) -> None:
    """What a pass has sent that is reset before it is finalized, is sent again; the next ones go on."""
    (_, model), mesh = models(scatter, 2)
    state = compressed(model, codec, mesh)
    model.set_manual_backward_finalization(True)
    model(torch.ones(4, 9) + rank).square().mean().backward()  # reduces the first group, and leaves the other
    model.reset_iter_state()
    assert state.step == 1
    [kept] = state.state_dict()["residuals"].values()
    assert any(float(x.full_tensor().norm()) > 0.1 for x in kept.values())
    for step in (2, 3):
        model(torch.ones(4, 9) + rank).square().mean().backward()
        model.finalize_backward()
        assert state.step == step
    state.close()


@BY_HAND
@FORMS
@CODECS
def test_a_pass_that_is_given_up_before_it_is_finalized(ranks: Ranks, codec: Any, scatter: bool) -> None:
    ranks(2 if scatter else 4).run(given_up, codec, scatter)


BF16 = torch.bfloat16


def mixed(rank: int, scatter: bool, policy: dict[str, Any]) -> None:
    """`Identity` gives FSDP's own gradients, also where a pass has none of those that are wider."""
    (native, ours), mesh = models(scatter, 2, **policy)
    state = compressed(ours, Identity(), mesh)
    for step, skips in enumerate(("", "scale", "linear", "")):
        grads = []
        for model in (native, ours):
            torch.manual_seed(10 * step + rank)
            model[1].skips = skips
            x = torch.randn(4, 9).to(policy.get("dtype"))
            model(x).float().square().mean().backward()
            grads.append([p.grad for p in model.parameters()])
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype
                assert torch.equal(a.to_local(), b.to_local()), (step, a, b)
        if step % 2:  # else they accumulate
            native.zero_grad()
            ours.zero_grad()
    state.close()


@MIXED
@FORMS
@pytest.mark.parametrize(
    "policy",
    [
        {"dtype": BF16, "grads": {"linear.weight": torch.float32}},
        {"dtype": BF16, "grads": {"scale": torch.float32, "shift": torch.float32}},
        {"mp": MixedPrecisionPolicy(param_dtype=BF16)},
        {"mp": MixedPrecisionPolicy(param_dtype=BF16), "grads": {"scale": BF16, "linear.bias": None}},
        {"mp": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16), "grads": {"shift": None}},
    ],
    ids=["a wide weight", "wide scales", "as the parameters", "some narrow, some as they come", "reduce_dtype"],
)
def test_gradients_of_several_dtypes_in_a_group(ranks: Ranks, scatter: bool, policy: dict[str, Any]) -> None:
    ranks(2 if scatter else 4).run(mixed, scatter, policy)


def changed_since(rank: int, scatter: bool) -> None:
    (_, model), mesh = models(scatter, 2, dtype=BF16)
    state = compressed(model, OneBit(), mesh)
    model[1].scale.grad_dtype = torch.float32
    with pytest.raises(RuntimeError, match=r"module '1' in another order.*set grad_dtype before"):
        model(torch.ones(4, 9, dtype=BF16)).sum().backward()
    state.close()


@MIXED
@FORMS
def test_a_grad_dtype_that_changes_afterwards_is_refused(ranks: Ranks, scatter: bool) -> None:
    ranks(2 if scatter else 4).run(changed_since, scatter)


@MIXED
@on_ranks(4)
def test_what_was_held_back_has_the_dtype_of_its_gradients(rank: int) -> None:
    """Where an optimizer finds no gradient but the one that was held back, that has the dtype it wants."""
    (_, model), mesh = models(False, 2, dtype=BF16, grads={"scale": torch.float32})
    state = compressed(model, Identity(), mesh)
    for skips in ("", "scale"):
        model.zero_grad()
        model.set_requires_all_reduce(bool(skips))
        model[1].skips = skips
        model(torch.ones(4, 9, dtype=BF16)).float().square().mean().backward()
    scale = model[1].scale.grad
    assert scale.dtype == torch.float32
    assert float(scale.full_tensor().norm()) > 0
    state.close()
