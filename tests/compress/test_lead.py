"""Lead: beside it an optimizer's momentum acts as a smaller one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gradwire import ChunkedTopK, CompressState, Lead, compress_hook
from gradwire.compress.feedback.base import FeedbackState
from gradwire.compress.feedback.lead import PAST
from hypothesis import given
from hypothesis import strategies as st
from lacking import needs
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BETAS = st.tuples(st.floats(0.05, 0.99), st.floats(0.0, 0.95)).filter(lambda pair: pair[1] < pair[0])


def moved(kind: str, momentum: float, means: list[torch.Tensor]) -> torch.Tensor:
    """A parameter that an optimizer of this momentum has moved by means."""
    parameter = nn.Parameter(torch.eye(4))
    if kind == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=momentum)
    else:
        options: dict[str, Any] = {"nesterov": False, "weight_decay": 0.0, "momentum": momentum, "eps": 1e-12}
        optimizer = torch.optim.Muon([parameter], lr=1.0, **options)
    for mean in means:
        parameter.grad = mean.view(4, 4).clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("kind", ["sgd", pytest.param("muon", marks=needs("optim.Muon", hasattr(torch.optim, "Muon")))])
@given(betas=BETAS, steps=st.integers(1, 12), seed=st.integers(0, 99))
def test_the_optimizer_moves_as_with_less_momentum(
    kind: str, betas: tuple[float, float], steps: int, seed: int
) -> None:
    momentum, acts_as = betas
    means = list(torch.randn(steps, 16, generator=torch.Generator().manual_seed(seed)))
    strategy = Lead(momentum=momentum, acts_as=acts_as)
    kept, handed_out = FeedbackState(strategy, {PAST: torch.zeros(16)}), []
    for mean in means:
        handed_out.append(mean.clone())
        kept.deliver(handed_out[-1])
    found, expected = moved(kind, momentum, handed_out), moved(kind, acts_as, means)
    # Muon normalises in bfloat16.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 if kind == "sgd" else 0.3 * math.sqrt(steps))


def test_what_is_not_finite_is_handed_out_and_not_kept() -> None:
    kept = FeedbackState(Lead(), {PAST: torch.ones(300)})
    mean = torch.ones(300)
    mean[[3, 299]] = torch.tensor([math.inf, math.nan])
    kept.deliver(mean)
    assert mean.isnan().nonzero().view(-1).tolist() == [3, 299]
    assert kept[PAST][[3, 299]].tolist() == [1.0, 1.0]
    torch.testing.assert_close(kept[PAST][:3], torch.full((3,), 0.9 + 0.6))


@on_ranks(2)
def test_an_optimizer_of_another_momentum_is_refused(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 3))
    state = CompressState(model, ChunkedTopK(k=8, chunk=256), fallback=None, error_feedback=Lead())
    model.register_comm_hook(state, compress_hook)
    matrix, vector = model.module.weight, model.module.bias
    for optimizer, found in (
        (torch.optim.AdamW(model.parameters(), betas=(0.8, 0.99)), "0.8"),
        (torch.optim.SGD(model.parameters(), lr=0.1), "0"),
        (torch.optim.RMSprop([matrix]), "0"),
        (torch.optim.Adagrad([vector]), "None"),
    ):
        model(torch.ones(2, 40)).sum().backward()
        with pytest.raises(ValueError, match=f"{type(optimizer).__name__} has the momentum {found}, and Lead.*0.9"):
            optimizer.step()
    torch.optim.AdamW(model.parameters()).step()
    state.close()
