"""Momentum in training: as SGD's where all is sent, and through unused parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gradwire import Codec, Identity, Momentum, OneBit, TopK
from gradwire.compress.feedback.base import RESIDUAL
from gradwire.compress.feedback.momentum import MOMENTUM
from ranks import Ranks
from test_momentum import BETA, KINDS
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import TwoHeads, batch, data_of, digest, perceptron, wrap

# -- steps that send everything are SGD's ------------------------------------------------------------------------------


def like_torch(rank: int, codec: Codec, options: dict[str, Any], nesterov: bool, scale: float) -> tuple[float, str]:
    """How far parameters are from those that `torch.optim.SGD` with momentum trains on float32 gradients."""
    model = perceptron()
    other = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1.0 else None
    strategy = Momentum(BETA, nesterov)
    ddp, state = wrap(model, codec, error_feedback=strategy, grad_scaler=scaler, **options)
    plain = DistributedDataParallel(other)
    ours = torch.optim.SGD(model.parameters(), lr=0.05)
    torchs = torch.optim.SGD(other.parameters(), lr=0.05, momentum=BETA, nesterov=nesterov)
    strategy.check_optimizer(ours)
    begin = [p.detach().clone() for p in model.parameters()]
    for step in range(12):
        data = batch(rank, step, model)
        ours.zero_grad()
        torchs.zero_grad()
        loss = ddp(data).square().mean()
        if scaler is None:
            loss.backward()
            ours.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(ours)
            scaler.update()
        plain(data).square().mean().backward()
        torchs.step()
    state.close()
    pairs = zip(model.parameters(), other.parameters(), begin, strict=True)
    off = max(float((a - b).detach().norm() / (b - c).detach().norm()) for a, b, c in pairs)
    return off, digest(model.parameters())


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("codec", "options", "scale", "world"),
    [
        (Identity(), {}, 1.0, 2),
        (Identity(), {"exchange": "gather", "exclude": ["*bias"]}, 64.0, 2),
        (TopK(0.1), {"exchange": "dense"}, 1.0, 2),
        (OneBit(), {"warmup_steps": 99}, 1.0, 2),
        (TopK(0.1), {"exclude": ["*"]}, 1.0, 2),
        (Identity(), {"exchange": "hierarchical", "topology": 2}, 1.0, 4),
    ],
    ids=str,
)
def test_a_run_that_sends_everything_is_sgds(
    ranks: Ranks, codec: Codec, options: dict[str, Any], scale: float, world: int, nesterov: bool
) -> None:
    found = ranks(world).run(like_torch, codec, options, nesterov, scale)
    assert len({one for _, one in found}) == 1, "replicas differ"
    assert found[0][0] < 1e-5


# -- parameters that no rank uses --------------------------------------------------------------------------------------


def vectors_of(state: Any) -> dict[str, dict[str, Tensor]]:
    """What this rank keeps."""
    saved = state.state_dict()
    [residuals], [momentum] = saved["residuals"].values(), saved["vectors"][MOMENTUM].values()
    return {RESIDUAL: dict(residuals), MOMENTUM: dict(momentum)}


def came_again(rank: int, codec: Codec, strategy: Momentum) -> tuple[float, float]:
    """In the second step no rank uses the left head, whose gradient is there still and goes in again: how far what is
    kept is from a step with a gradient of zero, in the law and in the momentum."""
    model = TwoHeads()
    ddp, state = wrap(model, codec, error_feedback=strategy, ddp={"find_unused_parameters": True})
    ddp(data_of(rank, 0), "left").square().mean().backward()
    before, own = vectors_of(state), vectors_of(state)[MOMENTUM]
    means = state.consolidated_state_dict()
    ddp(data_of(rank, 1), "right").square().mean().backward()
    after, law = state.consolidated_state_dict(), 0.0
    momentum, size = 0.0, sum(float(x.norm()) for x in before[MOMENTUM].values())
    for name, parameter in model.named_parameters():
        if "left" in name and parameter.grad is not None:
            there, then = (
                {RESIDUAL: saved["residuals"]["mean"][name], MOMENTUM: saved["vectors"][MOMENTUM]["mean"][name]}
                for saved in (means, after)
            )
            nothing = torch.zeros_like(parameter)
            rest = strategy.invariant(nothing, there, nothing, then)
            law += float((rest if strategy.masking else rest[0]).norm())
            now = vectors_of(state)[MOMENTUM][name]
            kept = (now != 0) if strategy.masking else torch.ones_like(now, dtype=torch.bool)
            momentum += float((now - strategy.beta * own[name])[kept].norm())
            assert bool(kept.any())
    state.close()
    return law / size, momentum / size


@pytest.mark.parametrize("codec", [OneBit(), TopK(0.1)], ids=str)
@pytest.mark.parametrize("strategy", [*KINDS[:3], Momentum(BETA, clip=1e-3)], ids=str)
def test_a_gradient_that_comes_again_has_not_entered(ranks: Ranks, codec: Codec, strategy: Momentum) -> None:
    """DDP leaves the gradient of what no rank used as it is."""
    for law, momentum in ranks(2).run(came_again, codec, strategy):
        assert law < 1e-6
        assert momentum < 1e-6
