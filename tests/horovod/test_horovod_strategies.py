"""Feedback strategies under Horovod's interface: as under DDP, and through what Horovod has besides."""

from __future__ import annotations

from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import (
    QSGD,
    Codec,
    CompressState,
    Lead,
    Magnitudes,
    Momentum,
    OneBit,
    Residual,
    TopK,
    Tracking,
    compress_hook,
)
from gradwire.compress.feedback.base import Feedback
from test_horovod_operations import horovod_ranks, raised
from test_horovod_optimizer import close, identical, loss_of, model_of, train, weights
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STRATEGIES: dict[str, tuple[Codec, Feedback, str]] = {
    "momentum": (TopK(0.1), Momentum(), "gather"),
    "nesterov by split": (TopK(0.1), Momentum(nesterov=True), "split"),
    "momentum without masks": (TopK(0.1), Momentum(masking=False), "gather"),
    "momentum, clipped": (TopK(0.1), Momentum(clip=0.05), "gather"),
    "tracking": (TopK(0.1), Tracking(), "gather"),
    "tracking, densely": (TopK(0.1), Tracking(), "dense"),
    "narrow": (TopK(0.1), Residual(dtype=torch.bfloat16), "gather"),
    "decaying": (TopK(0.1), Residual(decay=0.9), "union"),
    "lead": (TopK(0.1), Lead(), "gather"),
    "magnitudes, densely": (QSGD(), Magnitudes(), "dense"),
}
EVERY = pytest.mark.parametrize("name", [*STRATEGIES])
STRATEGIES["tracking of slices"] = OneBit(), Tracking(), "two_pass"  # whose blocks are others in DDP's order
KEEPING = pytest.mark.parametrize("name", ["momentum", "tracking"])


def sgd(model: nn.Module, feedback: Feedback) -> torch.optim.Optimizer:
    momentum = feedback.momentum if isinstance(feedback, Lead) else 0.0
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def optimizer_of(model: nn.Module, name: str, **options: Any) -> Any:
    codec, feedback, exchange = STRATEGIES[name]
    compression = hvd.Compression.codec(codec, error_feedback=feedback, exchange=exchange)
    optimizer = sgd(model, feedback)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, **options)


def balance(optimizer: Any) -> float:
    """What is lost of the momentum: H + mean e - mean m of `Tracking`, over all ranks."""
    kept = optimizer._reducer.state.feedback.everything()
    rows = {
        vector: hvd.allgather(torch.cat([kept[vector][name].reshape(-1) for name in sorted(kept[vector])]).unsqueeze(0))
        for vector in ("residual", "momentum", "estimate")
    }
    assert all(torch.equal(row, rows["estimate"][0]) for row in rows["estimate"])
    return float((rows["estimate"][0] + rows["residual"].mean(0) - rows["momentum"].mean(0)).abs().max())


