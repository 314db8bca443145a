"""The hook is where gradients are reduced, at copies of a model too; or somebody says that it is not."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradwire import CompressState, TopK, compress_hook
from gradwire.trainers import register_hook
from lacking import needs_mixed_precision
from ranks import Pool, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from training import batch, perceptron, told, wrap


def train(rank: int, model: Any, steps: int) -> None:
    for step in range(steps):
        model.zero_grad()
        model(batch(rank, step, model)).square().mean().backward()


def copied(model: Any, how: str) -> tuple[Any, CompressState]:
    """A copy of a model, and of the state whose hook it lists."""
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    return twin, twin._comm_hooks[0][1]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@on_ranks(2)
def test_a_copy_gets_the_hook(rank: int, how: str) -> None:
    """A trainer's hook is registered at a copy: steps of its state, and most entries that a parameter's mean has."""
    ddp, _ = wrap(perceptron(), TopK(0.01), exchange="gather")
    train(rank, ddp, 3)
    twin, state = copied(ddp, how)
    for _ in range(2):
        register_hook(twin, state)
        train(rank, twin, 2)
    most = max(int(p.grad.count_nonzero()) / p.numel() for p in twin.parameters())
    assert [state.step, most < 0.5, len(twin._comm_hooks)] == [7, True, 1]


@on_ranks(2)
def test_a_copy_that_torch_does_not_reduce_is_refused(rank: int) -> None:
    ddp, _ = wrap(perceptron(), TopK(0.01), exchange="gather", ddp={"static_graph": True})
    train(rank, ddp, 2)
    text = told(lambda: register_hook(*copied(ddp, "pickle")))
    assert "wrap its module in DistributedDataParallel again" in text


def forgotten(rank: int, how: str, only: int | None) -> tuple[str, float]:
    """A copy, or a new model, is trained without the hook, on all ranks or on one."""
    twin: Any
    if how == "new":
        twin = DistributedDataParallel(perceptron())
        state = CompressState(twin, TopK(0.01), exchange="gather")
    else:
        ddp, _ = wrap(perceptron(), TopK(0.01), exchange="gather")
        train(rank, ddp, 2)
        twin, state = copied(ddp, how)
    if rank == only:
        twin.register_comm_hook(state, compress_hook)
    twin.module(batch(rank, 0, twin)).sum().backward()  # nobody's business
    with twin.no_sync():
        train(rank, twin, 1)
    start = time.monotonic()
    return told(lambda: train(rank, twin, 1)), time.monotonic() - start


@pytest.mark.parametrize(("how", "only"), [("deepcopy", None), ("pickle", 0), ("new", 0)])
def test_a_model_without_the_hook_is_told_so(how: str, only: int | None) -> None:
    with Pool(2) as pool:
        results = pool.run(forgotten, how, only, within=40)
    for text, seconds in results:
        assert "backward ran without the hook of the CompressState made for this model" in text
        assert seconds < 15


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@on_ranks(2)
def test_a_copy_may_train_without(rank: int, how: str) -> None:
    """A state that is closed does not mind, nor does one whose model trains by itself."""
    ddp, _ = wrap(perceptron(), TopK(0.01), exchange="gather")
    train(rank, ddp, 2)
    twin, state = copied(ddp, how)
    state.close()
    train(rank, twin, 2)
    again, _ = copied(ddp, how)
    train(rank, again.module, 2)
    assert [all(bool(p.grad.all()) for p in model.parameters()) for model in (twin, again)] == [True, True]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param("mixed precision", ("mixed_precision", "torch.autocast"), marks=needs_mixed_precision),
        ("in backward", ("_apply_optimizer_in_backward", "after backward")),
    ],
)
@on_ranks(2)
def test_hooks_of_ddps_own_are_named(rank: int, case: str, words: tuple[str, str]) -> None:
    """DDP's options that bring a hook: what is said of them, when the state is made, or bound, or registered."""
    model: nn.Module = nn.Linear(4, 4)
    options: dict[str, Any] = {}
    if case == "mixed precision":
        options = {"mixed_precision": _MixedPrecision(torch.float16, torch.float16, torch.float16)}
    else:
        with warnings.catch_warnings():  # torch's own, of jit
            warnings.simplefilter("ignore")
            from torch.distributed.optim import _apply_optimizer_in_backward
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(model, **options)
    codec = TopK(0.5)
    calls: list[Callable[[], object]] = [
        lambda: CompressState(ddp, codec), lambda: CompressState(codec).bind(ddp),
        lambda: register_hook(ddp, CompressState(codec)),
    ]  # fmt: skip
    texts = [told(call) for call in calls]
    assert all(word in text for text in texts for word in words), texts
