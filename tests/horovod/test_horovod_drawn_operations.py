"""Horovod's operations as nobody would call them: drawn, of all kinds, on all ranks and on process sets, submitted in
another order on each rank, synchronized in yet another, beside ranks that have joined, and after."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import Identity
from ranks import Pool
from torch import Tensor

Ranks = Callable[[int], Pool]

#: What goes on beside ranks that have joined.
JOINABLE = [
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "allgather",
    "grouped_allgather",
    "sparse",
    "objects",
    "codec",
]
OTHERS = ["max", "broadcast", "broadcast_", "alltoall", "reducescatter", "grouped_reducescatter", "object", "barrier"]
#: These return with their result: all ranks call them in one order.
WAITING = ("objects", "codec", "object", "barrier")
ROWS = (0, 1, 3, 4, 12, 600, 3000)
SETS: dict[int, tuple[tuple[int, ...], ...]] = {2: (), 3: ((0, 1), (1, 2), (0, 2)), 4: ((0, 1), (1, 2, 3), (0, 3))}
COMPRESSION = hvd.Compression.codec(Identity())


@dataclass(frozen=True)
class Call:
    """One operation. `here` are the ranks that have not joined."""

    number: int
    kind: str
    rows: int
    dtype: torch.dtype
    members: tuple[int, ...]
    here: tuple[int, ...]
    root: int
    named: bool

    def tensor(self, rank: int, index: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.number + 10 * index + rank)
        rows = self.rows + (rank if "allgather" in self.kind else 0)
        return torch.randint(-50, 50, (rows, 2), generator=generator).to(self.dtype)

    def object(self, rank: int) -> Any:
        return self.number, rank, "x" * 4 * self.rows

    def begin(self, rank: int, process_set: hvd.ProcessSet) -> Callable[[], Any]:
        """Submit it, unless it waits; what gives the result."""
        options: dict[str, Any] = {"process_set": process_set}
        if self.kind == "barrier":
            return lambda: hvd.barrier(process_set)
        options["name"] = f"drawn {self.number}" if self.named else None
        if self.kind == "objects":
            return lambda: hvd.allgather_object(self.object(rank), **options)
        if self.kind == "object":
            return lambda: hvd.broadcast_object(self.object(rank), self.root, **options)
        mine, second = self.tensor(rank), self.tensor(rank, 1)
        if self.kind == "codec":
            return lambda: hvd.allreduce(mine, op=hvd.Sum, compression=COMPRESSION, **options)
        if self.kind == "sparse":
            result = hvd.sparse_allreduce_async(mine.to_sparse(1), op=hvd.Sum, **options)
            return lambda: result().to_dense()
        handle = {
            "allreduce": lambda: hvd.allreduce_async(mine, op=hvd.Sum, **options),
            "max": lambda: hvd.allreduce_async(mine, op=hvd.Max, **options),
            "allreduce_": lambda: hvd.allreduce_async_(mine, op=hvd.Sum, **options),
            "grouped_allreduce": lambda: hvd.grouped_allreduce_async([mine, second], op=hvd.Sum, **options),
            "allgather": lambda: hvd.allgather_async(mine, **options),
            "grouped_allgather": lambda: hvd.grouped_allgather_async([mine, second], **options),
            "broadcast": lambda: hvd.broadcast_async(mine, self.root, **options),
            "broadcast_": lambda: hvd.broadcast_async_(mine, self.root, **options),
            "alltoall": lambda: hvd.alltoall_async(mine.repeat(len(self.members), 1), **options),
            "reducescatter": lambda: hvd.reducescatter_async(mine, op=hvd.Sum, **options),
            "grouped_reducescatter": lambda: hvd.grouped_reducescatter_async([mine, second], op=hvd.Sum, **options),
        }[self.kind]()
        if self.kind.endswith("_"):
            return lambda: (hvd.synchronize(handle), mine)[1]
        return lambda: hvd.synchronize(handle)

    def expected(self, rank: int) -> Any:
        present = [member for member in self.members if member in self.here]
        every = [torch.stack([self.tensor(r, i) for r in present]) for i in (0, 1)] if "gather" not in self.kind else []
        if self.kind in ("allgather", "grouped_allgather"):
            both = [torch.cat([self.tensor(r, i) for r in present]) for i in (0, 1)]
            return both[0] if self.kind == "allgather" else both
        if self.kind == "objects":
            return [self.object(r) for r in present]
        if self.kind == "object":
            return self.object(self.root)
        if self.kind == "barrier":
            return None
        if self.kind == "max":
            return every[0].amax(0)
        if self.kind.startswith("broadcast"):
            return self.tensor(self.root)
        if self.kind == "alltoall":
            rows = every[0].flatten(0, 1)
            return rows, torch.full((len(self.members),), self.rows, dtype=torch.int32)
        sums = [tensors.sum(0) for tensors in every]
        if "scatter" in self.kind:
            place = self.members.index(rank)
            sums = [total.tensor_split(len(self.members))[place] for total in sums]
        return sums if self.kind.startswith("grouped") else sums[0]


def script(draw: random.Random, size: int) -> list[list[list[Call]]]:
    """Phases, after each of which all ranks join, of rounds of calls."""
    phases, number = [], 0
    for _ in range(draw.randint(1, 3)):
        here, rounds = tuple(range(size)), []
        for _ in range(draw.randint(1, 4)):
            calls = []
            for _ in range(draw.randint(1, 6)):
                number += 1
                members = draw.choice([tuple(range(size)), *SETS[size]])
                kind = draw.choice(JOINABLE if set(members) - set(here) else JOINABLE + OTHERS)
                dtype = torch.float32 if kind in ("sparse", "codec") else draw.choice([torch.float32, torch.int64])
                named = draw.random() < 0.7
                calls.append(Call(number, kind, draw.choice(ROWS), dtype, members, here, draw.choice(members), named))
            rounds.append(calls)
            if len(here) > 1 and draw.random() < 0.4:
                here = tuple(sorted(draw.sample(here, len(here) - 1)))
        phases.append(rounds)
    return phases


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return bool(got.shape == expected.shape and torch.allclose(got, expected, atol=1e-4))
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    return bool(got == expected)


def play(rank: int, phases: Sequence[Sequence[Sequence[Call]]], seed: int) -> list[Call]:
    """What went wrong on this rank."""
    size, draw = hvd.size(), random.Random(seed + rank)
    sets = {members: hvd.add_process_set(list(members)) for members in SETS[size]}
    sets[tuple(range(size))] = hvd.global_process_set
    hvd.allreduce(torch.ones(1), name="known", compression=COMPRESSION)  # who joins must know of it
    wrong = []

    def check(call: Call, result: Callable[[], Any]) -> None:
        if not same(result(), call.expected(rank)):
            wrong.append(call)

    for rounds in phases:
        later = []
        for calls in rounds:
            mine = [call for call in calls if rank in call.members and rank in call.here]
            waiting = [call for call in mine if call.kind in WAITING]
            # Nameless ones are told apart by their order.
            free = [call for call in mine if call.kind not in WAITING and call.named]
            ordered = [call for call in mine if call.kind not in WAITING and not call.named]
            draw.shuffle(free)
            while free or ordered:
                take = ordered if not free or (ordered and draw.random() < 0.5) else free
                call = take.pop(0)
                later.append((call, call.begin(rank, sets[call.members])))
            for call in waiting:
                check(call, call.begin(rank, sets[call.members]))
            draw.shuffle(later)
            while later and draw.random() < 0.8:
                check(*later.pop())
        hvd.join()
        while later:
            check(*later.pop())
    for members in SETS[size]:
        assert hvd.remove_process_set(sets[members])
    return wrong


def played(rank: int, seeds: Sequence[int]) -> list[tuple[int, Call]]:
    hvd.init()
    return [(n, call) for n in seeds for call in play(rank, script(random.Random(n), hvd.size()), n)]


@pytest.mark.parametrize("world", [2, 3])
def test_drawn_operations(ranks: Ranks, world: int) -> None:
    assert ranks(world).run(played, range(6), within=60.0) == [[]] * world


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_drawn_operations_for_long(ranks: Ranks, world: int) -> None:
    """`GRADWIRE_DRAWN_SECONDS` says how long."""
    end = time.monotonic() + float(os.environ.get("GRADWIRE_DRAWN_SECONDS", "60")) / 3
    while time.monotonic() < end:
        seeds = [random.SystemRandom().getrandbits(24) for _ in range(20)]
        assert ranks(world).run(played, seeds, within=60.0) == [[]] * world, seeds
