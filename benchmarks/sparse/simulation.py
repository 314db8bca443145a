"""Sparse all-reduce among more ranks than a machine has room for: the library's own code, on simulated links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compress import TopK
from ...compress.feedback.residual import NOTHING
from ...hooks.comm.entry_exchange import Entries, EntryExchanger
from ...hooks.comm.ports import Stages, WaitAll
from ...hooks.exchanges.split import Split
from ..common import report
from ..common.in_process import InProcessGroup, Network, World

#: Entries of all ranks beyond which only some unpack and sum what they gather: the others would do the same.
EVERYBODY = 1 << 19
#: Entries of all ranks together beyond which `union` is left out: every rank has to look at all of them.
UNION_ENTRIES = 1 << 21


@dataclass(frozen=True)
class Task:
    """One all-reduce in a simulated world; called with each rank's group."""

    algorithm: str
    numel: int
    dtype: torch.dtype
    index_sets: Sequence[Tensor]

    def __call__(self, group: InProcessGroup) -> Stages:
        """Stages of one rank. They return the bytes received, and the result on the first rank."""
        carrier = EntryExchanger(self.numel, self.dtype, torch.device("cpu"), group)
        entries = self.entries(group.rank)
        k = len(entries)
        if self.algorithm == "split-k":
            return (yield from self.largest(group, entries, k))
        group.begin()
        sums = yield from self.reduce(carrier, entries, k, group.rank == 0 or k * group.size <= EVERYBODY)
        return carrier.received, sums if group.rank == 0 else None

    def entries(self, rank: int) -> Entries:
        indices = self.index_sets[rank]
        return Entries(indices.int(), torch.randn(len(indices), generator=torch.Generator().manual_seed(rank)))

    def reduce(self, carrier: EntryExchanger, entries: Entries, k: int, observed: bool) -> Stages:
        """The sum, as Entries; where it is not `observed`, what has arrived is not unpacked."""
        if self.algorithm == "gather":
            moving = carrier.start_gather(entries, k)
            yield WaitAll([work for _, work in moving])
            return carrier.finish_gather(moving, k) if observed else None
        if self.algorithm == "union":
            return (yield from carrier.union(entries, k))
        bounds = yield from carrier.balanced_bounds(entries.indices)
        owned = yield from carrier.to_owners(entries, bounds)
        counts = yield from carrier.all_counts(len(owned))
        shares = carrier.start_sharing(owned, counts, bounds)
        yield WaitAll([work for _, work in shares])
        return carrier.finish_sharing(shares, counts, bounds) if observed else None

    def largest(self, group: InProcessGroup, entries: Entries, k: int) -> Stages:
        """With the k largest sums alone, as a model's gradients are exchanged, in the first step."""
        codec = TopK((k - 0.5) / self.numel, values=self.dtype)
        exchange = Split(codec, self.numel, 0, torch.device("cpu"), group)
        group.begin()
        means = yield from exchange.combine(entries, torch.zeros(0), NOTHING)
        sums = Entries(means.indices, means.values * group.size) if group.rank == 0 else None
        return exchange.bytes_received, sums


def simulate(task: Task, world_size: int, network: Network) -> dict[str, Any]:
    """Bytes received by the busiest rank, its seconds in the network, and with the work of a typical one.

    Raises:
        RuntimeError: the result is not the sum, in float64, of what the ranks had.
    """
    world = World(world_size, network)
    results = world.run(task)
    check(task, world_size, results[0][1])
    received, spent = max(received for received, _ in results), max(world.times)
    # The first rank unpacks everything; of the others the middle one.
    work = max(world.work[0], report.median(world.work))
    return {"received_bytes": received, "network_s": spent, "seconds": spent + work}


def check(task: Task, world_size: int, result: Entries | None) -> None:
    """Raises RuntimeError unless `result` holds sums of what the ranks of the task have, and all or the largest."""
    assert result is not None
    total = torch.zeros(task.numel, dtype=torch.float64)
    for rank in range(world_size):
        entries = task.entries(rank)
        total[entries.indices.long()] += entries.values
    at = result.indices.long()
    exact = task.dtype == torch.float32
    close = torch.isclose(result.values.double(), total[at], rtol=1e-4 if exact else 0.1, atol=1e-3 if exact else 1.0)
    missing = total.clone()
    missing[at] = 0
    bound = 0.0 if task.algorithm != "split-k" else float(total[at].abs().min())
    if not bool(close.all()) or float(missing.abs().max()) > bound * 1.001 + 1e-9:
        raise RuntimeError(f"the simulated {task.algorithm} of {world_size} ranks does not give the sum")


def estimate_dense(numel: int, world_size: int, network: Network) -> dict[str, Any]:
    """A dense all-reduce, which needs no simulation."""
    moved = 8 * numel * (world_size - 1) // world_size
    seconds = 2 * math.ceil(math.log2(world_size)) * network.alpha + moved * network.beta
    return {"received_bytes": moved, "seconds": seconds, "network_s": seconds}
