"""`ScatterState` where FSDP reduces on a stream of its own, on a GPU that is not there (`nccl_on_cpu`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradwire.hooks.core.statistics import Statistics
from gradwire.hooks.fsdp.shard import ScatterState
from nccl_on_cpu import DEVICE, Schedule, World, on_gpu, read
from torch import Tensor


def after_a_pass(world: World, raised: bool) -> list[list[int]]:
    """What is counted and kept after a pass of which FSDP's stream still computes the results."""
    status, mean, kept = (on_gpu(torch.zeros(2, dtype=torch.int64)) for _ in range(3))
    part = SimpleNamespace(
        status=status, put_back=lambda: kept.add_(mean), shards=SimpleNamespace(index=0, hooked=False)
    )
    session = SimpleNamespace(post_receives=list, end=list, group=SimpleNamespace(rank=1))
    state: Any = object.__new__(ScatterState)
    step: Any = SimpleNamespace(number=0, choice=None)
    state.__dict__ |= {
        "_open": step, "_reduced": {0: part}, "_parts": [part], "_step": 0, "_met": session,
        "_bad": on_gpu(torch.zeros(2, dtype=torch.int64)), "_statistics": Statistics(), "_told": None,
        "_stream": torch.cuda.Stream(),
    }  # fmt: skip
    state._stream.device = DEVICE
    with torch.cuda.stream(state._stream):
        for made in (status, mean):
            made.add_(3)
    (state._discard if raised else state._ended)(step)
    results: list[Tensor] = [state._bad, kept]
    return [read(x).tolist() for x in results]


@pytest.mark.parametrize("raised", [False, True])
def test_the_end_of_a_pass_waits_for_the_stream_on_which_fsdp_reduces(raised: bool) -> None:
    (found,) = World(1, Schedule("0 side 1")).run(lambda world, _: after_a_pass(world, raised))
    assert found == ([[0, 0], [3, 3]] if raised else [[3, 1], [0, 0]])
