"""What several test files share: the pools of processes, and a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from emulated import EmulatedDevice, emulated_gpu
from ranks import Pool


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Iterator[EmulatedDevice]:
    """The backend "cuda" takes CPU tensors too: for those its kernels run in the emulator's checked build."""
    with emulated_gpu() as device:
        yield device


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """`ranks(3).run(function, …)` runs `function(rank, …)` on 3 ranks, in processes that all tests share."""
    pools: dict[int, Pool] = {}

    def get(world_size: int) -> Pool:
        if world_size not in pools or pools[world_size].broken:
            pools[world_size] = Pool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        if not pool.broken:
            pool.close()
