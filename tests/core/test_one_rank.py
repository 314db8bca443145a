"""One rank alone has nobody to send anything to: it trains as without compression, whatever the codec loses."""

from __future__ import annotations

import pytest
import torch
from fronts import FRONTS, marked, sgd
from gradwire import Codec, OneBit, TopK
from ranks import Ranks
from torch import Tensor
from training import batch, perceptron


def trained(rank: int, name: str, codec: Codec) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after some steps, with compression and without."""
    front, plain = FRONTS[name](perceptron(), codec), perceptron()
    optimizer = sgd(plain.parameters())
    for number in range(3):
        front.step(batch(rank, number, plain))
        optimizer.zero_grad()
        plain(batch(rank, number, plain)).square().mean().backward()
        optimizer.step()
    front.close()
    return [p.detach().clone() for p in front.parameters()], [p.detach() for p in plain.parameters()]


@pytest.mark.parametrize("codec", [OneBit(), TopK(0.02)], ids=str)
@pytest.mark.parametrize("name", marked(["ddp", "replicas", "shards", "local", "horovod"]))
def test_nothing_is_lost_by_one_rank_alone(ranks: Ranks, name: str, codec: Codec) -> None:
    ours, plain = ranks(1).run(trained, name, codec)[0]
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
