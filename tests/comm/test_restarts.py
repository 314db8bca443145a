"""Processes that outlive their default group, and meet others under numbers that somebody else had."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import sparse_all_reduce
from gradwire.hooks.comm import group
from gradwire.hooks.comm.group import Group
from gradwire.hooks.network import probe
from gradwire.hooks.sparse import all_reduce as sparse
from ranks import Pool

CPU = torch.device("cpu")
#: Which processes are ranks 0 and 1, one default group after the other. In the last two, somebody has met others before
#: under the same numbers.
PAIRS = (0, 1), (1, 2), (0, 2)


def pairs(me: int, folder: str, task: str) -> list[Any]:
    """What `task` finds in each pair that this process is in."""
    group.HANDSHAKE_TIMEOUT = timedelta(seconds=30)
    if dist.is_initialized():
        dist.destroy_process_group()
    found = []
    for number, pair in enumerate(PAIRS):
        if me in pair:
            store = dist.FileStore(f"{folder}/{number}", 2)
            dist.init_process_group("gloo", store=store, rank=pair.index(me), world_size=2)
            found.append(globals()[task](me))
            dist.destroy_process_group()
    return found


def meet(me: int) -> Any:
    """Two groups of the same ranks, and who is in them."""
    return [Group.of_ranks([0, 1]).all_gather_object(me) for _ in range(2)]


def measure(me: int) -> Any:
    """The group's calibration, and how many probes it took."""
    probes = 0

    def calibrate(ranks: Group, device: torch.device) -> Any:
        nonlocal probes
        probes += 1
        return tuple(ranks.all_gather_object(f"process {me}"))

    real, probe.calibrate = probe.calibrate, calibrate  # type: ignore[assignment]
    try:
        found = [probe.calibration(Group(dist.group.WORLD), CPU) for _ in range(2)]
    finally:
        probe.calibrate = real
    return *found, probes


def leave(me: int) -> Any:
    """What is still there of a group once it has been destroyed, but for what the process itself holds."""
    world = dist.group.WORLD
    assert world is not None
    probe._known.setdefault(world, {})[(0, 1), "cpu"] = None  # type: ignore[assignment]
    result = sparse_all_reduce(torch.tensor([me]), torch.ones(1), 4, op="sum", algorithm="gather")
    (room,) = sparse._pools[world].values()
    kept = [weakref.ref(x) for x in (world, room, *room._memory.values())]
    del world, room
    dist.destroy_process_group()
    gc.collect()
    gone = [ref() is None for ref in kept]
    # `pairs` destroys a group again.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return result[0].tolist(), all(gone), len(probe._known), len(sparse._pools)


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    with Pool(3) as pool:
        yield pool


def test_a_process_meets_others_after_its_group_was_destroyed(processes: Pool, tmp_path: Path) -> None:
    found = processes.run(pairs, str(tmp_path), "meet")
    for me, rounds in enumerate(found):
        assert rounds == [[list(pair)] * 2 for pair in PAIRS if me in pair]


def test_a_calibration_is_of_the_processes_that_are_there(processes: Pool, tmp_path: Path) -> None:
    """Ranks 0 and 1 of the last pair both had one of "ranks 0 and 1", and not the same."""
    found = processes.run(pairs, str(tmp_path), "measure")
    for me, rounds in enumerate(found):
        mine = [tuple(f"process {process}" for process in pair) for pair in PAIRS if me in pair]
        assert rounds == [(names, names, 1) for names in mine]


def test_nothing_is_kept_for_a_group_that_is_gone(processes: Pool, tmp_path: Path) -> None:
    found = processes.run(pairs, str(tmp_path), "leave")
    for me, rounds in enumerate(found):
        assert rounds == [(sorted(pair), True, 0, 0) for pair in PAIRS if me in pair]
