"""A parameter that is trained, and that nobody reduces, parts the replicas: it is refused before it has moved."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fronts import FRONTS, sgd
from gradwire import CompressState, Identity, OneBit, compress_hook
from gradwire.hooks.ddp import hook as hooks_ddp
from lacking import needs_hook
from ranks import Pool, Ranks, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unfreeze_and_add_param_group(modules: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As Lightning's `BaseFinetuning` does."""
    modules.requires_grad_(True)
    optimizer.add_param_group({"params": list(modules.parameters())})


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> str:
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def thawed(rank: int, dense: bool, culprits: list[int], how: str) -> tuple[str, str, bool, float]:
    """Some ranks train a layer that was frozen: what is said before and after, whether it has moved, and the seconds
    that took."""
    inner = net()
    model = DistributedDataParallel(inner)
    state = CompressState(model, Identity() if dense else OneBit(), exchange="dense" if dense else "gather")
    model.register_comm_hook(state, compress_hook)
    optimizer = torch.optim.SGD([p for p in inner.parameters() if p.requires_grad], lr=0.1)
    before = train(model, optimizer, 3)
    assert (state._dense_path is not None) == dense
    if rank in culprits and how == "unfrozen":
        unfreeze_and_add_param_group(inner[0], optimizer)
    elif rank in culprits:
        inner.append(nn.Linear(2, 2))
        optimizer.add_param_group({"params": list(inner[3].parameters())})
    of: Any = inner[3 if how == "added" and rank in culprits else 0]
    was, start = of.weight.detach().clone(), time.monotonic()
    with (
        patch.object(hooks_ddp, "HANDSHAKE_TIMEOUT", timedelta(seconds=2)),
        patch.object(hooks_ddp, "DENSE_CHECK_INTERVAL", 4),
    ):
        after = train(model, optimizer, 4)
    return before, after, torch.equal(was, of.weight), time.monotonic() - start


@pytest.mark.parametrize("dense", [False, True])
def test_a_parameter_that_is_unfrozen_later_is_refused(ranks: Ranks, dense: bool) -> None:
    for before, after, same, _ in ranks(2).run(thawed, dense, [0, 1], "unfrozen"):
        assert before == ""
        assert "parameter '0.weight' requires gradients, and did not when" in after
        assert "find_unused_parameters=True" in after
        assert same


def test_a_parameter_that_is_added_is_refused(ranks: Ranks) -> None:
    for before, after, _, _ in ranks(2).run(thawed, False, [0, 1], "added"):
        assert before == ""
        assert "parameter '3.weight' requires gradients" in after


@pytest.mark.parametrize("dense", [False, True])
def test_one_rank_alone_leaves_nobody_waiting(dense: bool) -> None:
    with Pool(2) as pool:
        results = pool.run(thawed, dense, [1], "unfrozen", within=60)
    for before, after, same, seconds in results:
        assert before == ""
        assert "'0.weight' requires gradients" in after or "a rank is not responding in a dense step" in after
        assert same
        assert seconds < 20
    assert "'0.weight' requires gradients" in results[1][1]


@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_ddp_must_reduce_what_requires_gradients(rank: int, late: bool) -> None:
    """A layer is unfrozen between DDP and a state, which takes it for one of those that DDP reduces."""
    inner = net()
    model = DistributedDataParallel(inner)
    inner[0].requires_grad_(True)

    def first_step() -> None:
        state = CompressState(OneBit(), exchange="gather") if late else CompressState(model, OneBit())
        model.register_comm_hook(state, compress_hook)
        model(torch.randn(3, 4)).sum().backward()

    with pytest.raises(ValueError, match="6 of the model's parameters require gradients, and 4 did when DDP wrapped"):
        first_step()


@needs_hook
@on_ranks(2)
def test_a_frozen_module_of_a_sharded_model_is_refused_too(rank: int) -> None:
    """A layer of a sharded model, which FSDP reduces by itself, and its replicas do not."""
    front = FRONTS["replicas"](net(), OneBit(), lambda given: sgd(p for p in given if p.requires_grad))
    before = train(front.model, front.optimizer, 2)
    unfreeze_and_add_param_group(front.model[0], front.optimizer)
    after = train(front.model, front.optimizer, 2)
    front.close()
    assert before == ""
    assert "parameter '0.weight' did not require gradients when compress_fsdp was called" in after
