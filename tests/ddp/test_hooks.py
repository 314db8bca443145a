"""The hook in DDP: nothing lost, replicas equal. Ways to build and use DDP are in the scripts of
`tests/core/test_drawn.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import (
    QSGD,
    Cast,
    ChunkedTopK,
    Codec,
    CompressState,
    OneBit,
    Outliers,
    PowerSGD,
    Ternary,
    TernGrad,
    TopK,
)
from gradwire.hooks.exchanges import possible
from ranks import Pool, on_ranks
from torch import Tensor, nn
from training import Ledger, batch, convnet, digest, perceptron, residuals_of, through_a_file, train, wrap

Ranks = Callable[[int], Pool]

LOSSLESS_SUM = [
    OneBit(), QSGD(rounding="nearest"), TernGrad(rounding="nearest"), TopK(0.05), Outliers(Ternary(), 0.05),
    ChunkedTopK(k=16, chunk=256), PowerSGD(rank=1),
    Cast(torch.bfloat16),
]  # fmt: skip


def equal_on_all(results: list[Any]) -> bool:
    return all(result == results[0] for result in results)


def trained_twice(rank: int, codec: Codec, exchange: str, save_at: int) -> Any:
    """Train across DDP's bucket rebuild and, at `save_at`, through a checkpoint into a new model and state."""
    model = convnet()
    ledger = Ledger(model)
    ddp, state = wrap(model, codec, exchange=exchange)
    digests = train(rank, ddp, range(save_at), ledger)
    buckets = len(state._buckets)
    saved = through_a_file({"state": state.state_dict(), "model": model.state_dict()})
    state.close()
    model = convnet()
    model.load_state_dict(saved["model"])
    ledger.model, ledger.parameters = model, dict(model.named_parameters())
    ddp, state = wrap(model, codec, exchange=exchange)
    state.load_state_dict(saved["state"])
    digests += train(rank, ddp, range(save_at, 20), ledger)
    error = ledger.error(state)
    steps = state.step
    state.close()
    return digests, error, buckets, steps


@pytest.mark.parametrize(
    ("codec", "exchange"),
    [
        # One way of each codec in `make test`; what draws scripts takes the others too.
        *(
            pytest.param(codec, e, marks=() if n == number % len(ways) else pytest.mark.slow)
            for number, codec in enumerate(LOSSLESS_SUM)
            for ways in [[e for e in possible(codec) if e != "dense"]]
            for n, e in enumerate(ways)
        ),
        (TopK(0.05, values=torch.int8), "split"),
        pytest.param(TopK(0.05, values=torch.bfloat16), "split", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nothing_is_lost_across_rebuild_and_checkpoint(ranks: Ranks, codec: Codec, exchange: str) -> None:
    results = ranks(3).run(trained_twice, codec, exchange, 8)
    digests, errors, buckets, steps = zip(*results, strict=True)
    assert equal_on_all(list(digests)), "replicas differ"
    assert max(errors) < 1e-5
    assert min(buckets) >= 3
    assert set(steps) == {20}


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
