"""Where two features meet: what DDP, a GradScaler or an exception throws away has not been delivered."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import QSGD, Codec, OneBit, TopK
from gradwire.hooks.core.session import Session
from gradwire.hooks.ddp.model_lookup import find_owner
from gradwire.hooks.exchanges.gather import Gather
from lacking import needs_skipped_buckets
from ranks import Pool, on_ranks, without_address
from torch import Tensor, nn
from training import Ledger, digest, perceptron, wrap

Ranks = Callable[[int], Pool]


class TwoHeads(nn.Module):
    """A body and two heads, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(40, 48)
        self.left, self.right = nn.Linear(48, 30), nn.Linear(48, 30)

    def forward(self, x: Tensor, head: str) -> Tensor:
        y: Tensor = getattr(self, head)(torch.tanh(self.body(x)))
        return y


def data_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * step + rank))


# -- steps that a scaler skips -----------------------------------------------------------------------------------------


def skipped(
    rank: int, codec: Codec, options: dict[str, Any], overflow: tuple[int, str], backwards: int, enabled: bool = True
) -> Any:
    """Train with a scaler; in some steps a gradient of rank 1 overflows, in the last of the backward passes. Returns
    how far the law is off, where only steps that were made count."""
    model = perceptron(width=48)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4, enabled=enabled)
    ddp, state = wrap(model, codec, grad_scaler=scaler, **options)
    ledger, optimizer = Ledger(model), torch.optim.SGD(model.parameters(), lr=0.01)
    parameters = dict(model.named_parameters())
    every, name = overflow

    def bad(gradient: Tensor) -> Tensor:
        return gradient if not (due and rank == 1) else torch.full_like(gradient, float("inf"))

    handle, digests = parameters[name].register_hook(bad), []
    for step in range(20):
        due = False
        wanted = {name: w.clone() for name, w in ledger.wanted.items()}
        for part in range(backwards):
            data = data_of(rank, backwards * step + part)
            ledger.expect(lambda data=data: model(data).square().mean())  # type: ignore[misc]
        optimizer.zero_grad()
        for part in range(backwards):
            due = step % every == every - 1 and part == backwards - 1
            scaler.scale(ddp(data_of(rank, backwards * step + part)).square().mean()).backward()
        digests.append(digest(p.grad for p in model.parameters()))
        skips = not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        if skips:
            ledger.wanted = wanted
        else:
            ledger.receive()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < scale) == (skips and enabled)
    handle.remove()
    counted = state.statistics()
    return ledger.error(state), counted.nonfinite_steps, counted.steps, digests


def one_dimensional(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 1


@pytest.mark.parametrize(
    ("world", "codec", "options"),
    [
        (4, OneBit(), {"exchange": "hierarchical", "topology": 2}),
        (4, TopK(0.1), {"exchange": "hierarchical", "topology": 2}),
        (2, TopK(0.1), {"exchange": "union", "exclude": one_dimensional}),
        (2, TopK(0.1), {"exchange": "split", "exclude": one_dimensional}),
        (2, OneBit(), {"exchange": "two_pass", "exclude": ["*.bias"]}),
    ],
    ids=without_address,
)
@pytest.mark.parametrize("name", ["2.weight", "4.bias"])
def test_a_scaler_skips_a_step_for_one_rank_and_nothing_is_lost(
    ranks: Ranks, world: int, codec: Codec, options: dict[str, Any], name: str
) -> None:
    results = ranks(world).run(skipped, codec, options, (5, name), 1)
    for error, not_finite, steps, digests in results:
        assert error < 1e-5
        assert (not_finite, steps) == (4, 20)
        assert digests == results[0][3]


@pytest.mark.parametrize("exchange", ["gather", "two_pass"])
def test_every_backward_pass_since_the_last_update_is_undone(ranks: Ranks, exchange: str) -> None:
    for error, not_finite, steps, _ in ranks(2).run(skipped, OneBit(), {"exchange": exchange}, (4, "2.weight"), 2):
        assert error < 1e-5
        assert (not_finite, steps) == (5, 40)


def test_a_scaler_that_is_disabled_skips_nothing(ranks: Ranks) -> None:
    for error, not_finite, _, _ in ranks(2).run(skipped, OneBit(), {}, (100, "2.weight"), 1, False):
        assert error < 1e-5
        assert not_finite == 0


# -- means that DDP throws away ----------------------------------------------------------------------------------------


def heads_by_turns(rank: int, codec: Codec, options: dict[str, Any], way: dict[str, Any], accumulate: bool) -> Any:
    """Two heads by turns, so that one is used by no rank. With `accumulate` gradients add up over two passes."""
    model = TwoHeads()
    ddp, state = wrap(model, codec, ddp={"find_unused_parameters": True, "bucket_cap_mb": 0.004, **way}, **options)
    ledger = Ledger(model)
    for step in range(20):
        head = "left" if step % 2 else "right"
        data = data_of(rank, step)
        ledger.expect(lambda data=data, head=head: model(data, head).square().mean())  # type: ignore[misc]
        if not accumulate or step % 2 == 0:
            model.zero_grad()
        ddp(data, head).square().mean().backward()
        if not accumulate or step % 2:
            ledger.receive()
    return ledger.error(state), digest(p.grad for p in model.parameters())


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        (OneBit(), {"exchange": "gather"}),
        (OneBit(), {"exchange": "two_pass"}),
        (TopK(0.1), {"exchange": "split"}),
        (TopK(0.1), {"exchange": "union", "exclude": one_dimensional}),
    ],
    ids=without_address,
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_parameters_that_no_rank_uses_keep_what_was_left_out(
    ranks: Ranks, codec: Codec, options: dict[str, Any], accumulate: bool
) -> None:
    way = {"gradient_as_bucket_view": accumulate}
    results = ranks(2).run(heads_by_turns, codec, options, way, accumulate)
    for error, digests in results:
        assert error < 1e-5
        assert digests == results[0][1]


