"""Backward passes that end in another way than at their end: within a hook, outside, beside another model's, or not."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gradwire import Cast, Codec, OneBit, PowerSGD, TopK, Tracking
from gradwire.hooks.core.reducer import Reducer, Step
from gradwire.hooks.core.session import Session
from gradwire.hooks.training.autograd_end import AtEnd
from ranks import Ranks, on_ranks
from training import batch, convnet, digest, train, waiting, wrap

WAYS = [
    (TopK(0.05), "gather"), (TopK(0.05), "split"), (OneBit(), "gather"), (OneBit(), "two_pass"),
    (PowerSGD(1), "factors"), (Cast(torch.bfloat16), "two_pass"),
]  # fmt: skip


@on_ranks(2, within=60.0)
def test_a_hook_that_waits_for_a_mean_that_needs_all_gradients_is_told(rank: int) -> None:
    strategy = Tracking(clip=1.0)
    ddp, state, _ = waiting(convnet(), OneBit(), exchange="gather", fallback=None, error_feedback=strategy)
    with pytest.raises(RuntimeError) as raised:
        train(rank, ddp, range(2))  # one bucket holds them all at first
    state.close()
    text = str(raised.value)
    assert "no mean is there before the last bucket" in text


def outside(rank: int) -> list[str]:
    """The last bucket of each step comes when no backward pass runs any more, as far as the state can tell; and the
    pipeline of rank 0 ends a step late."""
    ddp, state = wrap(convnet(), OneBit(), exchange="gather")
    calls, queue, end_step = itertools.count(), AtEnd.queue, Reducer._end

    def late(reducer: Reducer, step: Step) -> None:
        time.sleep(0.05 * (1 - rank))
        end_step(reducer, step)

    def only_first(end: AtEnd) -> bool:
        if next(calls) % 2 == 0:
            return queue(end)
        end._pending = False
        return False

    with patch.object(AtEnd, "queue", only_first), patch.object(Reducer, "_end", late):
        digests = train(rank, ddp, range(4))
    state.close()
    return digests


@on_ranks(2, within=60.0)
def test_a_step_of_a_rank_that_has_joined_may_end_late(rank: int) -> list[int]:
    """No backward pass of such a rank waits for its means; the buckets that its pipeline ends are all there."""
    ddp, state = wrap(convnet(), OneBit(), exchange="gather")
    end_step, buckets = Reducer._end, list[int]()

    def late(reducer: Reducer, step: Step) -> None:
        time.sleep(0.05 * rank)
        buckets.append(len(step.reduced))
        end_step(reducer, step)

    with patch.object(Reducer, "_end", late), ddp.join():
        train(rank, ddp, range(5 - 3 * rank))
    state.close()
    assert len(buckets) == 5
    assert all(buckets)
    return buckets


@pytest.mark.parametrize("exchange", ["gather", "dense"])
@on_ranks(2)
def test_a_hook_may_wait_for_the_mean(rank: int, exchange: str) -> list[float]:
    """The norms of all means, taken where the hook is called; dense ones go straight."""
    ddp, state, norms = waiting(convnet(), OneBit(), exchange=exchange)
    train(rank, ddp, range(4))
    assert (state._dense_path is not None) == (exchange == "dense")
    state.close()
    return norms


def test_a_step_that_nobody_ends_is_ended_by_its_last_bucket(ranks: Ranks) -> None:
    first, second = ranks(2).run(outside, within=60.0)
    assert first == second


@pytest.mark.parametrize(("codec", "exchange"), WAYS, ids=str)
@on_ranks(2, within=60.0)
def test_ranks_may_use_two_models_in_another_order(rank: int, codec: Codec, exchange: str) -> list[str]:
    """Two models in one backward pass, which ranks go through in another order."""
    models = [wrap(convnet(), codec, exchange=exchange) for _ in range(2)]
    digests = []
    for step in range(4):
        for ddp, _ in models:
            ddp.zero_grad()
        losses = [ddp(batch(rank, step, ddp.module)).square().mean() for ddp, _ in models[:: 1 - 2 * rank]]
        sum(losses[1:], losses[0]).backward()
        digests += [digest([p.grad for p in ddp.parameters()]) for ddp, _ in models]
    for _, state in models:
        state.close()
    return digests


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

    def late(connection: Session, *words: Any, **more: Any) -> None:
        assert rank or gone.wait(20)
        announce(connection, *words, **more)
        said.set()

    def noted(connection: Session, *words: Any) -> None:
        raised(connection, *words)
        gone.set()

    def fail(grad: torch.Tensor) -> None:
        assert rank == 0 or said.wait(20)
        raise ValueError("in backward")

    handle = next(model.parameters()).register_hook(fail)
    assert state._reducer is not None
    with patch.object(Session, "announce", late), patch.object(Session, "raised", noted):
        with pytest.raises(ValueError, match="in backward"):
            train(rank, ddp, range(3, 4))
        handle.remove()
        ddp.reducer._reset_state()
        digests = train(rank, ddp, range(4, 6))
    state.close()
    return digests
