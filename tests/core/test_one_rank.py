"""One rank alone has nobody to send anything to: it trains as without compression, whatever the codec loses."""

from __future__ import annotations

from collections.abc import Callable

import endings
import pytest
import torch
from lacking import needs_hook, needs_reduce_scatter
from ranks import Pool
from torch import Tensor, nn

Ranks = Callable[[int], Pool]


def trained(rank: int, front: str, codec: str) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters after some steps, with compression and without."""
    training = endings.Training(front, codec, "auto", 3, "kept", 0, 0, (0, 0, 0.0), coded=False)
    ours, plain = endings.Net(), endings.Net()
    model, after, close = endings.FRONTS[front](ours, training)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)

    def step(net: nn.Module, update: Callable[[], object], number: int) -> None:
        net.zero_grad()
        net(torch.randn(4, endings.WIDTH, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        update()

    for number in range(training.steps):
        step(model, after, number)
        step(plain, optimizer.step, number)
    close()
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in ours.parameters()]
    return [w.detach().clone() for w in weights], [p.detach() for p in plain.parameters()]


@pytest.mark.parametrize("codec", ["onebit", "topk"])
@pytest.mark.parametrize(
    "front",
    [
        "ddp",
        pytest.param("fsdp", marks=needs_hook),
        pytest.param("scatter", marks=needs_reduce_scatter),
        "local",
        "horovod",
    ],
)
def test_nothing_is_lost_by_one_rank_alone(ranks: Ranks, front: str, codec: str) -> None:
    ours, plain = ranks(1).run(trained, front, codec)[0]
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
