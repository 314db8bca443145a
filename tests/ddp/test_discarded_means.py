"""What has been delivered is let go, and no bucket waits to hear that a step was not thrown away.

What DDP, a GradScaler or an exception throws away is in the scripts of `tests/core/test_drawn.py`.
"""

from __future__ import annotations

import time
import weakref
from contextlib import nullcontext
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import CompressState, OneBit, TopK
from gradwire.hooks.core.session import Session
from gradwire.hooks.ddp.model import find_owner
from gradwire.hooks.exchanges.gather import Gather
from ranks import on_ranks
from training import Ledger, data_of, perceptron, wrap


@pytest.mark.parametrize("exchange", ["gather", "two_pass", "dense"])
@on_ranks(2)
def test_after_a_bucket_that_is_refused_the_next_step_works_and_nothing_is_lost(rank: int, exchange: str) -> None:
    """In some steps the hook raises for a drawn bucket, on every rank, as where a CUDA graph is captured: nothing of
    the steps is lost, nor of the gradients of buckets that came before."""
    model, draw, sent, place = perceptron(width=48), Random(1), set[str](), 3
    ddp, state = wrap(model, OneBit(), ddp={"bucket_cap_mb": 0.005}, exchange=exchange)  # a layer each
    ledger, names = Ledger(model), {id(p): name for name, p in model.named_parameters()}
    submit = CompressState.submit

    def submitted(state: CompressState, bucket: dist.GradBucket) -> Any:
        if bucket.index() == place:
            raise RuntimeError("not in this bucket")
        sent.update(names[id(p)] for p in bucket.parameters())
        return submit(state, bucket)

    for step in range(15):
        data, before = data_of(rank, step), {name: w.clone() for name, w in ledger.wanted.items()}
        ledger.expect(lambda data=data: model(data).square().mean())  # type: ignore[misc]
        model.zero_grad()
        sent.clear()
        place = draw.randrange(3) if step > 1 and step % 3 else 3
        raising: Any = nullcontext() if place == 3 else pytest.raises(RuntimeError, match="not in this bucket")
        with patch.object(CompressState, "submit", submitted), raising:
            ddp(data).square().mean().backward()
        if place == 3:
            ledger.receive()
        else:
            kept = set() if exchange == "dense" else sent  # of what goes straight nothing is kept
            ledger.wanted = {name: w if name in kept else before[name] for name, w in ledger.wanted.items()}
    assert ledger.error(state) < 1e-5


@on_ranks(2)
def test_residuals_that_were_delivered_take_no_more_memory(rank: int) -> None:
    from gradwire import Identity

    ddp, state = wrap(perceptron(), lambda step: TopK(0.05) if step < 3 else Identity())
    held = []
    for step in range(7):
        data = data_of(rank, step)
        ddp(data).square().mean().backward()
        held.append(bool(state._feedback))
    dist.barrier()
    assert held == [True] * 4 + [False] * 3  # of the step that delivered it the fate has to be known first


@on_ranks(2)
def test_no_bucket_waits_for_the_comparison_where_a_scaler_is_followed(rank: int) -> None:
    """It would cost a latency in each step. Rank 1 sends what is compared late: what rank 0 does first."""
    seen: list[str] = []
    announce, compare, reduce = Session.announce, Session.compare, Gather.reduce

    def late(self: Session, *arguments: Any, **more: Any) -> None:
        time.sleep(0.2 * rank)
        announce(self, *arguments, **more)

    def noted(self: Session, *arguments: Any) -> None:
        compare(self, *arguments)
        seen.append("compared")

    def begun(self: Gather, *arguments: Any) -> Any:
        seen.append("begun")
        yield from reduce(self, *arguments)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    ddp, state = wrap(perceptron(), OneBit(), exchange="gather", grad_scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with (
        patch.object(Session, "announce", late),
        patch.object(Session, "compare", noted),
        patch.object(Gather, "reduce", begun),
    ):
        for step in range(4):
            seen.clear()
            optimizer.zero_grad()
            scaler.scale(ddp(data_of(rank, step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    state.close()
    assert "compared" in seen
    assert seen[0] == "begun" or rank == 1


def test_looking_for_a_model_asks_no_object_for_its_class() -> None:
    class Gone: ...

    gone = Gone()
    dead = weakref.proxy(gone)
    del gone
    assert find_owner(object(), torch.zeros(1)) is None
    with pytest.raises(ReferenceError):
        dead.anything()
