"""Error feedback by parameter: whatever the buckets do, what is kept stays with its parameter."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
from gradwire.compress import QSGD, Codec, OneBit, TopK, new_draw
from gradwire.compress.feedback.base import RESIDUAL, Feedback
from gradwire.compress.feedback.lead import Lead
from gradwire.compress.feedback.momentum import Momentum
from gradwire.compress.feedback.residual import NOTHING, RESIDUAL_DTYPES, NoFeedback, Residual
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.compress.feedback.tracking import Tracking
from gradwire.compress.formats.layout import Layout, OwnedSlice, Packing, Slot, end_to_end, layout_numel, runs_between
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import SimulatedRanks
from strategies import parts_of

NAN = float("nan")
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


def residual_of(feedback: FeedbackStore, layout: Layout) -> torch.Tensor:
    return feedback.of(layout)[RESIDUAL]


def owned_of(feedback: FeedbackStore, layout: Layout, slices: list[OwnedSlice]) -> list[torch.Tensor]:
    return [kept[RESIDUAL] for kept in feedback.of(layout).owned(slices)]


def fill(feedback: FeedbackStore, layouts: list[Layout]) -> dict[str, torch.Tensor]:
    """Random residuals; what each parameter then has, in its own shape."""
    known: dict[str, torch.Tensor] = {}
    for layout in layouts:
        flat = residual_of(feedback, layout)
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
    feedback = FeedbackStore()
    known = fill(feedback, before)
    for layout in after:
        flat = residual_of(feedback, layout)
        for slot in layout:
            assert torch.equal(slot.view(flat), known[slot.name])
    assert feedback.by_name().keys() == known.keys()
    assert len(feedback._memories) == len(after), "layouts that nothing uses must go"


@settings(deadline=None)
@given(splits(), splits(), st.integers(2, 5))
def test_an_owners_residual_is_folded_when_its_layout_goes(
    before: list[Layout], after: list[Layout], world_size: int
) -> None:
    feedback = FeedbackStore()
    known = fill(feedback, before)
    first = before[0]
    numel = layout_numel(first)
    start = numel // 3
    (owned,) = owned_of(feedback, first, [(start, numel - start, world_size)])
    owned.fill_(1.0)
    total = sum(float(t.double().sum()) for t in known.values()) + world_size * (numel - start)
    for layout in after:
        residual_of(feedback, layout)
    now = sum(float(t.double().sum()) for t in feedback.by_name().values())
    assert now == pytest.approx(total, abs=1e-4)


@settings(deadline=None)
@given(splits(), splits(), st.sampled_from(["load", "pickle", "deepcopy"]))
def test_copies_carry_everything(before: list[Layout], after: list[Layout], how: str) -> None:
    feedback = FeedbackStore()
    known = fill(feedback, before)
    if how == "load":
        twin = FeedbackStore()
        twin.load(feedback.everything())
    else:
        twin = pickle.loads(pickle.dumps(feedback)) if how == "pickle" else copy.deepcopy(feedback)
    assert bool(twin)
    for layout in after:
        flat = residual_of(twin, layout)
        for slot in layout:
            assert torch.equal(slot.view(flat), known[slot.name])
        flat.zero_()
    assert all(torch.equal(t, known[n]) for n, t in feedback.by_name().items()), "a copy must share no memory"


def test_undo_puts_back_both_residuals() -> None:
    layout = layout_of(["a", "b"])
    feedback = FeedbackStore(keep_previous=True)
    flat = residual_of(feedback, layout)
    (owned,) = owned_of(feedback, layout, [(2, 5, 2)])
    for step in range(3):  # the copies are made once and reused
        feedback.commit()
        flat.fill_(1.0 + step)
        owned.fill_(2.0 + step)
        feedback.of(layout).snapshot()
        flat.fill_(float("inf"))
        owned.fill_(9.0)
        feedback.rollback()
        assert torch.equal(flat, torch.full_like(flat, 1.0 + step))
        assert torch.equal(owned, torch.full_like(owned, 2.0 + step))


def test_taking_the_residual_empties_it_but_keeps_what_cannot_be_sent() -> None:
    layout = layout_of(["b"])
    feedback = FeedbackStore()
    grad = torch.tensor([1.0, 2.0, float("nan"), 4.0, 5.0])
    assert feedback.drain(layout, grad) is grad, "nothing is kept yet, and nothing must be copied"
    residual_of(feedback, layout).fill_(0.5)
    owned_of(feedback, layout, [(3, 2, 2)])[0].fill_(1.0)
    total = feedback.drain(layout, grad)
    assert torch.equal(total.nan_to_num(-1.0), torch.tensor([1.5, 2.5, -1.0, 6.5, 7.5]))
    assert torch.equal(residual_of(feedback, layout), torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0]))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=8),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_packing_moves_runs_of_parameters_there_and_back(
    found: list[tuple[int, int, bool]], behind: int, dtype: torch.dtype
) -> None:
    """Of a buffer with gaps, between which each parameter goes to one of two places."""
    slots, place = list[tuple[Slot, bool]](), 0
    for number, (gap, length, first) in enumerate(found):
        slots.append((Slot(str(number), place + gap, (length,), (1,)), first))
        place += gap + length
    buffer = torch.arange(1.0, place + behind + 1)
    sides = [[slot for slot, first in slots if first is side] for side in (True, False)]
    inside = [torch.zeros(layout_numel(tuple(side)), dtype=dtype) for side in sides]
    parts = [
        list(runs_between(zip(side, end_to_end(side), strict=True), memory))
        for side, memory in zip(sides, inside, strict=True)
    ]
    packing = Packing(len(buffer), [*parts[0], *parts[1]])
    packing.take(buffer)
    for side, memory in zip(sides, inside, strict=True):
        assert torch.equal(memory.float(), torch.cat([torch.zeros(0), *(slot.flat(buffer) for slot in side)]))
    back = torch.zeros_like(buffer)
    packing.put(back)
    covered = torch.cat([torch.zeros(0), *(slot.flat(buffer) for slot, _ in slots)])
    assert torch.equal(back[back > 0], covered), "and nothing between them"
    # A run ends only where a gap, or a parameter of the other side, follows.
    ends = sum(1 for (a, x), (b, y) in itertools.pairwise(slots) if x != y or a.start + a.numel != b.start) + bool(
        slots
    )
    assert len(packing._outside) == ends


# -- strategies

SPLIT = [["a", "b"], ["c", "d", "e"]]
OTHER_SPLIT = [["e", "b", "c"], ["d"], ["a"]]


def hold(strategy: Feedback, codec: Codec, unapplied: bool = True, most: float = 1e-6) -> None:
    """The strategy's law in steps of every kind, while buckets change, and through checkpoints and undone steps.

    Args:
        unapplied: means are also thrown away and kept.
        most: how far the law may be off, relative to what went in.
    """
    ranks = SimulatedRanks(strategy, codec, SHAPES, keep_previous=True)
    layouts = [layout_of(names) for names in SPLIT]
    for event in (
        "step",
        "step",
        "dense",
        "step",
        "rebuild",
        "dense",
        "step",
        "undo",
        "step",
        "reload",
        "step",
        "unapplied",
    ):
        for memory in ranks.memories:
            memory.commit()
        if event == "rebuild":
            layouts = [layout_of(names, channels_last=True) for names in OTHER_SPLIT]
        elif event == "undo":
            before = ranks.means()
            ranks.step(layouts)
            layouts = [layout_of(names) for names in SPLIT]
            ranks.step(layouts, dense=True)
            for memory in ranks.memories:
                memory.rollback()
            for name, vectors in ranks.means().items():
                for vector, there in vectors.items():
                    assert torch.allclose(there, before[name][vector], atol=most), (name, vector)
        elif event == "reload":
            for rank, memory in enumerate(ranks.memories):
                ranks.memories[rank] = FeedbackStore(strategy, keep_previous=True)
                ranks.memories[rank].load(memory.everything())
        off, _ = ranks.step(layouts, dense=event == "dense", applied=event != "unapplied" or not unapplied)
        assert off < most, event


#: Of every kind, and how far the law may be off.
STRATEGIES: list[tuple[Feedback, float]] = [
    (Residual(), 1e-6),
    (Residual(decay=0.9), 1e-6),
    *((Residual(decay, torch.bfloat16), 4e-3) for decay in (1.0, 0.9)),
    *((Residual(decay, torch.int8), 2e-2) for decay in (1.0, 0.9)),
    (Tracking(), 1e-6),
    (Tracking(beta=0.0), 1e-6),
    (Lead(), 1e-5),
    (Lead(momentum=0.5, acts_as=0.0), 1e-5),
    (Momentum(0.0), 1e-6),
    *((Momentum(0.8, nesterov, masking), 1e-6) for nesterov in (False, True) for masking in (False, True)),
]


@pytest.mark.parametrize(
    "codec", [OneBit(), TopK(0.1), TopK(0.3, values=torch.int8), QSGD(rounding="nearest")], ids=str
)
@pytest.mark.parametrize(("strategy", "most"), STRATEGIES, ids=str)
def test_a_strategy_keeps_its_law_whatever_happens(strategy: Feedback, most: float, codec: Codec) -> None:
    hold(strategy, codec, most=most)


@pytest.mark.parametrize("bad", [NAN, float("inf"), 3e38])
@pytest.mark.parametrize("codec", [TopK(0.5), OneBit()], ids=str)
@pytest.mark.parametrize("strategy", [strategy for strategy, _ in STRATEGIES], ids=str)
def test_what_is_not_finite_goes_out_and_leaves_nothing_behind(strategy: Feedback, codec: Codec, bad: float) -> None:
    """3e38 twice is finite in no sum; a residual that is kept exactly is what it was."""
    if bad == 3e38 and isinstance(strategy, Tracking):
        return  # of which a share is sent, and finite
    layout, memories = layout_of(["a", "b"]), [FeedbackStore(strategy) for _ in range(2)]
    wires, workspace = torch.zeros(2, codec.wire_bytes(17), dtype=torch.uint8), codec.workspace(17)
    exact = strategy.storage_dtype(RESIDUAL) == torch.float32 and getattr(strategy, "decay", 1.0) == 1.0
    for step in range(6):
        grads = torch.randn(2, 17, generator=torch.Generator().manual_seed(step))
        if step == 3:
            grads[:, 13] = bad
            for memory in memories if bad == 3e38 else ():
                with memory.of(layout).open() as residual:
                    assert residual is not None
                    residual[13] = 3e38
        before = [memory.by_name()["b"][1] for memory in memories if step]
        for memory, grad, wire in zip(memories, grads, wires, strict=True):
            memory.of(layout).encode(codec, grad, wire, new_draw(0, step), workspace)
        out = torch.zeros(17)
        codec.decode_mean(parts_of(codec, wires, 17), out, workspace)
        assert bool(out[13].isfinite()) == (step != 3)
        for memory in memories:
            memory.of(layout).deliver(out.clone())
        kept = [[memory.by_name(name) for name in strategy.state_names] for memory in memories]
        assert all(bool(x.isfinite().all()) for vectors in kept for found in vectors for x in found.values())
        if step == 3 and exact and not isinstance(strategy, Tracking):  # which may hand out less of it than before
            assert [memory.by_name()["b"][1] for memory in memories] == before, "what could not be sent stays"
        for memory in memories if step == 3 and bad == 3e38 else ():
            memory.load({name: {"a": torch.zeros(3, 4), "b": torch.zeros(5)} for name in strategy.state_names})


def test_a_plain_residual_is_the_codecs_bit_for_bit() -> None:
    layout, codec, generator = layout_of(["a", "b", "c"]), OneBit(block=256), torch.Generator().manual_seed(0)
    memory, numel = FeedbackStore(), layout_numel(layout)
    expected, workspace = torch.zeros(numel), codec.workspace(numel)
    wires = torch.zeros(2, codec.wire_bytes(numel), dtype=torch.uint8)
    for step in range(5):
        grad = torch.randn(numel, generator=generator)
        codec.encode_feedback(grad, expected, wires[0], new_draw(0, step), workspace)
        memory.of(layout).encode(codec, grad, wires[1], new_draw(0, step), workspace)
        assert torch.equal(*wires)
        assert torch.equal(residual_of(memory, layout), expected)


def test_what_decays_is_counted() -> None:
    layout, codec = layout_of(["b"]), TopK(0.1)  # of five elements the largest is sent
    memory, grad = FeedbackStore(Residual(decay=0.5), keep_previous=True), torch.tensor([8.0, 4.0, 2.0, -2.0, 0.0])
    wire, workspace = torch.zeros(codec.wire_bytes(5), dtype=torch.uint8), codec.workspace(5)
    assert memory.dropped_l1 == 0.0
    for lost, residual in ((0.0, [0.0, 4.0, 2.0, -2.0, 0.0]), (4.0, [0.0, 6.0, 3.0, -3.0, 0.0])):
        memory.commit()
        memory.of(layout).encode(codec, grad, wire, None, workspace)
        assert memory.dropped_l1 == lost
        assert residual_of(memory, layout).tolist() == residual
    assert memory.drain(layout, torch.zeros(5)).tolist() == [0.0, 3.0, 1.5, -1.5, 0.0]
    assert memory.dropped_l1 == 10.0
    twin = copy.deepcopy(memory)
    memory.rescale(2.0)
    assert (memory.dropped_l1, twin.dropped_l1) == (20.0, 10.0)
    memory.rollback()
    assert memory.dropped_l1 == 0.0, "what has been undone has lost nothing"


@pytest.mark.parametrize(
    ("kind", "option", "values", "expected"),
    [
        (Residual, "decay", [0.0, 1.5, -1.0, NAN, True, "half"], r"expected a number in \(0, 1\]"),
        (Tracking, "beta", [1.0, -0.1, NAN, True, "most"], r"expected a number in \[0, 1\)"),
        (Tracking, "clip", [0.0, -1.0, NAN, float("inf"), True, "norm"], "expected a positive number"),
        (Momentum, "beta", [1.0, -0.1, NAN, True, "most"], r"expected a number in \[0, 1\)"),
        (Momentum, "clip", [0.0, -1.0, NAN, float("inf"), True, "norm"], "expected a positive number"),
        (Momentum, "nesterov", [None, 1, "yes"], "expected True or False"),
        (Momentum, "masking", [None, 0.5], "expected True or False"),
        (Lead, "momentum", [1.0], r"expected a number in \[0, 1\)"),
        (Lead, "acts_as", [True], "expected a number"),
        (Lead, "acts_as", [0.9], r"expected less than .*momentum=0\.9"),
        (Lead, "decay", [2.0], ""),
    ],
)
def test_options_that_cannot_be_are_refused(
    kind: type[Feedback], option: str, values: list[Any], expected: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{option}={re.escape(repr(value))}.*{expected}"):
            kind(**{option: value})


def test_without_feedback_nothing_is_kept() -> None:
    codec, grad = QSGD(), torch.randn(100, generator=torch.Generator().manual_seed(0))
    wires, workspace = torch.zeros(2, codec.wire_bytes(100), dtype=torch.uint8), codec.workspace(100)
    NOTHING.encode(codec, grad, wires[0], new_draw(3), workspace)
    codec.encode(grad, wires[1], new_draw(3), workspace)
    assert torch.equal(*wires)
    values, at = torch.ones(3), torch.tensor([1, 5, 7], dtype=torch.int32)
    NOTHING.take_at(at, values)
    NOTHING.restore(at, values)
    NOTHING.restore_unless(at, values, at)
    assert values.tolist() == [1.0] * 3
    memory = FeedbackStore(NoFeedback())
    layout = layout_of(["a", "b"])
    assert memory.of(layout).owned([(0, 5, 2)]) == [NOTHING]
    with pytest.raises(ValueError, match=r"the checkpoint has residual of parameters, and NoFeedback.* keeps nothing"):
        memory.load({RESIDUAL: {"a": torch.ones(3, 4)}})


@pytest.mark.parametrize("dtype", RESIDUAL_DTYPES, ids=str)
def test_entries_are_taken_and_given_back(dtype: torch.dtype) -> None:
    layout = layout_of(["b", "d"])
    kept = FeedbackStore(Residual(dtype=dtype)).of(layout)

    def now() -> list[float]:
        return kept.read(RESIDUAL).tolist()

    with kept.open() as residual:
        assert residual is not None
        residual.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 127.0]))
    at, values = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([10.0, torch.nan, 30.0])
    kept.take_at(at, values)
    assert values.nan_to_num(-1.0).tolist() == [11.0, -1.0, 35.0]
    assert now() == [0.0, 2.0, 3.0, 4.0, 0.0, 127.0]
    kept.restore(at, torch.tensor([1.0, 1.0, torch.inf]))
    assert now() == [1.0, 2.0, 4.0, 4.0, 0.0, 127.0]
    kept.restore_unless(at, torch.tensor([7.0, 8.0, 9.0]), torch.tensor([1, 2], dtype=torch.int32))
    assert now() == [7.0, 2.0, 4.0, 4.0, 9.0, 127.0]
    kept.rescale(0.5)
    assert now() == [3.5, 1.0, 2.0, 2.0, 4.5, 63.5]


def test_memory_that_is_dropped_waits_for_no_collector() -> None:
    layout = (Slot("p", 0, (8,), (1,)),)
    memory = FeedbackStore(keep_previous=True)
    kept = weakref.ref(memory.of(layout))
    gc.disable()
    try:
        memory.load({})
        assert kept() is None
    finally:
        gc.enable()


def test_residuals_follow_a_scale_wherever_they_and_it_lie() -> None:
    """To the bit as they follow a number: in use, owners', or just loaded."""
    sides = []
    for factor in (0.5, torch.tensor(0.5)):
        memory = FeedbackStore()
        memory.load({RESIDUAL: {"a": torch.arange(4.0), "b": torch.ones(3)}})
        layout = (Slot("a", 0, (4,), (1,)),)
        memory.of(layout)
        owned_of(memory, layout, [(0, 2, 2)])[0].fill_(1.0)
        memory.rescale(factor)
        sides.append(memory.by_name())
    assert all(torch.equal(sides[0][name], sides[1][name]) for name in ("a", "b"))
    assert torch.equal(sides[0]["a"], 0.5 * torch.tensor([2.0, 3.0, 2.0, 3.0]))
    assert torch.equal(sides[0]["b"], torch.full((3,), 0.5))