class Half(nn.Sequential):
    """A model whose gradients are bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16()).float()


@EVERY
@horovod_ranks(2)
def test_a_strategy_does_what_it_does_under_ddp(rank: int, name: str) -> None:
    mine = model_of()
    train(mine, optimizer_of(mine, name), rank, range(6))
    codec, feedback, exchange = STRATEGIES[name]
    theirs = DistributedDataParallel(model_of())
    state = CompressState(theirs, codec, error_feedback=feedback, exchange=exchange)
    theirs.register_comm_hook(state, compress_hook)
    train(theirs, sgd(theirs, feedback), rank, range(6))
    close(weights(mine), weights(theirs))
    identical(mine)
    state.close()


@horovod_ranks(2)
def test_means_of_16_bits_are_added_up_in_32(rank: int) -> None:
    model = Half(*model_of()).bfloat16()
    optimizer = optimizer_of(model, "tracking")
    train(model, optimizer, rank, range(6))
    assert balance(optimizer) < 1e-6
    identical(model)


@KEEPING
@horovod_ranks(2)
def test_what_another_rank_has_kept_is_refused(rank: int, name: str) -> None:
    """It would leave the ranks with estimates that differ."""
    model = model_of()
    optimizer = optimizer_of(model, name)
    train(model, optimizer, rank, range(3))
    theirs = hvd.broadcast_object(optimizer.state_dict(), root_rank=1)
    if rank != 1:
        assert "consolidated" in raised(ValueError, lambda: optimizer.load_state_dict(theirs))
    # So would those of rank 0 alone, handed to all.
    fresh = optimizer_of(model_of(), name)
    if rank == 0:
        fresh.load_state_dict(optimizer.state_dict())
    assert "consolidated" in raised(ValueError, lambda: hvd.broadcast_optimizer_state(fresh, root_rank=0))


@horovod_ranks(3)
def test_one_checkpoint_serves_all_ranks(rank: int) -> None:
    model = model_of()
    optimizer = optimizer_of(model, "tracking")
    train(model, optimizer, rank, range(3))
    saved = optimizer.consolidated_state_dict()
    again = model_of(seed=rank)
    other = optimizer_of(again, "tracking")
    if rank == 0:
        again.load_state_dict(model.state_dict())
        other.load_state_dict(saved)
    hvd.broadcast_parameters(again.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(other, root_rank=0)
    assert balance(other) < 1e-6
    train(again, other, rank, range(3, 6))
    assert balance(other) < 1e-6
    identical(again)


@pytest.mark.parametrize("name", ["tracking", "tracking of slices"])
@horovod_ranks(3)
def test_nothing_is_lost_while_ranks_have_joined(rank: int, name: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model, name)
    train(model, optimizer, rank, range(2 + rank))
    hvd.join()
    assert balance(optimizer) < 1e-6
    hvd.broadcast_parameters(model.state_dict(), root_rank=2)
    train(model, optimizer, rank, range(2))
    assert balance(optimizer) < 1e-6
    identical(model)


@KEEPING
@horovod_ranks(2)
def test_a_skipped_step_leaves_everything_as_it_was(rank: int, name: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model, name)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer.use_grad_scaler(scaler)
    before: dict[str, Any] = {}
    for step in range(4):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        # In the third step the gradients of one rank overflow.
        (scaler.scale(loss_of(model, rank, step)) * (float("inf") if step == 2 and rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = optimizer._reducer.state.feedback.everything()
        if step == 2:
            assert scaler.get_scale() == scale / 2
            assert all(torch.equal(x, before[v][n]) for v, found in after.items() for n, x in found.items())
        before = after
    identical(model)


@horovod_ranks(3)
def test_a_strategy_in_a_process_set(rank: int) -> None:
    members = hvd.add_process_set([0, 2])
    model = model_of()
    optimizer = optimizer_of(model, "momentum", process_set=members)
    train(model, optimizer, rank, range(3))
    if members.included():
        rows = hvd.allgather(weights(model).unsqueeze(0), process_set=members)
        assert torch.equal(rows[0], rows[1])
    assert hvd.remove_process_set(members)


@horovod_ranks(1)
def test_what_cannot_work_is_refused(rank: int) -> None:
    model = model_of()
    moving = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compression = hvd.Compression.codec(TopK(0.1), error_feedback=Momentum())
    text = raised(ValueError, lambda: hvd.DistributedOptimizer(moving, model.named_parameters(), compression))
    assert "momentum=0.9" in text
    still, lead = sgd(model, Momentum()), hvd.Compression.codec(TopK(0.1), error_feedback=Lead())
    text = raised(ValueError, lambda: hvd.DistributedOptimizer(still, model.named_parameters(), lead))
    assert "SGD has the momentum 0.0, and Lead" in text
    plain = hvd.Compression.codec(TopK(0.1), error_feedback=Residual())
    assert plain.goes_on_from(repr(hvd.Compression.codec(TopK(0.1), error_feedback=True)))
    assert not lead.goes_on_from(repr(hvd.Compression.codec(TopK(0.1), error_feedback=True)))
    clipping = hvd.Compression.codec(TopK(0.1), error_feedback=Momentum(clip=1.0))
    text = raised(ValueError, lambda: hvd.allreduce(torch.ones(99), name="x", compression=clipping))
    assert "clip" in text
