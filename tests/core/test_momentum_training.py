"""Momentum in training: as SGD's where all is sent, and through scalers, unused parameters and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradwire import Codec, Identity, LocalUpdates, Momentum, OneBit, OuterSGD, Residual, TopK, Tracking
from gradwire.compress.feedback.base import RESIDUAL
from gradwire.compress.feedback.momentum import MOMENTUM
from ranks import Pool, on_ranks
from test_momentum import BETA, KINDS
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import TwoHeads, batch, data_of, digest, perceptron, wrap

Ranks = Callable[[int], Pool]


# -- steps that send everything are SGD's ------------------------------------------------------------------------------


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


# -- steps that are undone ---------------------------------------------------------------------------------------------


def vectors_of(state: Any) -> dict[str, dict[str, Tensor]]:
    """What this rank keeps."""
    saved = state.state_dict()
    [residuals], [momentum] = saved["residuals"].values(), saved["vectors"][MOMENTUM].values()
    return {RESIDUAL: dict(residuals), MOMENTUM: dict(momentum)}


def skipped(rank: int, codec: Codec, options: dict[str, Any]) -> list[str]:
    """Training with a step that a scaler skips because of an overflow on one rank, and without it."""
    ends = []
    for steps in ((0, 1, 2, 77, 3, 4), (0, 1, 2, 3, 4)):
        model = perceptron()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        ddp, state = wrap(model, codec, error_feedback=Momentum(BETA), grad_scaler=scaler, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in steps:
            overflow = step == 77 and rank == 1
            weight = next(model.parameters())
            handle = weight.register_hook(lambda grad: grad * torch.inf) if overflow else None
            optimizer.zero_grad()
            scaler.scale(ddp(batch(rank, step, model)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            if handle is not None:
                handle.remove()
        kept = vectors_of(state)
        assert all(float(x.norm()) > 0 for x in kept[MOMENTUM].values())
        in_units = [x / scaler.get_scale() for vector in kept.values() for _, x in sorted(vector.items())]
        ends += [digest([*model.parameters(), *in_units]), str(scaler.get_scale())]
        state.close()
    return ends


@pytest.mark.parametrize(
    ("codec", "options"),
    [(TopK(0.1), {"exchange": "split"}), (TopK(0.1), {"exchange": "gather"}), (OneBit(), {"exchange": "two_pass"})],
    ids=str,
)
def test_a_step_that_a_scaler_skips_leaves_all_as_it_was(ranks: Ranks, codec: Codec, options: dict[str, Any]) -> None:
    """To the bit, as scales are powers of two."""
    for with_it, scale, without, before in ranks(2).run(skipped, codec, options):
        assert with_it == without
        assert (scale, before) == ("128.0", "256.0")


# -- parameters that no rank uses --------------------------------------------------------------------------------------


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


# -- checkpoints -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_another_strategy_has_kept_is_no_momentum(rank: int) -> None:
    """Checkpoints of other strategies, loaded strictly."""
    refused = []
    for strategy in (Residual(), Tracking()):
        model = perceptron()
        ddp, other = wrap(model, OneBit(), error_feedback=strategy)
        ddp(batch(rank, 0, model)).square().mean().backward()
        saved = other.state_dict()
        other.close()
        _, state = wrap(perceptron(), OneBit(), error_feedback=Momentum())
        with pytest.raises(ValueError, match="momentum") as problem:
            state.load_state_dict(saved)
        refused.append(str(problem.value))
        state.close()
    residual, estimate = refused
    assert "no momentum" in residual
    assert "estimate" in estimate


# -- another optimizer


@on_ranks(2)
def test_an_outer_optimizer_with_momentum_is_refused(rank: int) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # of the local steps, which is another one
    found = []
    for strategy in (Momentum(), Tracking()):
        with pytest.raises(ValueError, match=r"OuterSGD\(momentum=0\.9") as refused:
            LocalUpdates(model, optimizer, TopK(0.1), every=2, outer=OuterSGD(momentum=0.9), error_feedback=strategy)
        found.append(str(refused.value))
        LocalUpdates(model, optimizer, TopK(0.1), every=2, error_feedback=strategy).close()
    assert all("leave it at 0" in text for text in found)
