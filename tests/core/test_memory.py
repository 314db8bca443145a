"""Memory of a training step: bytes a parameter beyond plain DDP's, however many buckets there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gradwire.compress import Codec, Feedback, Identity, OneBit, PowerSGD, TopK
from memory import INT8, Case, beyond_ddp
from nccl_on_cpu import World
from nccl_on_cpu.training import Recipe, outcomes
from ranks import Ranks

#: Bytes a parameter at the peak of the first steps and of later ones on CPUs, with the residual in it. In the first
#: step DDP has one bucket for all.
OWNERS: dict[Case, tuple[float, float]] = {
    (OneBit(), "two_pass", None): (9.6, 7.3),  # at two ranks 6 of these are residuals
    (OneBit(), "two_pass", INT8): (8.0, 3.0),
}
OTHERS: dict[Case, tuple[float, float]] = {
    (OneBit(), "gather", None): (5.8, 5.0),
    (TopK(), "split", None): (6.2, 6.0),
    (PowerSGD(), "factors", None): (5.8, 5.4),
}
NODES: dict[Case, tuple[float, float]] = {(OneBit(), "hierarchical", None): (22.5, 16.0)}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "limits"), [(2, OWNERS), (2, OTHERS), (4, NODES)])
def test_bytes_a_parameter(ranks: Ranks, size: int, limits: dict[Case, tuple[float, float]]) -> None:
    found = ranks(size).run(beyond_ddp, list(limits), 32)
    for (case, most), *peaks in zip(limits.items(), *found, strict=True):
        assert all(first < most[0] and later < most[1] for first, later in peaks), f"{case}: {peaks}, of {most}"


@pytest.mark.parametrize(
    ("codec", "exchange", "strategy", "most"),
    [
        (OneBit(), "two_pass", None, 6.8),
        (OneBit(), "two_pass", INT8, 2.4),
        pytest.param(PowerSGD(), "factors", None, 6.0, marks=pytest.mark.slow),
        pytest.param(TopK(0.01), "split", None, 7.2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bytes_a_parameter_of_another_bucket_on_a_gpu(
    codec: Codec, exchange: str, strategy: Feedback | None, most: float
) -> None:
    """Memory that buckets share is not in it."""
    side, few, more = 64 if codec == OneBit() else 192, 2, 4  # tables of a bucket that any size has weigh less

    def peak(recipe: Recipe) -> int:
        world = World(2)
        outcomes(recipe, world)
        return max(size for (_, step), size in world.machine.most.items() if step == recipe.steps - 1)

    def beyond(count: int) -> int:
        buckets = tuple[dict[str, tuple[int, ...]], ...]({f"{number}.weight": (side, side)} for number in range(count))
        plain = Recipe(Identity(), "dense", steps=3, buckets=buckets)
        return peak(replace(plain, codec=codec, exchange=exchange, strategy=strategy)) - peak(plain)

    assert (beyond(more) - beyond(few)) / ((more - few) * side * side) < most
