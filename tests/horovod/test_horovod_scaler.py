"""A GradScaler and DistributedOptimizer: every rank makes a step or none does, and nothing changes gradients in flight.
`test_horovod_drawn.py` has the loops of scripts, scalers that the optimizer is told of or not, and overflows."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import Codec, OneBit
from test_horovod_operations import horovod_ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from training import digest

STEPS = 4
Places = frozenset[tuple[int, int]]


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30))


def optimizer_of(model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    """A fused one unscales by itself."""
    if fused:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def scaler_of() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


def loss_of(model: nn.Module, rank: int, step: int, overflows: Places = frozenset()) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean() * (float("inf") if (rank, step) in overflows else 1.0)


@pytest.mark.parametrize("fused", [False, True])
@horovod_ranks(3)
def test_steps_of_a_process_set_are_those_of_one_process(rank: int, fused: bool) -> None:
    """The gradients are unscaled and clipped by hand, or by the optimizer, and overflow on one rank in one step."""
    members, overflows = hvd.add_process_set([0, 1]), frozenset({(0, 1)})
    ours, plain = model_of(), model_of()
    made = hvd.DistributedOptimizer(optimizer_of(ours, fused), ours.named_parameters(), process_set=members)
    trainings = (ours, made, scaler_of()), (plain, optimizer_of(plain, fused), scaler_of())
    for step in range(STEPS if members.included() else 0):
        for model, optimizer, scaler in trainings:
            optimizer.zero_grad()
            for other in (rank,) if model is ours else (0, 1):
                share = 1.0 if model is ours else 0.5
                (scaler.scale(loss_of(model, other, step, overflows)) * share).backward()
            if not fused:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.02)
            scaler.step(optimizer)
            scaler.update()
        assert trainings[0][2].get_scale() == trainings[1][2].get_scale()
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    hvd.barrier()
    hvd.remove_process_set(members)


@pytest.mark.parametrize("codec", [None, OneBit(block=256)], ids=str)
@pytest.mark.parametrize("how", ["unscaled", "clipped", "dropped", "replaced"])
@horovod_ranks(2)
def test_gradients_that_are_changed_in_flight_are_refused(rank: int, how: str, codec: Codec | None) -> None:
    """What a script does to gradients in flight, where rank 0 alone has an overflow."""
    model = model_of()
    compression: Any = hvd.Compression.none if codec is None else hvd.Compression.codec(codec)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression)
    before = digest(model.parameters())
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    optimizer.use_grad_scaler(other)
    scaler.scale(loss_of(model, rank, 0, frozenset({(0, 0)}))).backward()
    if how == "unscaled":
        scaler.unscale_(optimizer)
    elif how == "replaced":
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * 0.5
    else:
        clip_grad_norm_(model.parameters(), 0.02)
    ends = {
        "unscaled": partial(scaler.step, optimizer),  # which makes a step on some ranks only
        "replaced": optimizer.synchronize,
        "clipped": optimizer.step,
        "dropped": optimizer.zero_grad,
    }
    with pytest.raises(RuntimeError) as caught:
        ends[how]()
    optimizer.zero_grad()  # and another step can be made
    assert digest(model.parameters()) == before
    text = str(caught.value)
    assert "while ranks reduce" in text
    assert "call optimizer.synchronize() before" in text
    assert how != "unscaled" or "use_grad_scaler(scaler)" in text


@pytest.mark.parametrize("fused", [False, True])
@horovod_ranks(2)
def test_adasum_goes_on_where_a_rank_overflows(rank: int, fused: bool) -> tuple[str, bool]:
    """With Adasum each rank steps by itself, and one that overflows takes part with a step of zero."""
    model = model_of()
    inner = optimizer_of(model, fused)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step, frozenset({(1, 1), (0, 2), (1, 2)}))).backward()
        before = digest(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert (digest(model.parameters()) == before) == (step == 2)
    return digest(model.parameters()), scaler.get_scale() < 8.0
