"""Horovod's optimizer in configurations that nobody has thought of: drawn, played on all ranks, made small when they
fail. And those that have failed once."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from drawn import Copy, Overflow, Rescale, script, search, search_for_long
from gradwire import (
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    Identity,
    OneBit,
    PowerSGD,
    Residual,
    Ternary,
    TernGrad,
    TopK,
)
from gradwire.hooks.exchanges import EXCHANGES, possible
from gradwire.hooks.horovod.gradients import residuals
from horovod_drawn import (
    Accumulate,
    Configuration,
    Event,
    Join,
    Parameter,
    Restart,
    Resume,
    Step,
    play,
)
from hypothesis import strategies as st
from ranks import Pool, RankError, Ranks
from test_horovod_operations import horovod_ranks

CODECS: tuple[Codec | None, ...] = (
    TopK(0.1), TopK(0.01), TopK(0.5), TopK(0.2, values=torch.bfloat16), TopK(0.2, values=torch.int8),
    OneBit(), OneBit(block=256, scale="symmetric"), QSGD(), QSGD(bits=2, block=256), QSGD(rounding="nearest"),
    TernGrad(), Ternary(), ChunkedTopK(k=20, chunk=256), Cast(torch.bfloat16),
    PowerSGD(rank=2), Identity(), None,
)  # fmt: skip
#: Pools that have played before.
WARM: weakref.WeakSet[Pool] = weakref.WeakSet()
DENSE = ((300,), (40, 20), (1500,), (5, 1), (1,), ())
ROWS = ((30, 4), (7, 1), (300, 2))


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    use = draw(st.sampled_from(["always", "always", "some", "turns", "never", "once"]))
    if draw(st.integers(0, 4)) == 4:
        return Parameter(draw(st.sampled_from(ROWS)), use, sparse=True)
    return Parameter(draw(st.sampled_from(DENSE)), use)


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    codec = draw(st.sampled_from(CODECS))
    exchanges = ("auto", *(possible(codec) if codec is not None else ()))
    narrow = Residual(dtype=torch.bfloat16), Residual(dtype=torch.int8)
    feedback: st.SearchStrategy[bool | str | Residual] = st.sampled_from(["auto", True, True, False, *narrow])
    op = draw(st.sampled_from(["Average", "Average", "Sum"]))
    return Configuration(
        world_size=draw(st.sampled_from([2, 3])),
        codec=codec,
        exchange=draw(st.sampled_from(exchanges)),
        error_feedback=draw(feedback),
        op=op,
        predivide=draw(st.sampled_from([1.0, 2.0])) if op == "Average" else 1.0,
        passes=draw(st.sampled_from([1, 1, 2])),
        groups=draw(st.sampled_from([0, 0, 1, 2])),
        scaler=draw(st.sampled_from(["none", "unused", "enabled", "found", "disabled"])),
        sparse_as_dense=draw(st.booleans()),
        named=draw(st.booleans()),
        entropy_coding=draw(st.booleans()),
        optimizers=draw(st.sampled_from([1, 1, 2])),
        parameters=tuple(draw(st.lists(parameters(), min_size=1, max_size=5))),
    )


@st.composite
def scripts(draw: st.DrawFn) -> tuple[Configuration, list[Event]]:
    configuration = draw(configurations())
    overflow: st.SearchStrategy[Overflow | None] = st.none()
    if configuration.scales:
        rank, place = st.integers(0, configuration.world_size - 1), st.integers(0, len(configuration.parameters) - 1)
        overflow = st.one_of(st.none(), st.none(), st.builds(Overflow, rank, place, st.integers(0, 3)))
    # A sum that is synchronized twice counts the first part twice.
    rounds = st.sampled_from([0, 1, 1, 2] if configuration.op == "Average" else [0, 1])
    steps = st.builds(Step, rounds, overflow, st.booleans(), st.booleans())
    # What others round off meanwhile is known at the end alone.
    exact = st.booleans() if not isinstance(configuration.error_feedback, Residual) else st.just(False)
    kinds: list[st.SearchStrategy[Any]] = [
        *[steps] * 5,
        *[st.builds(Join, st.tuples(*[st.integers(0, 4)] * configuration.world_size), overflow, st.booleans(), exact)]
        * 2,
        st.builds(Resume, st.sampled_from(["local", "alone", "consolidated", "broadcast"]), st.booleans()),
        st.builds(Copy, st.sampled_from(["deepcopy", "pickle"])),
        st.builds(Restart),
        st.builds(Accumulate, st.sampled_from([1, 2, 3])),
    ]
    if configuration.scales:
        kinds.append(st.builds(Rescale, st.sampled_from([0.5, 4.0])))
    return configuration, draw(st.lists(st.one_of(kinds), min_size=1, max_size=10))


def found(ranks: Ranks, configuration: Configuration, events: Sequence[Event]) -> list[str]:
    """What is wrong with a script."""
    pool = ranks(configuration.world_size)
    if pool not in WARM:  # on a busy machine new processes take their time
        pool.run(play, Configuration(world_size=pool.world_size), [Step()])
        WARM.add(pool)
    try:
        results = pool.run(play, configuration, events, within=30, after_failure=5)
    except RankError as error:
        return [str(error)]
    return [f"rank {rank}: {text}" for rank, texts in enumerate(results) for text in texts]


def replay(ranks: Ranks, configuration: Configuration, events: Sequence[Event]) -> None:
    """Play a script, as a failing test has printed it."""
    wrong = found(ranks, configuration, events)
    assert not wrong, "\n".join([script(configuration, events), *wrong])


SPARSE = Parameter((30, 4), sparse=True)
SCALED = Configuration(scaler="enabled")
SECOND = Step(2, Overflow(1, 0, backward=1))
#: What has failed once, by what was wrong.
FAILED: dict[str, tuple[Configuration, list[Event]]] = {
    "an overflow in the second of two backward passes": (SCALED, [Step(), SECOND, Step()]),
    "gradients that are reduced for a scaler that nobody has named": (
        Configuration(scaler="found"),
        [Step(unscale=True, overflow=Overflow(1, 0)), Step(), Step(overflow=Overflow(0, 1)), Step(unscale=True)],
    ),
    "a scaler that comes for the first time after an overflow was reduced": (
        Configuration(scaler="found"),
        [Step(1, Overflow(1, 0)), Step(1), Step()],
    ),
    "a checkpoint's residual, in units of a scaler that has not come yet": (
        Configuration(scaler="found"),
        [Step(), Resume(), Step()],
    ),
    "a copy's residual, and another loss scale before its scaler has come": (
        Configuration(scaler="found"),
        [Step(), Step(), Copy(), Rescale(), Join((0, 2)), Step()],
    ),
    "another scaler than the one that was named": (
        Configuration(codec=None, scaler="another"),
        [Step(), Step(overflow=Overflow(1, 0)), Step(unscale=True)],
    ),
    "an overflow in a sparse gradient alone": (
        Configuration(scaler="enabled", parameters=(*SCALED.parameters, SPARSE)),
        [Step(), Step(overflow=Overflow(1, 2)), Step()],
    ),
    "a scale that changes between two backward passes": (SCALED, [Step(), Rescale(4.0), SECOND, Rescale(), Step()]),
    "a joined rank in steps that are thrown away": (
        Configuration(world_size=3, codec=OneBit(block=256), exchange="two_pass", scaler="enabled"),
        [Join((2, 6, 5), Overflow(1, 1)), Join((0, 3, 3), Overflow(2, 0), late=True), Step()],
    ),
    "a joined rank that has met the others again": (Configuration(), [Restart(), Join((0, 1))]),
    "a joined rank without a first step": (Configuration(), [Join((0, 1)), Step()]),
    "a joined rank beside another scaler": (Configuration(scaler="unused"), [Join((0, 1)), Step()]),
    "a joined rank that has not heard of a sparse gradient": (
        Configuration(parameters=(Parameter((300,)), SPARSE)),
        [Join((0, 1)), Step()],
    ),
    "a rank without a gradient in the second of two reductions": (
        Configuration(parameters=(Parameter((300,), "once"),)),
        [Step(2), Step(2), Step(2)],
    ),
    "gradients that are divided before": (Configuration(predivide=2.0), [Step(), Step()]),
    "two optimizers whose parameters have the same names": (
        Configuration(world_size=3, codec=OneBit(), exchange="two_pass", optimizers=2),
        [Step(), Join((1, 3, 5)), Step()],
    ),
}


@pytest.mark.parametrize("case", FAILED)
def test_what_has_failed_once(ranks: Ranks, case: str) -> None:
    replay(ranks, *FAILED[case])


JOINS: list[Event] = [Join((9, 3, 9), saved=True), Step(), Resume("alone"), Join((0, 2, 2), saved=True)]


@pytest.mark.parametrize(
    ("codec", "exchange"),
    [(codec, exchange) for codec in (OneBit(), TopK(0.02), PowerSGD(rank=1)) for exchange in possible(codec)],
    ids=str,
)
def test_nothing_is_lost_while_ranks_have_joined(ranks: Ranks, codec: Codec, exchange: str) -> None:
    replay(ranks, Configuration(world_size=3, codec=codec, exchange=exchange, optimizers=2), JOINS)


def played_unwaited(rank: int, exchange: str) -> list[str]:
    """By the exchanges for which the host does not wait, as over NCCL."""
    used = list[str]()

    def serving(name: str, _: bool) -> Any:
        used.append(name)
        return EXCHANGES[name].device_variant

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residuals, "serving", serving)
        found = play(rank, Configuration(world_size=3, codec=TopK(0.02), exchange=exchange, optimizers=2), JOINS)
    assert used
    return found


@pytest.mark.parametrize("exchange", ["union", "split"])
def test_nothing_is_lost_while_ranks_have_joined_and_no_host_waits(ranks: Ranks, exchange: str) -> None:
    assert ranks(3).run(played_unwaited, exchange) == [[]] * 3


@pytest.mark.parametrize("scaler", ["named", "late", "disabled"])
@horovod_ranks(2)
def test_residuals_are_put_back_where_a_step_is_skipped_and_nowhere_else(rank: int, scaler: str) -> None:
    """Every gradient is finite, and so is their mean, but not their sum; with a disabled scaler a gradient is not. What
    is missing of the gradients that were applied, where these are finite, relative; and whether a step was skipped."""
    p = torch.nn.Parameter(torch.zeros(400))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], TopK(0.1), op=hvd.Sum)
    scaler_, skips = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=False), scaler != "disabled"
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    wanted, received = torch.zeros(400), torch.zeros(400)
    for step in range(4):
        if skips and step == (1 if scaler == "late" else 0):
            scaler_ = torch.amp.GradScaler("cpu", init_scale=1.0)
        if scaler != "late":
            optimizer.use_grad_scaler(scaler_)
        gradient = torch.randn(400, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 2:
            gradient[0] = 3e38 if skips else torch.inf
        optimizer.zero_grad()
        scaler_.scale((p * gradient).sum()).backward()
        before = len(steps)
        if scaler != "late":
            optimizer.synchronize()
        with contextlib.nullcontext() if scaler == "late" else optimizer.skip_synchronize():
            scaler_.step(optimizer)
        scaler_.update(1.0 if skips else None)
        if len(steps) > before:
            assert p.grad is not None
            wanted += hvd.allreduce(gradient, op=hvd.Sum)
            received += p.grad
    left = hvd.allreduce(optimizer.state_dict()["gradwire"]["residuals"]["p"], op=hvd.Sum)
    missing = (wanted - received - left)[1:]
    assert (len(steps) == 3) == skips
    assert missing.norm() / wanted[1:].norm() < 1e-5


@horovod_ranks(2)
def test_a_copy_refuses_scales_that_differ_before_its_scaler_has_come(rank: int) -> None:
    """It is told from others that live by its scale."""
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], TopK(0.1))
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (2.0, 8.0, 2.0)]
    scaler = scalers[1]
    losses = [scaler.scale(p.sum()) for scaler in scalers]
    losses[1].backward()
    scaler.step(optimizer)
    optimizer = copy.deepcopy(optimizer)
    scaler.update(8.0 + rank)
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"disagree on the loss scale: rank 0 has 8\.0, rank 1 has"):
        scaler.step(optimizer)


@pytest.mark.parametrize("number", range(2))
def test_drawn_scripts(ranks: Ranks, number: int) -> None:
    search(scripts(), partial(replay, ranks), number, 30)


@pytest.mark.slow
def test_drawn_scripts_for_long(ranks: Ranks) -> None:
    search_for_long(scripts(), partial(replay, ranks), 200)
