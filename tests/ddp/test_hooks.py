"""The hook in DDP, beside what the scripts of `tests/core/test_drawn.py` have: nothing lost, and replicas equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import (
    QSGD,
    Codec,
    CompressState,
    OneBit,
    TernGrad,
    TopK,
)
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from training import batch, convnet, digest, perceptron, residuals_of, train, wrap


@on_ranks(2)
def test_a_group_of_the_users(rank: int) -> Any:
    group = dist.new_group([0, 1])
    ddp, state = wrap(perceptron(), OneBit(), process_group=group)
    digests = train(rank, ddp, range(3))
    other = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="process_group has the ranks"):
        CompressState(ddp, OneBit(), process_group=other)
    state.close()
    return digests


class Normalised(nn.Module):
    """SyncBatchNorm without a GPU: the same collectives, on the model's own group, in forward and backward."""

    class Sync(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            mean = x.mean(0)
            dist.all_reduce(mean)
            return x - mean / dist.get_world_size()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            mean = grad.mean(0)
            dist.all_reduce(mean)
            return grad - mean / dist.get_world_size()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.Sync.apply(layer(x)).tanh()
        return x


@pytest.mark.parametrize("exchange", ["auto", "dense"])
@on_ranks(3)
def test_collectives_of_the_model_beside_the_hook(rank: int, exchange: str) -> list[str]:
    torch.manual_seed(3)
    ddp, _ = wrap(Normalised(), OneBit(), ddp={"bucket_cap_mb": 0.005}, exchange=exchange)
    digests = train(rank, ddp, range(10))
    assert len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) >= 4
    return digests


@on_ranks(2)
def test_a_model_in_float16_has_residuals_in_float32(rank: int) -> list[str]:
    model = perceptron().half()
    ddp, state = wrap(model, OneBit())
    digests = []
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step, model).half()).float().square().mean().backward()
        digests.append(digest(p.grad for p in model.parameters()))
    assert {x.dtype for x in residuals_of(state.state_dict()).values()} == {torch.float32}
    return digests


def stochastic_replay(rank: int, seed: int) -> list[str]:
    ddp, _ = wrap(perceptron(), QSGD(), seed=seed)
    return train(rank, ddp, range(4))


def test_draws_replay_and_follow_the_seed(ranks: Ranks) -> None:
    first, again, other = (ranks(2).run(stochastic_replay, seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0] == first[1]
    assert first != other


@pytest.mark.parametrize("codec", [OneBit(), QSGD(), TernGrad(), TopK()], ids=str)
@on_ranks(2)
def test_statistics_match_what_the_codec_promises(rank: int, codec: Codec) -> None:
    ddp, state = wrap(convnet(1024), codec, ddp={"bucket_cap_mb": 25}, exchange="gather")  # others send more
    train(rank, ddp, range(3))
    statistics = state.statistics()
    numel = sum(p.numel() for p in convnet(1024).parameters())
    assert statistics.elements == 3 * numel
    assert statistics.dense_bytes == 12 * numel
    assert statistics.bytes_sent == pytest.approx(3 * codec.bits_per_element() * numel / 8, rel=0.05)
    assert min(statistics.seconds.values()) > 0