def raised(rank: int, codec: Codec, options: dict[str, Any]) -> Any:
    """Backward raises in the middle of some steps, on every rank; the gradients of those that came before are kept."""
    model = perceptron(width=48)
    ddp, state = wrap(model, codec, ddp={"bucket_cap_mb": 0.005}, **options)  # a layer each
    ledger = Ledger(model)
    due = False

    def fail(gradient: Tensor) -> None:
        if due:
            raise ValueError("no more of this")

    handle = dict(model.named_parameters())["2.weight"].register_hook(fail)
    kept = ("4.weight", "4.bias")  # whose gradients come first
    for step in range(20):
        due = step % 4 == 3
        data = data_of(rank, step)
        before = {name: w.clone() for name, w in ledger.wanted.items()}
        handle.remove()
        ledger.expect(lambda data=data: model(data).square().mean())  # type: ignore[misc]
        handle = dict(model.named_parameters())["2.weight"].register_hook(fail)
        model.zero_grad()
        try:
            ddp(data).square().mean().backward()
        except ValueError:
            ledger.wanted = {n: w if n in kept else before[n] for n, w in ledger.wanted.items()}
            ddp.reducer._reset_state()
            continue
        ledger.receive()
    return ledger.error(state), state.step


@pytest.mark.parametrize("exchange", ["gather", "two_pass"])
def test_what_a_backward_that_raised_had_sent_is_kept(ranks: Ranks, exchange: str) -> None:
    for error, steps in ranks(2).run(raised, OneBit(), {"exchange": exchange}):
        assert error < 1e-5
        assert steps == 20


def skips_buckets(rank: int, codec: Codec) -> Any:
    """DDP leaves out buckets that nobody uses: the first of them, or the last."""
    results = []
    for head in ("left", "right"):
        model = TwoHeads()
        if head == "right":  # the last bucket is unused
            model.left, model.body = nn.Linear(40, 30), nn.Linear(40, 48)
        way = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.001}
        ddp, state = wrap(model, codec, ddp=way)
        data = data_of(rank, 0)
        digests = []
        for _ in range(5):
            model.zero_grad()
            ddp(data, head).square().mean().backward()
            digests.append(digest(p.grad for p in model.parameters()))
        results.append((digests, state.step, state.statistics().steps))
    return results


@needs_skipped_buckets
def test_buckets_that_ddp_leaves_out(ranks: Ranks) -> None:
    first, second = ranks(2).run(skips_buckets, QSGD())
    assert first == second
    for digests, step, steps in first:
        assert (step, steps) == (5, 5)
        assert len(set(digests)) == 5  # the same data, other noise


# -- what was delivered is let go --------------------------------------------------------------------------------------


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


def compared_late(rank: int) -> list[str]:
    """What rank 0 does first, in a step whose comparison rank 1 sends late: a scaler is followed all the same."""
    seen: list[str] = []
    announce, compare, reduce = Session.announce, Session.compare, Gather.reduce

    def late(self: Session, *arguments: Any) -> None:
        time.sleep(0.2 * rank)
        announce(self, *arguments)

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
    return seen


def test_no_bucket_waits_for_the_comparison_where_a_scaler_is_followed(ranks: Ranks) -> None:
    """It would cost a latency in each step."""
    first, _ = ranks(2).run(compared_late)
    assert first[0] == "begun"
    assert "compared" in first


def test_looking_for_a_model_asks_no_object_for_its_class() -> None:
    class Gone: ...

    gone = Gone()
    dead = weakref.proxy(gone)
    del gone
    assert find_owner(object(), torch.zeros(1)) is None
    with pytest.raises(ReferenceError):
        dead.anything()
