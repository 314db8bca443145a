"""A GradScaler and DistributedOptimizer: gradients are reduced before anything changes them, and every rank makes a
step or none does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import Codec, Identity, OneBit, TopK
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ranks import Pool, on_ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from training import digest

Ranks = Callable[[int], Pool]
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        loop: "step", the scaler's alone; "unscale", by hand, then clipping; "synchronize", as Horovod asks for it.
        named: the scaler that the optimizer is told of: this one, none, or another.
        fused: an optimizer that unscales by itself.
        overflows: ranks and steps.
        idle: a rank and a step whose loss has no gradient of any parameter, and one whose lacks some.
    """

    loop: str = "step"
    codec: Codec | None = None
    passes: int = 1
    op: int = hvd.Average
    groups: int | None = None
    sparse: bool = False
    part: bool = False
    named: str = "this one"
    fused: bool = False
    overflows: frozenset[tuple[int, int]] = frozenset()
    idle: tuple[int, int] = (-1, -1)
    some: tuple[int, int] = (-1, -1)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(12, 6, sparse=case.sparse)
        self.body, self.head = nn.Linear(6, 40), nn.Linear(40, 30)

    def loss(self, case: Case, rank: int, step: int, part: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
        y = torch.tanh(self.body(self.table(torch.randint(12, (5,), generator=generator))))
        if (rank, step) != case.some:
            y = self.head(y)
        loss = y.square().mean()
        return loss * float("inf") if (rank, step) in case.overflows and part == case.passes - 1 else loss


def optimizer_of(model: nn.Module, case: Case) -> Any:
    if case.fused:
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if case.sparse else 0.9)


def reference(case: Case, members: list[int]) -> tuple[Model, float]:
    """In one process, with torch's optimizer: the gradients of all ranks, then what the script does."""
    model = Model(case)
    optimizer, scaler = optimizer_of(model, case), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    share = 1.0 if case.op == hvd.Sum else 1.0 / len(members)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for rank in members:
            for part in range(case.passes):
                if (rank, step) != case.idle:
                    (scaler.scale(model.loss(case, rank, step, part)) * share).backward()
        if case.loop != "step":
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.02)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


def played(rank: int, case: Case) -> tuple[bool, str, float, float, float]:
    """Whether this rank takes part, its parameters, how far they are from the reference's, and both scales."""
    hvd.init()
    members = [0, 1] if case.part else [*range(hvd.size())]
    process_set = hvd.add_process_set(members) if case.part else hvd.global_process_set
    model = Model(case)
    compression: Any = hvd.Compression.none if case.codec is None else hvd.Compression.codec(case.codec)
    optimizer = hvd.DistributedOptimizer(
        optimizer_of(model, case), model.named_parameters(), compression, backward_passes_per_step=case.passes,
        op=case.op, groups=case.groups, process_set=process_set,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    other = torch.amp.GradScaler("cpu")
    if case.named != "none":
        optimizer.use_grad_scaler(scaler if case.named == "this one" else other)
    inside = rank in members
    for step in range(STEPS if inside else 0):
        optimizer.zero_grad()
        for part in range(case.passes):
            if (rank, step) != case.idle:
                scaler.scale(model.loss(case, rank, step, part)).backward()
        if case.loop == "synchronize":
            optimizer.synchronize()
        if case.loop != "step":
            if rank == 1:
                time.sleep(0.01)  # a part of the gradients may be under way, or not yet
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.02)
        if case.loop == "synchronize":
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
    expected, scale = reference(case, members)
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    off = max(float((a - b).detach().abs().max()) for a, b in pairs)
    if case.part:
        hvd.barrier()
        hvd.remove_process_set(process_set)
    return inside, digest(model.parameters()), off, scaler.get_scale(), scale


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks_and_steps = st.tuples(st.integers(0, 2), st.integers(0, STEPS - 1))
    codec = draw(st.sampled_from([None, None, Identity(), OneBit(block=256), TopK(0.2)]))
    sparse = codec is None and draw(st.booleans())
    loop = "step" if sparse else draw(st.sampled_from(["step", "step", "unscale", "synchronize"]))
    named = ["this one", "none", *(["another"] if loop == "step" and codec is None else [])]
    return Case(
        loop=loop,
        codec=codec,
        passes=draw(st.sampled_from([1, 1, 2])),
        op=draw(st.sampled_from([hvd.Average, hvd.Sum])),
        groups=None if sparse else draw(st.sampled_from([None, 2])),
        sparse=sparse,
        part=draw(st.booleans()),
        named=draw(st.sampled_from(named)),
        fused=not sparse and draw(st.booleans()),
        overflows=frozenset(draw(st.sets(ranks_and_steps, max_size=2))),
        idle=draw(ranks_and_steps.filter(lambda found: found[1] > 0)),
        some=draw(ranks_and_steps),
    )


def check(pool: Pool, case: Case) -> None:
    found = [result for result in pool.run(played, case) if result[0]]
    for _, parameters, off, scale, expected in found:
        assert parameters == found[0][1]
        assert scale == expected
        if case.codec is None or case.codec.lossless:
            assert off < 1e-5


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
@example(case=Case(named="none"))
@example(case=Case(named="another"))
@example(case=Case(loop="unscale", overflows=frozenset({(0, 0), (1, 2)}), idle=(1, 1)))
@example(case=Case(codec=OneBit(block=256), named="none", overflows=frozenset({(1, 0)}), idle=(0, 2)))
@example(case=Case(fused=True, op=hvd.Sum, overflows=frozenset({(0, 1)})))
@example(case=Case(loop="synchronize", part=True))
def test_a_scaler_unscales_what_all_ranks_have_reduced(ranks: Ranks, case: Case) -> None:
    check(ranks(3), case)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_a_scaler_unscales_what_all_ranks_have_reduced_in_many_scripts(ranks: Ranks, case: Case) -> None:
    check(ranks(3), case)


@pytest.mark.parametrize("codec", [None, OneBit(block=256)], ids=str)
@pytest.mark.parametrize("how", ["unscaled", "clipped", "dropped", "replaced"])
@on_ranks(2)
def test_gradients_that_are_changed_in_flight_are_refused(rank: int, how: str, codec: Codec | None) -> None:
    """What a script does to gradients in flight, where rank 0 alone has an overflow."""
    hvd.init()
    model = Model(Case())
    compression: Any = hvd.Compression.none if codec is None else hvd.Compression.codec(codec)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression)
    before = digest(model.parameters())
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    optimizer.use_grad_scaler(other)
    scaler.scale(model.loss(Case(overflows=frozenset({(0, 0)})), rank, 0, 0)).backward()
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
@on_ranks(2)
def test_adasum_goes_on_where_a_rank_overflows(rank: int, fused: bool) -> tuple[str, bool]:
    """With Adasum each rank steps by itself, and one that overflows takes part with a step of zero."""
    hvd.init()
    model = Model(Case())
    inner = optimizer_of(model, Case(fused=fused))
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model.loss(Case(overflows=frozenset({(1, 1), (0, 2), (1, 2)})), rank, step, 0)).backward()
        before = digest(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert (digest(model.parameters()) == before) == (step == 2)
    return digest(model.parameters()), scaler.get_scale() < 8.0
