"""Dense steps: nothing but all-reduces, once every rank can tell that nothing is held back."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gradwire import Codec, Identity, OneBit, TopK
from gradwire.hooks.core import reducer
from gradwire.hooks.core.dense_path import DensePath
from ranks import Pool, Ranks, on_ranks, without_address
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import Ledger, batch, convnet, digest, perceptron, residuals_of, train, wrap


class Counted:
    """How many buckets went straight, by step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._now = 0

    def __enter__(self) -> Counted:
        reduce = DensePath.reduce

        def counting(straight: DensePath, buffer: torch.Tensor) -> Any:
            self._now += 1
            return reduce(straight, buffer)

        self._patch = patch.object(DensePath, "reduce", counting)
        self._patch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._patch.stop()

    def train(self, rank: int, ddp: Any, steps: range, ledger: Ledger | None = None) -> list[str]:
        digests = []
        for step in steps:
            self._now = 0
            digests += train(rank, ddp, range(step, step + 1), ledger)
            self.steps.append(self._now)
        return digests


def beside_ddp(rank: int, options: dict[str, Any], way: dict[str, Any]) -> Any:
    """Digests of every step's gradients, with the hook and without, and how many buckets went straight in each."""
    plain = DistributedDataParallel(convnet(), bucket_cap_mb=0.02, **way)
    expected = train(rank, plain, range(6))
    ddp, state = wrap(convnet(), OneBit(), exchange="dense", ddp=way, **options)
    with Counted() as straight:
        digests = straight.train(rank, ddp, range(6))
    counted = state.statistics()
    state.close()
    return digests == expected, straight.steps, counted.dense_bytes == counted.bytes_sent


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, {}),
        ({}, {"find_unused_parameters": True}),
        ({}, {"static_graph": True}),
        ({}, {"gradient_as_bucket_view": True}),
        ({"exclude": ["*.bias"]}, {}),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, {}),
    ],
    ids=without_address,
)
def test_dense_steps_go_straight_and_equal_ddp(ranks: Ranks, options: dict[str, Any], way: dict[str, Any]) -> None:
    """Which may use the same group meanwhile."""
    for equal, (first, *straight), dense in ranks(2).run(beside_ddp, options, way):
        assert equal
        assert dense
        assert first == 0  # ranks compare it
        if "grad_scaler" in options:  # which may undo a step
            assert set(straight) == {0}
        else:
            assert straight[-1] >= 3
            assert way or len(set(straight)) == 1


