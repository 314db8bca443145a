"""Recommendations, and what is said of optimizers that are known not to go with a codec."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gradwire
import pytest
import torch
from gradwire import (
    CODECS,
    EDEN,
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    CompressState,
    Momentum,
    OneBit,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
    compress_hook,
    recommend,
)
from gradwire.compress import Feedback
from gradwire.hooks.training.optimizer_checks import known_problem
from gradwire.hooks.training.recommend import LEAST_TOP, UNTRIED, is_adaptive, ratio_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import batch, digest, perceptron


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(3))], **options)


def sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, **options)


EDEN_CALL = "CompressState(model, EDEN(), error_feedback=False)"

# -- recommend ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(2, 2000), st.sampled_from(["adamw", "SGD", "muon", torch.optim.Adam, torch.optim.SGD]))
def test_what_is_recommended_takes_no_more_bytes_than_asked_for(ratio: float, optimizer: Any) -> None:
    found = recommend(optimizer, ratio=ratio)
    assert found.ratio >= ratio
    assert found.ratio == pytest.approx(found.every * ratio_of(found.codec))
    assert recommend(optimizer, bits=32 / ratio).ratio >= ratio * (1 - 1e-9)
    # Nothing lies between 16 bits and 4, under Muon nothing between 16 bits and 2, and under SGD nothing between 4 bits
    # and `LEAST_TOP`; else they are closer.
    assert found.ratio <= (8 if optimizer == "muon" else 4) * ratio
    if ratio >= {"muon": 105.0, "SGD": LEAST_TOP, torch.optim.SGD: LEAST_TOP}.get(optimizer, 24.0):
        assert found.ratio <= (1.15 if found.every == 1 else 1 + 1 / (found.every - 1)) * ratio


@pytest.mark.parametrize("make", [adam, sgd])
@settings(deadline=None)
@given(ratio=st.floats(2, 2000))
def test_nothing_is_recommended_that_is_warned_of(make: Callable[..., torch.optim.Optimizer], ratio: float) -> None:
    found = recommend(make(), ratio=ratio)
    optimizer = make() if found.momentum is None else make(betas=(found.momentum, 0.99))
    # Where parameters are exchanged, the optimizer sees nothing of the codec.
    assert found.rounds is not None or known_problem(optimizer, found.codec, found.feedback is not False) is None


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, TypeError, "give one of the two"),
        ({"ratio": 20, "bits": 1}, TypeError, "give one of the two"),
        ({"ratio": 1.5}, ValueError, "ratio=1.5: expected from 2 to 2000"),
        ({"bits": 0.001}, ValueError, "bits=0.001: expected from 2 to 2000"),
        ({"ratio": float("nan")}, ValueError, "ratio=nan: expected a number above 0"),
        ({"bits": True}, ValueError, "bits=True: expected a number above 0"),
        ({"ratio": 0}, ValueError, "ratio=0: expected a number above 0"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        recommend("adamw", **options)
    with pytest.raises(TypeError, match="expected a torch optimizer"):
        recommend(3, ratio=20)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a torch optimizer"):
        recommend(3, ratio=2)  # type: ignore[arg-type]


def test_a_recommendation_can_be_read_and_pasted() -> None:
    kept = "error_feedback=Residual(), rounds=Rounds(keep_unsent=True, lengthen_steps=True)"
    divided = "CompressState(model, EDEN(levels=2), error_feedback=Magnitudes())"
    assert [recommend("adamw", ratio=ratio).call for ratio in (19.2, 23)] == [divided] * 2
    found = recommend("adamw", ratio=24)
    apart = "error_feedback=False, rounds=Rounds(lengthen_steps=True)"
    assert str(found).startswith(f"LocalUpdates(model, optimizer, EDEN(), every=2, {apart}): ")
    assert "not been tried above 1 million parameters" in found.why
    assert [recommend("adamw", ratio=ratio).call for ratio in (7.9, 19)] == [EDEN_CALL] * 2
    assert recommend("sgd", ratio=20).momentum is None
    assert "measured with" not in recommend(torch.optim.SGD, ratio=20).why
    assert "measured with adm: this is the advice for SGD" in recommend("adm", ratio=20).why
    rare = recommend("adamw", ratio=500)
    assert isinstance(rare.codec, ChunkedTopK)
    assert rare.call == f"LocalUpdates(model, optimizer, ChunkedTopK(k={rare.codec.k}, chunk=16384), every=5, {kept})"
    assert [recommend("adamw", ratio=ratio).every for ratio in (24, 40, 95, 100, 1000, 2000)] == [2, 3, 5, 5, 5, 10]
    assert [UNTRIED in recommend("adamw", ratio=ratio).why for ratio in (20, 100, 120)] == [False, False, True]
    how = "every=5, exchange='gather', error_feedback=Residual()"
    assert recommend("Muon", ratio=100).call == f"LocalUpdates(model, optimizer, ChunkedTopK(k=1024), {how})"
    assert recommend("Muon", ratio=100).momentum is None
    assert [recommend("muon", ratio=ratio).every for ratio in (3, 20, 24, 500, 2000)] == [2, 3, 5, 5, 10]
    assert [UNTRIED in recommend("muon", ratio=ratio).why for ratio in (1000, 1100)] == [False, True]
    names: dict[str, Any] = {**vars(gradwire), "torch": torch, "model": None}
    names["CompressState"] = lambda _, *made, **kept: (*made, kept)
    for found in (recommend("sgd", ratio=ratio) for ratio in (2, 4, 20, 30, 200)):
        assert eval(found.call, names) == (found.codec, {"error_feedback": found.feedback})


@on_ranks(2)
def test_what_is_recommended_can_be_made(rank: int) -> None:
    """Rounds in 9 steps, and whether ranks agree at the end."""
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    names = {name: getattr(gradwire, name) for name in gradwire.__all__} | {"model": model, "optimizer": optimizer}
    updates = eval(recommend(optimizer, ratio=900).call, names)
    for step in range(9):
        model(batch(rank, step, model)).square().mean().backward()
        optimizer.step()
        updates.step()
    rounds = updates.rounds
    updates.synchronise()
    same = len(set(updates._running().session.control.all_gather_object(digest(model.parameters())))) == 1
    updates.close()
    assert (rounds, same) == (1, True)


def test_who_divides_by_a_size_of_its_own() -> None:
    adaptive = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and is_adaptive(name)}
    assert adaptive >= {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Adafactor", "RMSprop"}
    assert not adaptive & {"SGD", "ASGD", "LBFGS", "Muon", "Optimizer"}


# -- concern -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_who_is_warned_of(codec: Codec) -> None:
    """Codes of few levels with a residual, under Adam; those that send few elements, where it keeps its momentum; and
    under SGD, OneBit."""
    few, coarse = isinstance(codec, TopK | ChunkedTopK), isinstance(codec, OneBit | Ternary | TernGrad | EDEN)
    assert bool(known_problem(adam(), codec, True)) == (few or coarse)
    assert bool(known_problem(adam(betas=(0.5, 0.95)), codec, True)) == coarse
    assert known_problem(torch.optim.RMSprop([nn.Parameter(torch.ones(3))]), TopK(0.1), True) is None, (
        "it has no momentum"
    )
    assert bool(known_problem(sgd(momentum=0.9), codec, True)) == isinstance(codec, OneBit)
    assert known_problem(adam(), codec, False) is None
    assert bool(known_problem(DistributedMuon(), codec, True)) == (not isinstance(codec, Cast | QSGD))
    assert known_problem(DistributedMuon(), codec, False) is None
    for optimizer in (adam(), sgd()):
        text = known_problem(optimizer, codec, True)
        if text is not None:
            assert str(codec) in text
            assert type(optimizer).__name__ in text
            call = recommend(optimizer, ratio=max(ratio_of(codec), 3.0)).call
            instead = call.removeprefix("CompressState(model, ")
            instead = instead if instead == call else instead.removesuffix(")")
            lead = "Lead(momentum=0.9, acts_as=0.5)"
            assert (lead in text) == few
            assert f"take {call if few else instead} (gradwire.recommend)" in text
            assert ("betas=(0.5, 0.999)" in text) == few


class DistributedMuon(torch.optim.Optimizer):
    """Somebody's."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.ones(3, 3))], {"lr": 0.1})


