"""Time of Horovod operations with each way of agreement, by turns: what epochs and eager payloads are worth.

gradwire-bench links --world 4 --delay 50ms -- python tests/support/horovod_latency.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradwire.hooks.horovod as hvd
import torch
from gradwire import OneBit
from gradwire.hooks.horovod.consensus import epoch_coordinator, epoch_log
from gradwire.hooks.horovod.runtime import context, operations
from torch import nn

ROUNDS, CALLS = 2, 5
WAYS = ("epochs, eager", "epochs", "coordinator")
COORDINATED = (*epoch_log.COORDINATED, "allreduce", "exchange")


def times(call: Callable[[], Any]) -> list[float]:
    """Milliseconds of each call, without the first two."""
    taken = []
    for _ in range(CALLS + 2):
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return taken[2:]


def step_of(compression: Any) -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression
    )

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(16, 128)).square().mean().backward()
        optimizer.step()

    return step


def turn(way: str) -> dict[str, list[float]]:
    with (
        mock.patch.object(operations, "EAGER_BYTES", operations.EAGER_BYTES if way == "epochs, eager" else -1),
        mock.patch.object(epoch_log, "COORDINATED", COORDINATED if way == "coordinator" else COORDINATED[:3]),
    ):
        hvd.init()
        if way == "coordinator":
            epoch_coordinator.RAREST = 10**9
            if hvd.rank() == 0:
                context.world().engine._coordinator.epochs._until_next = 10**9  # type: ignore[union-attr]
        onebit = hvd.Compression.codec(OneBit(), exchange="gather", error_feedback=True)
        found = {
            "allreduce of 16 bytes": times(lambda: hvd.allreduce(torch.ones(4), name="small")),
            "allreduce of 80 kB": times(lambda: hvd.allreduce(torch.ones(20_000), name="large")),
            "step, OneBit": times(step_of(onebit)),
            "step, uncompressed": times(step_of(hvd.Compression.none)),
        }
        hvd.shutdown()
        epoch_coordinator.RAREST = 1024
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    turns: dict[str, list[dict[str, list[float]]]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            turns[way].append(turn(way))
    for way in WAYS:
        every = {what: [t for one in turns[way] for t in one[what]] for what in turns[way][0]}
        print(way, {what: round(statistics.median(taken), 1) for what, taken in every.items()}, flush=True)