class InTwoPasses(nn.Module):
    """Some of its layers get their gradients in a backward pass inside the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(nn.Sequential(*self.layers[:2]), x.requires_grad_(), use_reentrant=True)
        return nn.Sequential(*self.layers[2:])(x)


@on_ranks(2)
def test_the_last_bucket_may_come_in_a_pass_inside_another(rank: int) -> None:
    plain = DistributedDataParallel(InTwoPasses(), bucket_cap_mb=0.02)
    expected = [digest(p.grad for p in after(plain, rank, step)) for step in range(5)]
    ddp, state = wrap(InTwoPasses(), OneBit(), exchange="dense")
    with Counted() as straight:
        digests = [digest(p.grad for p in after(ddp, rank, step)) for step in range(5)]
    counted = state.statistics()
    state.close()
    assert digests == expected
    assert straight._now >= 8
    assert counted.steps == 5
    assert counted.elements == 5 * 4 * (64 * 64 + 64)


def after(ddp: Any, rank: int, step: int) -> list[nn.Parameter]:
    """A model's parameters, with gradients."""
    ddp.zero_grad()
    ddp(torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
    return list(ddp.parameters())


class Late:
    """Makes sums begin late, in their order, as on a slow network."""

    def __init__(self, start: Callable[[list[torch.Tensor]], Any]) -> None:
        self._pool, self._real = ThreadPoolExecutor(1), start

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        def begin() -> None:
            time.sleep(0.1)
            self._real(tensors).wait()

        future = self._pool.submit(begin)
        return SimpleNamespace(wait=lambda timeout=None: future.result())


@pytest.mark.parametrize("call", ["close", "load"])
@on_ranks(2, within=60.0)
def test_a_call_while_sums_are_under_way_is_refused(rank: int, call: str) -> None:
    """Gradients, where a hook of backward makes a call between two buckets, of which the first is long."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((16, 16), (16, 1024), (1024, 4096))))
    ddp, state = wrap(model, Identity(), exchange="dense")
    saved: dict[str, Any] = {}
    calls = {"close": state.close, "load": lambda: state.load_state_dict(saved)}
    off = []

    def refused(grad: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="call it between steps"):
            calls[call]()

    for step in range(4):
        saved.update(state.state_dict())
        loss = ddp(torch.full((4, 16), 1.0 + rank + step)).square().mean()
        wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        handle = next(model.parameters()).register_hook(refused)
        ddp.zero_grad()
        loss.backward()
        handle.remove()
        for p, grad in zip(model.parameters(), wanted, strict=True):
            dist.all_reduce(grad)
            assert p.grad is not None
            off.append(float((p.grad - grad / 2).norm() / grad.norm()))
    state.close()
    assert max(off) < 1e-5


@on_ranks(2)
def test_a_pass_that_raises_leaves_no_sum_under_way(rank: int) -> None:
    """Buckets of a step that goes straight, when a backward pass raises and the gradients are written to."""
    ddp, state = wrap(convnet(), OneBit(), exchange="dense", ddp={"gradient_as_bucket_view": True})
    train(rank, ddp, range(3))
    first, straight = next(ddp.module.parameters()), state._dense_path
    assert straight is not None

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    handle = first.register_hook(fail)
    with patch.object(straight, "_start", Late(straight._start)), Counted() as counted:
        with pytest.raises(ValueError, match="in backward"):
            counted.train(rank, ddp, range(3, 4))
        handle.remove()
        ddp.reducer._reset_state()
        grads = [p.grad for p in ddp.parameters() if p.grad is not None]
        for grad in grads:
            grad.fill_(1.0)
        time.sleep(1.0)
        kept = all(bool((grad == 1.0).all()) for grad in grads)
        ddp.zero_grad(set_to_none=False)
    errors = Ledger(ddp.module)
    train(rank, ddp, range(4, 6), errors)
    state.close()
    assert counted._now > 0
    assert kept
    assert errors.error(state) < 1e-5


def raised_elsewhere(rank: int, other: int | None) -> tuple[str, float]:
    """A backward pass raises after other sums on rank 1 than on rank 0, where it may not raise at all."""
    model = perceptron()
    ddp, _ = wrap(model, OneBit(), exchange="dense", ddp={"bucket_cap_mb": 0.005})
    train(rank, ddp, range(4))

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    parameters, start = list(model.parameters()), time.monotonic()
    short = patch("gradwire.hooks.core.dense_path.RAISED_TIMEOUT", timedelta(seconds=0.2))
    with short, patch.object(reducer, "HANDSHAKE_TIMEOUT", timedelta(seconds=1)):
        place = 0 if rank else other
        if place is not None:
            handle = parameters[place].register_hook(fail)
            with pytest.raises(ValueError, match="in backward"):
                train(rank, ddp, range(4, 5))
            handle.remove()
            ddp.reducer._reset_state()
        with pytest.raises(RuntimeError) as raised:
            train(rank, ddp, range(5, 6))
    return str(raised.value), time.monotonic() - start


@pytest.mark.parametrize("other", [2, None])
def test_ranks_that_have_not_raised_alike_hear_of_it(other: int | None) -> None:
    with Pool(2, timedelta(seconds=20)) as pool:
        results = pool.run(raised_elsewhere, other, within=40)
    for text, seconds in results:
        assert seconds < 15
        if other is None:
            assert "check that rank's log" in text
        else:
            assert "ranks disagree on failed backward passes: rank 0 has step 4 after ['bucket 0']" in text


@on_ranks(2)
def test_a_rank_may_come_late_to_the_step_in_which_ranks_look(rank: int) -> str:
    """Rank 1 comes late, for its own reasons, to the step in which ranks look whether all is well, and to the first one
    after warm-up."""
    ddp, state = wrap(perceptron(), OneBit(), exchange="gather", warmup_steps=6)
    with (
        patch.object(reducer, "DENSE_CHECK_INTERVAL", 4),
        patch.object(reducer, "HANDSHAKE_TIMEOUT", timedelta(seconds=0.2)),
    ):
        for step in range(8):
            if rank and step in (4, 6):
                time.sleep(0.6)
            train(rank, ddp, range(step, step + 1))
    state.close()
    return digest(ddp.module.parameters())


@on_ranks(3)
def test_nothing_is_lost_where_dense_steps_follow_compressed_ones(rank: int) -> list[str]:
    """Compressed, dense, compressed, dense: all that was held back arrives."""

    def schedule(step: int) -> Codec:
        return [TopK(0.05), Identity()][step // 4 % 2]

    model = convnet()
    ledger = Ledger(model)
    ddp, state = wrap(model, schedule)
    digests = list[str]()
    with Counted() as straight:
        for first in range(0, 16, 4):
            digests += straight.train(rank, ddp, range(first, first + 4), ledger)
            assert ledger.error(state) < 1e-5
    left = [float(t.abs().max()) for t in residuals_of(state.state_dict()).values()]
    state.close()
    assert set(straight.steps) == {0}, "what a function chooses, ranks compare in every step"
    assert max(left) == 0.0
    return digests


def broken_gradient(rank: int) -> Any:
    """Rank 1 has a NaN in the first step that is dense, and what it held back there must wait for the next."""
    model = perceptron()
    ddp, state = wrap(model, lambda step: TopK(0.05) if step < 3 else Identity())
    train(rank, ddp, range(3))
    model.zero_grad()
    loss = ddp(batch(rank, 3, model)).square().mean()
    (loss * (float("nan") if rank == 1 else 1.0)).backward()
    stayed = sum(float(t.abs().sum()) for t in residuals_of(state.state_dict()).values())
    steps = state.statistics().nonfinite_steps
    train(rank, ddp, range(4, 7))
    left = sum(float(t.abs().sum()) for t in residuals_of(state.state_dict()).values())
    finite = digest(p.grad for p in model.parameters())
    state.close()
    return stayed, steps, left, finite


def test_what_stayed_beside_a_nan_goes_with_the_next_step(ranks: Ranks) -> None:
    (sent, *first), (stayed, *second) = ranks(2).run(broken_gradient)
    assert sent == 0.0
    assert stayed > 0.0
    assert first == second
    steps, left, _ = first
    assert steps == 1
    assert left == 0.0


def in_other_hands(rank: int) -> Any:
    """While steps go straight, a checkpoint is loaded whose residuals only rank 1 has."""
    ddp, state = wrap(perceptron(), OneBit(), exchange="gather")
    train(rank, ddp, range(3))
    saved = state.state_dict()
    state.close()
    ddp, state = wrap(perceptron(), OneBit(), exchange="dense")
    with Counted() as straight:
        digests = straight.train(rank, ddp, range(3))
        state.load_state_dict({**saved, "residuals": saved["residuals"] if rank else {"rank 0 of 2": {}}})
        before = sum(float(t.abs().sum()) for t in residuals_of(state.state_dict()).values())
        digests += straight.train(rank, ddp, range(3, 6))
    left = sum(float(t.abs().sum()) for t in residuals_of(state.state_dict()).values())
    state.close()
    return before, digests, straight.steps, left


def test_residuals_that_are_loaded_by_one_rank_go_with_the_next_step(ranks: Ranks) -> None:
    (none, *first), (loaded, *second) = ranks(2).run(in_other_hands)
    assert none == 0.0 < loaded
    assert first == second
    _, (_, *straight), left = first
    assert [count > 0 for count in straight] == [True, True, False, True, True]
    assert left == 0.0


def from_time_to_time(rank: int) -> Any:
    """Rank 1's gradient breaks while steps go straight; and ranks part while they do."""
    ddp, state = wrap(perceptron(), OneBit(), exchange="dense")
    model = ddp.module
    with patch.object(reducer, "DENSE_CHECK_INTERVAL", 4), Counted() as straight:
        straight.train(rank, ddp, range(3))
        for step in range(3, 9):
            loss = ddp(batch(rank, step, model)).square().mean()
            (loss * (float("nan") if rank == 1 else 1.0)).backward()
        seen = state.statistics().nonfinite_steps
        steps = state.step
        with patch.object(reducer, "HANDSHAKE_TIMEOUT", timedelta(seconds=2)):
            try:
                state._step += 1 + rank  # rank 1 looks after one step, rank 0 after two
                straight.train(rank, ddp, range(9, 12))
            except RuntimeError as error:
                return straight.steps[:3], seen, steps, str(error)
    return None


def test_now_and_then_ranks_look_whether_all_is_well() -> None:
    with Pool(2, timedelta(seconds=8)) as pool:
        results = pool.run(from_time_to_time, within=60)
    for straight, seen, steps, _ in results:
        assert straight[0] == 0 < min(straight[1:])
        assert seen == 2, "steps 4 and 8"
        assert steps == 9
    assert "rank 0 is not responding" in results[1][3]