class AdaOther(torch.optim.Optimizer):
    """Somebody else's, whose "betas" may be anything."""

    def __init__(self, betas: Any) -> None:
        super().__init__([nn.Parameter(torch.ones(3))], {"lr": 0.1, "betas": betas})


@pytest.mark.parametrize("betas", [None, 0.9, (), (0.9,), [0.9, 0.99], (0.9, 0.99, 0.999)], ids=str)
def test_any_optimizer_can_be_looked_at(betas: Any) -> None:
    optimizer = AdaOther(betas)
    assert bool(known_problem(optimizer, TopK(0.1), True)) == (betas == [0.9, 0.99])
    if isinstance(betas, tuple | list) and betas:
        with pytest.raises(ValueError, match="AdaOther has betas="):
            Tracking().check_optimizer(optimizer)
    else:
        Tracking().check_optimizer(optimizer)


@pytest.mark.parametrize("strategy", [Tracking(), Momentum()], ids=str)
@on_ranks(2)
def test_a_second_momentum_is_refused_at_the_first_step(rank: int, strategy: Feedback) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 3))
    state = CompressState(model, TopK(0.1), error_feedback=strategy, fallback=None)
    model.register_comm_hook(state, compress_hook)
    said = []
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)):
        model(torch.ones(2, 40)).sum().backward()
        before = digest(model.parameters())
        for _ in range(2):  # as long as it is not changed
            with pytest.raises(ValueError, match="momentum already") as caught:
                optimizer.step()
        assert digest(model.parameters()) == before
        said.append(str(caught.value))
    torch.optim.SGD(model.parameters(), 0.1).step()
    state.close()
    assert "AdamW has betas=(0.9, 0.999)" in said[0]
    assert "SGD has momentum=0.9" in said[1]
    assert all(str(strategy) in text and "SGD(momentum=0)" in text for text in said)


