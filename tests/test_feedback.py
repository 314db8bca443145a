"""Error feedback by parameter: whatever the buckets do, what is kept stays with its parameter."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from gradwire.compress.feedback import ErrorFeedback, Layout, Slot, layout_numel, pack
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 3, 2, 2), "d": (1,), "e": (4, 2)}


def layout_of(names: list[str], channels_last: bool = False) -> Layout:
    slots, start = [], 0
    for name in names:
        like = torch.empty(SHAPES[name])
        if channels_last and like.dim() == 4:
            like = like.to(memory_format=torch.channels_last)
        slots.append(Slot(name, start, tuple(like.shape), like.stride()))
        start += like.numel()
    return tuple(slots)


def fill(feedback: ErrorFeedback, layouts: list[Layout]) -> dict[str, torch.Tensor]:
    """Random residuals; what each parameter then has, in its own shape."""
    known: dict[str, torch.Tensor] = {}
    for layout in layouts:
        flat = feedback.residual(layout)
        flat.copy_(torch.randn(flat.shape))
        known |= {slot.name: slot.view(flat).clone() for slot in layout}
    return known


@st.composite
def splits(draw: st.DrawFn) -> list[Layout]:
    """The parameters in some order, in some number of buckets, the convolution in some memory format."""
    names = draw(st.permutations(list(SHAPES)))
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1))))
    bounds = [0, *cuts, len(names)]
    last = draw(st.booleans())
    return [layout_of(list(names[a:b]), last) for a, b in itertools.pairwise(bounds)]


@settings(deadline=None)
@given(splits(), splits())
def test_a_rebuild_moves_every_residual_to_its_parameter(before: list[Layout], after: list[Layout]) -> None:
    feedback = ErrorFeedback()
    known = fill(feedback, before)
    for layout in after:
        flat = feedback.residual(layout)
        for slot in layout:
            assert torch.equal(slot.view(flat), known[slot.name])
    assert feedback.by_name().keys() == known.keys()
    assert len(feedback._memories) == len(after), "layouts that nothing uses must go"


@settings(deadline=None)
@given(splits(), splits(), st.integers(2, 5))
def test_an_owners_residual_is_folded_when_its_layout_goes(
    before: list[Layout], after: list[Layout], world_size: int
) -> None:
    feedback = ErrorFeedback()
    known = fill(feedback, before)
    first = before[0]
    numel = layout_numel(first)
    start = numel // 3
    (owned,) = feedback.owned(first, [(start, numel - start, world_size)])
    owned.fill_(1.0)
    total = sum(float(t.double().sum()) for t in known.values()) + world_size * (numel - start)
    for layout in after:
        feedback.residual(layout)
    now = sum(float(t.double().sum()) for t in feedback.by_name().values())
    assert now == pytest.approx(total, abs=1e-4)


@settings(deadline=None)
@given(splits(), splits(), st.sampled_from(["load", "pickle", "deepcopy"]))
def test_copies_carry_everything(before: list[Layout], after: list[Layout], how: str) -> None:
    feedback = ErrorFeedback()
    known = fill(feedback, before)
    if how == "load":
        twin = ErrorFeedback()
        twin.load(feedback.by_name())
    else:
        twin = pickle.loads(pickle.dumps(feedback)) if how == "pickle" else copy.deepcopy(feedback)
    assert bool(twin)
    for layout in after:
        flat = twin.residual(layout)
        for slot in layout:
            assert torch.equal(slot.view(flat), known[slot.name])
        flat.zero_()
    assert all(torch.equal(t, known[n]) for n, t in feedback.by_name().items()), "a copy must share no memory"


def test_undo_puts_back_both_residuals() -> None:
    layout = layout_of(["a", "b"])
    feedback = ErrorFeedback(keep_previous=True)
    flat = feedback.residual(layout)
    (owned,) = feedback.owned(layout, [(2, 5, 2)])
    for step in range(3):  # the copies are made once and reused
        feedback.commit()
        flat.fill_(1.0 + step)
        owned.fill_(2.0 + step)
        feedback.remember(layout)
        flat.fill_(float("inf"))
        owned.fill_(9.0)
        feedback.undo()
        assert torch.equal(flat, torch.full_like(flat, 1.0 + step))
        assert torch.equal(owned, torch.full_like(owned, 2.0 + step))


def test_rescaling_reaches_everything() -> None:
    layout = layout_of(["a", "b"])
    feedback = ErrorFeedback()
    feedback.load({"c": torch.ones(SHAPES["c"])})
    feedback.residual(layout).fill_(1.0)
    feedback.owned(layout, [(0, 4, 2)])[0].fill_(1.0)
    feedback.rescale(0.5)
    found = feedback.by_name()
    assert float(found["c"].sum()) == 12.0
    assert float(found["a"].sum() + found["b"].sum()) == 0.5 * 17 + 0.5 * 2 * 4


def test_taking_the_residual_empties_it_but_keeps_what_cannot_be_sent() -> None:
    layout = layout_of(["b"])
    feedback = ErrorFeedback()
    grad = torch.tensor([1.0, 2.0, float("nan"), 4.0, 5.0])
    assert feedback.take(layout, grad) is grad, "nothing is kept yet, and nothing must be copied"
    feedback.residual(layout).fill_(0.5)
    feedback.owned(layout, [(3, 2, 2)])[0].fill_(1.0)
    total = feedback.take(layout, grad)
    assert torch.equal(total.nan_to_num(-1.0), torch.tensor([1.5, 2.5, -1.0, 6.5, 7.5]))
    assert torch.equal(feedback.residual(layout), torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0]))


def test_packing_moves_parameters_between_buffers() -> None:
    here, there = layout_of(["a", "b", "d"]), layout_of(["d", "a", "b"])
    pairs = [(slot, next(s for s in there if s.name == slot.name)) for slot in here]
    source, target = torch.arange(18.0), torch.zeros(18)
    pack(pairs, source, target)
    for slot, place in pairs:
        assert torch.equal(slot.view(source), place.view(target))
