"""Tracking: what is handed out is an estimate of the momentum, of which nothing is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import Codec, Identity, OneBit, TopK, Tracking
from gradwire.compress.feedback.base import RESIDUAL
from gradwire.compress.feedback.tracking import ESTIMATE, MOMENTUM
from lacking import needs_skipped_buckets
from ranks import Ranks, on_ranks
from simulated import SimulatedRanks
from test_feedback import layout_of
from torch import Tensor, nn
from training import TwoHeads, batch, data_of, digest, perceptron, wrap

BETA = 0.8


def test_little_of_large_gradients_is_left_when_they_shrink() -> None:
    ranks, layouts = SimulatedRanks(Tracking(0.9), OneBit(), {"b": (5,)}), [layout_of(["b"])]
    for step in range(1300):
        ranks.step(layouts, scale=1.0 if step < 1000 else 1e-6)
    (kept,) = ranks.means().values()
    assert float(kept[MOMENTUM].abs().max()) < 2e-6
    assert float((kept[ESTIMATE] + kept[RESIDUAL] - kept[MOMENTUM]).abs().max()) < 1e-6


def momentum_of(gradients: Iterable[dict[str, Tensor]], limit: float = float("inf")) -> dict[str, Tensor]:
    """The momentum of the ranks' mean, each rank's gradient scaled to `limit` first. A collective."""
    found: dict[str, Tensor] = {}
    for gradient in gradients:
        norm = torch.stack([g.norm() for g in gradient.values()]).norm()
        for name, g in gradient.items():
            mean = g * min(1.0, limit / float(norm))
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            found[name] = BETA * found.get(name, torch.zeros_like(mean)) + (1 - BETA) * mean
    return found


def own_gradient(model: nn.Module, data: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    loss = scale * model(data).square().mean()
    return {
        n: g.double() for n, g in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)
    }


def followed(rank: int, codec: Codec, options: dict[str, Any], limit: float | None, scale: float) -> Any:
    """How far what is handed out is from the momentum, of the parameters that are excluded and of the others."""
    model = perceptron()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1.0 else None
    strategy = Tracking(BETA, clip=limit)
    ddp, state = wrap(model, codec, error_feedback=strategy, exclude=["*bias"], grad_scaler=scaler, **options)
    gradients, digests = [], []
    for step in range(5):
        data = (1 + 3 * rank) * batch(rank, step, model)
        gradients.append(own_gradient(model, data))
        model.zero_grad()
        (scale * ddp(data).square().mean()).backward()
        digests.append(digest(p.grad for p in model.parameters()))
    expected = momentum_of(gradients, limit or float("inf"))
    off = {"bias": 0.0, "weight": 0.0}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        kind = name.rpartition(".")[2]
        off[kind] = max(off[kind], float((parameter.grad / scale - expected[name]).norm() / expected[name].norm()))
    state.close()
    return off, digests


@pytest.mark.parametrize(
    ("limit", "scale"), [(None, 1.0), (0.01, 1.0), (0.01, 64.0)], ids=["as it is", "clipped", "clipped and scaled"]
)
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        (Identity(), {}),
        (OneBit(), {"exchange": "two_pass"}),
        (OneBit(), {"warmup_steps": 9}),
        (TopK(0.3), {"exchange": "split"}),
    ],
    ids=["identity", "onebit", "warm-up", "topk"],
)
def test_the_momentum_is_handed_out(
    ranks: Ranks, codec: Codec, options: dict[str, Any], limit: float | None, scale: float
) -> None:
    (off, first), (_, second) = ranks(2).run(followed, codec, options, limit, scale)
    assert first == second, "replicas differ"
    assert off["bias"] < 1e-5, "what is excluded is exact"
    sends_all = codec.lossless or "warmup_steps" in options
    assert (off["weight"] < 1e-5) == sends_all
    assert off["weight"] < 1.0


def came_again(rank: int, limit: float | None) -> float:
    """In the second step no rank uses the left head, whose gradient is there still and goes in again: how far its
    momentum is from that of the first gradient alone."""
    model = TwoHeads()
    strategy = Tracking(BETA, clip=limit)
    ddp, state = wrap(model, OneBit(), error_feedback=strategy, ddp={"find_unused_parameters": True})
    for step, head in enumerate(("left", "right")):
        ddp(data_of(rank, step), head).square().mean().backward()
    [momentum] = state.state_dict()["vectors"][MOMENTUM].values()
    state.close()
    first = own_left(rank, limit)
    return max(float((momentum[n] - BETA * (1 - BETA) * g).norm() / g.norm()) for n, g in first.items())


def own_left(rank: int, limit: float | None) -> dict[str, Tensor]:
    model = TwoHeads()
    model(data_of(rank, 0), "left").square().mean().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    return {n: g * min(1.0, (limit or norm) / norm) for n, g in gradients.items() if "left" in n}


@pytest.mark.parametrize("limit", [None, 1e-3])
def test_a_gradient_that_comes_again_has_not_entered(ranks: Ranks, limit: float | None) -> None:
    """DDP leaves the gradient of what no rank used as it is."""
    assert max(ranks(2).run(came_again, limit)) < 1e-6


@needs_skipped_buckets
@on_ranks(2)
def test_a_pass_whose_end_nobody_knows_is_refused(rank: int) -> str:
    ways = {"static_graph": True, "skip_all_reduce_unused_params": True}
    with pytest.raises(ValueError, match="leave out one of the three") as refused:
        wrap(TwoHeads(), OneBit(), error_feedback=Tracking(clip=1.0), ddp=ways)
    return str(refused.value)


@on_ranks(2)
def test_a_residual_alone_does_not_get_into_the_estimate(rank: int) -> None:
    """A checkpoint made with plain error feedback, loaded strictly and otherwise."""
    model = perceptron()
    ddp, plain = wrap(model, OneBit())
    ddp(batch(rank, 0, model)).square().mean().backward()
    saved = plain.state_dict()
    plain.close()
    _, state = wrap(perceptron(), OneBit(), error_feedback=Tracking())
    with pytest.raises(ValueError, match="no estimate") as refused:
        state.load_state_dict(saved)
    with pytest.warns(UserWarning, match="begins without"):
        state.load_state_dict(saved, strict=False)
    kept = bool(state._feedback)
    state.close()
    assert "strict=False" in str(refused.value)
    assert not kept