@on_ranks(2)
def test_a_state_that_is_closed_says_nothing_of_the_optimizer(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(40, 3))
    state = CompressState(model, TopK(0.1), error_feedback=Momentum(), fallback=None)
    state.close()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("codec", "kind", "options", "warned"),
    [
        (OneBit(), "adamw", {}, True),
        (OneBit(), "sgd", {}, True),
        (Ternary(), "adamw", {"error_feedback": Tracking(0.0)}, False),
        (Ternary(), "adamw", {"error_feedback": Residual()}, True),
        (TopK(density=0.1), "adamw", {}, True),
        (TopK(density=0.1), "adamw, β1 0.5", {}, False),
        (TopK(density=0.1), "sgd", {}, False),
        (TernGrad(), "adamw", {}, False),
        (OneBit(), "adamw", {"exchange": "dense"}, False),
        (QSGD(), "sgd", {}, False),
        (Cast(torch.float16), "adamw", {}, False),
    ],
)
@on_ranks(2)
def test_a_state_warns_once(rank: int, codec: Codec, kind: str, options: dict[str, Any], warned: bool) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 3))
    state = CompressState(model, codec, fallback=None, **options)
    model.register_comm_hook(state, compress_hook)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if kind != "sgd":
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5 if "β1" in kind else 0.9, 0.99))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 40)).sum().backward()
            optimizer.step()
    state.close()
    texts = [str(one.message) for one in caught if "gradwire" in str(one.message)]
    assert len(texts) == warned
