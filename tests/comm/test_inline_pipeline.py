"""Small steps: begun where buckets are submitted, and gone on with where their end is waited for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gradwire import Cast, Codec, OneBit, PowerSGD, TopK, Tracking, compress_hook
from gradwire.hooks.comm.pipeline import Pipeline
from gradwire.hooks.core import reducer
from gradwire.hooks.core.session import Session
from gradwire.hooks.network import probe
from gradwire.hooks.training.autograd_end import AtEnd
from ranks import Pool, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from training import Ledger, batch, convnet, digest, pretend, train, waiting, wrap

Ranks = Callable[[int], Pool]


class Counted:
    """In how many steps the pipeline was told to defer, or not to."""

    def __enter__(self) -> Counted:
        self.steps, defer = list[bool](), Pipeline.defer

        def counting(pipeline: Pipeline, deferred: bool) -> None:
            self.steps.append(deferred)
            defer(pipeline, deferred)

        self._patch = patch.object(Pipeline, "defer", counting)
        self._patch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._patch.stop()


def trained(
    rank: int,
    codec: Codec,
    options: dict[str, Any] | None = None,
    few: int = reducer.SMALL_NUMEL,
) -> tuple[list[str], float, list[bool]]:
    """Digests of every step's gradients, what is off by the law of residuals, and which steps were deferred: where the
    rank's steps are small up to `few` gradients."""
    model = convnet()
    ledger = Ledger(model)
    ddp, state = wrap(model, codec, **(options or {}))
    with patch.object(reducer, "SMALL_NUMEL", few), Counted() as deferred:
        digests = train(rank, ddp, range(5), ledger)
    off = ledger.error(state)
    state.close()
    return digests, off, deferred.steps


WAYS = [
    (TopK(0.05), "gather"), (TopK(0.05), "split"), (OneBit(), "gather"), (OneBit(), "two_pass"),
    (PowerSGD(1), "factors"), (Cast(torch.bfloat16), "two_pass"),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "exchange"), WAYS, ids=str)
def test_small_steps_are_deferred_and_equal_those_that_are_not(ranks: Ranks, codec: Codec, exchange: str) -> None:
    pool = ranks(3)
    own = pool.run(trained, codec, {"exchange": exchange})
    others = pool.run(trained, codec, {"exchange": exchange}, 0)
    for (digests, off, deferred), (expected, _, threads) in zip(own, others, strict=True):
        assert digests == expected == own[0][0]
        assert off < 1e-5
        assert deferred == [False, True, True, True, True], "by the gradients of the step before"
        assert not any(threads)


def on_some(rank: int, codec: Codec, exchange: str) -> Any:
    return trained(rank, codec, {"exchange": exchange}, 0 if rank == 1 else reducer.SMALL_NUMEL)


@pytest.mark.parametrize(("codec", "exchange"), WAYS, ids=str)
def test_ranks_need_not_do_alike(ranks: Ranks, codec: Codec, exchange: str) -> None:
    results = ranks(3).run(on_some, codec, exchange)
    assert [result[0] for result in results] == [results[0][0]] * 3
    assert [any(deferred) for *_, deferred in results] == [True, False, True]


def test_what_moves_with_all_gradients_together_is_deferred_too(ranks: Ranks) -> None:
    first, second = ranks(2).run(trained, OneBit(), {"error_feedback": Tracking(clip=1.0), "exchange": "gather"})
    assert first[0] == second[0]
    assert first[2] == second[2] == [False, True, True, True, True]


@on_ranks(2)
def test_what_is_not_small_is_not_deferred(rank: int) -> None:
    torch.manual_seed(0)
    ddp, state = wrap(nn.Linear(512, 513), TopK(0.01), exchange="gather")
    with Counted() as deferred:
        for _ in range(3):
            ddp(torch.randn(4, 512)).square().mean().backward()
    state.close()
    assert deferred.steps == [False] * 3


def test_collectives_do_not_wait_for_the_end_of_backward(ranks: Ranks) -> None:
    """They begin only when ranks have compared, which in a deferred step is then."""
    scaler = torch.amp.GradScaler("cpu")  # else dense steps have no pipeline
    for _, _, deferred in ranks(2).run(trained, OneBit(), {"exchange": "dense", "grad_scaler": scaler}):
        assert deferred == [False] * 5


