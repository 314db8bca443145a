"""Embeddings with sparse gradients, among gradients that are compressed: their mean is exact, whatever happens."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from gradwire import CompressState, Identity, OneBit, compress_hook
from gradwire.hooks.comm.group import Group
from gradwire.hooks.core.sparse_gradient import SparseGradient
from gradwire.hooks.sparse.validation import ALGORITHMS
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def by_sparse_adam(rank: int, algorithm: str | None, exclude: bool, inline: bool) -> tuple[list[list[int]], Tensor]:
    """The rows of each step's gradient, and where they have moved to; None: DDP without a hook."""
    torch.manual_seed(2)
    table = nn.Embedding(9, 3, sparse=True)
    ddp: Any = DistributedDataParallel(nn.Sequential(table, nn.Linear(3, 2)))
    if algorithm is not None:
        with patch.object(Group, "blocks", staticmethod(lambda *_: not inline)):
            state = CompressState(ddp, OneBit(), exchange="gather", exclude=["0.weight"] if exclude else None)
        ddp.register_comm_hook(state, compress_hook)
    optimizer, found = torch.optim.SparseAdam([table.weight], lr=0.1), []
    grads = list[tuple[Tensor, Tensor]]()
    with patch.object(SparseGradient, "_choose", lambda *_: algorithm):
        for step in range(3):
            optimizer.zero_grad()
            used = torch.tensor([step, 6 + rank % 2, 8])
            sign = torch.tensor([1.0, -2.0, 1.0 - 2 * (rank % 2)])  # on two ranks the last one's cancel out
            (ddp(used).sum(1) * sign).sum().backward()
            assert table.weight.grad is not None
            found.append(table.weight.grad.coalesce().indices()[0].tolist())
            grads.append((table.weight.grad, table.weight.grad.to_dense()))
            optimizer.step()
    assert all(torch.equal(grad.to_dense(), then) for grad, then in grads), "the next step has written to it"
    return found, table.weight.detach()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("inline", [False, True])
def test_rows_are_those_that_some_rank_has_used(ranks: Ranks, algorithm: str, inline: bool) -> None:
    [(rows, weights), *_] = ranks(2).run(by_sparse_adam, None, False, False)
    assert rows == [[step, 6, 7, 8] for step in range(3)]
    for found, moved in ranks(2).run(by_sparse_adam, algorithm, inline, inline):
        assert found == rows
        assert torch.allclose(moved, weights, atol=1e-6)


@on_ranks(2)
def test_ranks_compare_which_gradients_are_sparse(rank: int) -> list[str]:
    """A table that is sparse on one rank only."""
    ddp = DistributedDataParallel(nn.Embedding(10, 4, sparse=rank == 0))
    with pytest.raises(ValueError, match="sparse") as caught:
        CompressState(ddp, OneBit())
    return [str(caught.value)]


def bytes_of(rank: int, used: int) -> tuple[int, int]:
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.EmbeddingBag(10_000, 16, sparse=True))
    state = CompressState(ddp, Identity(), exchange="gather")
    ddp.register_comm_hook(state, compress_hook)
    ddp(torch.randint(10_000, (4, used))).sum().backward()
    done = state.statistics()
    state.close()
    return done.bytes_received, done.dense_bytes


def test_few_rows_are_few_bytes(ranks: Ranks) -> None:
    for received, whole in ranks(2).run(bytes_of, 10):
        assert received < whole / 50
    for received, _ in ranks(2).run(bytes_of, 10_000):  # more than half of the rows on each rank: as one vector
        assert received < 1.01 * 4 * 10_000 * 16


@on_ranks(2)
def test_rows_are_finite_if_what_is_handed_out_is(rank: int) -> None:
    """A mean that float32 holds, and the float16 of the table does not."""
    model = nn.Embedding(10, 4, sparse=True, dtype=torch.float16)
    ddp = DistributedDataParallel(model)
    state = CompressState(ddp, Identity(), exchange="gather")
    ddp.register_comm_hook(state, compress_hook)
    ddp(torch.tensor([1] * 4)).mul(60_000.0).sum().backward()
    assert model.weight.grad is not None
    finite, steps = bool(model.weight.grad.to_dense().isfinite().all()), state.statistics().nonfinite_steps
    state.close()
    assert (finite, steps) == (False, 1)


@on_ranks(2)
def test_a_residual_that_nothing_would_send_is_refused(rank: int) -> None:
    """A checkpoint from before the table's gradients were sparse: what they are still owed cannot go with any step."""

    def made(sparse: bool) -> CompressState:
        torch.manual_seed(1)
        ddp = DistributedDataParallel(nn.Embedding(10, 4, sparse=sparse))
        state = CompressState(ddp, OneBit(), exchange="gather", fallback=None)
        ddp.register_comm_hook(state, compress_hook)
        ddp(torch.arange(5)).square().sum().backward()
        return state

    saved = made(sparse=False).state_dict()
    state = made(sparse=True)
    with pytest.raises(ValueError, match="sparse now") as caught:
        state.load_state_dict(saved)
    with pytest.warns(UserWarning, match="sparse now"):
        state.load_state_dict(saved, strict=False)
    [kept] = state.state_dict()["residuals"].values()
    assert "'weight'" in str(caught.value)
    assert not kept