@on_ranks(2)
def test_backward_does_not_wait_for_what_others_mean(rank: int) -> None:
    """Ranks measure a codec, when they know that all of them mean it."""
    with patch.object(probe, "calibration", pretend(1e-5)), Counted() as deferred:
        ddp, state = wrap(convnet(), lambda step: OneBit() if step < 3 else TopK(0.05), exchange="auto")
        train(rank, ddp, range(6))
        state.close()
    assert deferred.steps == [False, True, True, False, True, True]


@pytest.mark.parametrize("way", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_ways_of_ddp(ranks: Ranks, way: str) -> None:
    for digests, off, deferred in ranks(2).run(trained, OneBit(), {"ddp": {way: True}, "exchange": "gather"}):
        assert len(digests) == 5
        assert off < 1e-5
        assert any(deferred) == (way != "static_graph"), "whose first pass waits before it has ended"


def waited_for_in_the_hook(rank: int) -> tuple[list[float], list[bool]]:
    """The norms of all means, taken where the hook is called."""
    ddp, state, norms = waiting(convnet(), OneBit(), exchange="gather")
    with Counted() as deferred:
        train(rank, ddp, range(4))
    state.close()
    return norms, deferred.steps


@on_ranks(2, within=60.0)
def test_a_hook_that_waits_for_a_mean_that_needs_all_gradients_is_told(rank: int) -> None:
    strategy = Tracking(clip=1.0)
    ddp, state, _ = waiting(convnet(), OneBit(), exchange="gather", fallback=None, error_feedback=strategy)
    with pytest.raises(RuntimeError) as raised:
        train(rank, ddp, range(2))  # one bucket holds them all at first
    state.close()
    text = str(raised.value)
    assert "no mean is there before the last bucket" in text


def test_a_hook_may_wait_for_the_mean(ranks: Ranks) -> None:
    first, second = ranks(2).run(waited_for_in_the_hook)
    assert first == second
    assert not any(first[1])


def outside(rank: int) -> tuple[list[str], list[bool]]:
    """The last bucket of each step comes when no backward pass runs any more, as far as the state can tell."""
    ddp, state = wrap(convnet(), OneBit(), exchange="gather")
    calls, queue = itertools.count(), AtEnd.queue

    def only_first(end: AtEnd) -> bool:
        if next(calls) % 2 == 0:
            return queue(end)
        end._pending = False
        return False

    with Counted() as deferred, patch.object(AtEnd, "queue", only_first):
        digests = train(rank, ddp, range(4))
    state.close()
    return digests, deferred.steps


def test_a_step_that_nobody_ends_is_ended_by_its_last_bucket(ranks: Ranks) -> None:
    first, second = ranks(2).run(outside, within=60.0)
    assert first == second
    assert first[1] == [False, True, True, True]


@on_ranks(2)
def test_the_next_model_may_be_a_static_graph(rank: int) -> None:
    """The state's next model is a static graph, of which DDP waits for the first means within backward."""
    ddp, state = wrap(convnet(), OneBit(), exchange="gather")
    steps = []
    for _ in range(2):
        with Counted() as deferred:
            train(rank, ddp, range(3))
        steps.append(deferred.steps)
        ddp = DistributedDataParallel(ddp.module, bucket_cap_mb=0.02, static_graph=True)
        ddp.register_comm_hook(state, compress_hook)
    state.close()
    assert steps == [[False, True, True], [False, False, False]]


def two_models(rank: int, codec: Codec, exchange: str) -> tuple[list[str], list[bool]]:
    """Two models in one backward pass, which ranks go through in another order."""
    models = [wrap(convnet(), codec, exchange=exchange) for _ in range(2)]
    digests = []
    with Counted() as deferred:
        for step in range(4):
            for ddp, _ in models:
                ddp.zero_grad()
            losses = [ddp(batch(rank, step, ddp.module)).square().mean() for ddp, _ in models[:: 1 - 2 * rank]]
            sum(losses[1:], losses[0]).backward()
            digests += [digest([p.grad for p in ddp.parameters()]) for ddp, _ in models]
    for _, state in models:
        state.close()
    return digests, deferred.steps


@pytest.mark.parametrize(("codec", "exchange"), WAYS, ids=str)
def test_ranks_may_use_two_models_in_another_order(ranks: Ranks, codec: Codec, exchange: str) -> None:
    first, second = ranks(2).run(two_models, codec, exchange, within=60.0)
    assert first[0] == second[0]
    assert any(first[1])


@on_ranks(2, within=60.0)
def test_one_rank_may_wait_within_backward(rank: int) -> list[str]:
    """Rank 1 looks at the state, and so waits for what has been submitted, in the middle of a backward pass."""
    model = convnet()
    ddp, state = wrap(model, TopK(0.05), exchange="split")
    digests = train(rank, ddp, range(2))
    if rank == 1:
        handle = next(model.parameters()).register_hook(lambda _: [state.statistics(), None][1])
    digests += train(rank, ddp, range(2, 4))
    if rank == 1:
        handle.remove()
    state.close()
    return digests


@pytest.mark.parametrize("how", ["autocast", "mode"])
@on_ranks(2)
def test_what_changes_torch_on_the_thread_keeps_steps_off_it(rank: int, how: str) -> None:
    model = convnet()
    ddp, state = wrap(model, PowerSGD(2), exchange="factors")
    with Counted() as deferred:
        for step in range(4):
            loss = ddp(batch(rank, step, model)).square().mean()
            with torch.autocast("cpu", dtype=torch.bfloat16) if how == "autocast" else FlopCounterMode(display=False):
                loss.backward()
    state.close()
    assert deferred.steps == [False] * 4


def raised(rank: int) -> tuple[list[str], list[bool], int]:
    """A backward pass raises on every rank when some of its buckets are under way: how many still are afterwards."""
    model = convnet()
    ddp, state = wrap(model, TopK(0.05), exchange="gather")

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    with Counted() as deferred:
        digests = train(rank, ddp, range(3))
        handle = next(model.parameters()).register_hook(fail)
        with pytest.raises(ValueError, match="in backward"):
            train(rank, ddp, range(3, 4))
        handle.remove()
        ddp.reducer._reset_state()
        assert state._reducer is not None
        core = state._reducer.session.pipeline._scheduler
        rest = len(core.pending) + len(core.in_flight)
        digests += train(rank, ddp, range(4, 7))
    state.close()
    return digests, deferred.steps, rest


def test_a_pass_that_raises_leaves_nothing_under_way(ranks: Ranks) -> None:
    first, second = ranks(2).run(raised)
    assert first == second
    _, deferred, rest = first
    assert deferred[1:] == [True] * 6
    assert rest == 0


@on_ranks(2, within=60.0)
def test_ranks_that_have_not_raised_alike_say_so(rank: int) -> None:
    """A backward pass raises after other buckets on rank 1 than on rank 0: what they say in the next one."""
    model = convnet()
    ddp, state = wrap(model, TopK(0.05), exchange="gather")
    train(rank, ddp, range(3))
    assert state.step == 3

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    handle = list(model.parameters())[0 if rank else 4].register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        train(rank, ddp, range(3, 4))
    handle.remove()
    ddp.reducer._reset_state()
    with pytest.raises(RuntimeError) as raised:
        train(rank, ddp, range(4, 5))
    text = str(raised.value)
    assert "ranks disagree on failed backward passes: rank 0 has" in text, text


@on_ranks(2, within=60.0)
def test_a_pass_that_raises_is_told_of_from_the_next_step_on(rank: int) -> list[str]:
    """A backward pass raises on every rank, on rank 0 before the pipeline has told the others of its step."""
    model = convnet()
    ddp, state = wrap(model, TopK(0.05), exchange="gather")
    train(rank, ddp, range(3))
    announce, raised, said, gone = Session.announce, Session.raised, threading.Event(), threading.Event()

    def late(connection: Session, *words: Any) -> None:
        assert rank or gone.wait(20)
        announce(connection, *words)
        said.set()

    def noted(connection: Session, *words: Any) -> None:
        raised(connection, *words)
        gone.set()

    def fail(grad: torch.Tensor) -> None:
        assert rank == 0 or said.wait(20)
        raise ValueError("in backward")

    handle = next(model.parameters()).register_hook(fail)
    assert state._reducer is not None
    state._reducer._small = False
    with patch.object(Session, "announce", late), patch.object(Session, "raised", noted):
        with pytest.raises(ValueError, match="in backward"):
            train(rank, ddp, range(3, 4))
        handle.remove()
        ddp.reducer._reset_state()
        digests = train(rank, ddp, range(4, 6))
    state.close()
    return digests


@on_ranks(2)
def test_ranks_that_differ_say_so(rank: int) -> None:
    """What a rank says in a small step if rank 1 is in another one."""
    ddp, state = wrap(convnet(), TopK(0.05), exchange="gather")
    train(rank, ddp, range(2))
    with Counted() as deferred:
        state._step += rank
        with pytest.raises(RuntimeError) as raised:
            train(rank, ddp, range(2, 3))
    assert deferred.steps == [True]
    text = str(raised.value)
    assert "ranks disagree on step: rank 0 has 2, rank 1 has 3" in text, text
