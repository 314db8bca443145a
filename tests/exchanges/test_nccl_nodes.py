"""What NCCL is asked for between and inside nodes: means where it divides, rows of any length, and every byte once.

On GPUs and with an NCCL that are not there: see `nccl_on_cpu`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradwire.compress import Cast, ChunkedTopK, Codec, OneBit, TopK
from gradwire.hooks.comm.group import Group
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_on_cpu import DEVICE, Schedule, World, on_gpu, read
from nccl_on_cpu.nccl import AVERAGED, Keeping
from nccl_on_cpu.training import BUCKETS, CPU, Recipe, differences, outcomes
from often import by_time
from torch import Tensor

BIASES = frozenset({"a.bias", "b.bias"})


def calls(world: World) -> list[tuple[tuple[int, ...], Any]]:
    """Every collective, with the ranks that took part."""
    return [(ranks, call) for ranks, group in world._communicators.items() for call in group.calls]


# -- rows of several lengths -------------------------------------------------------------------------------------------


def gather_rows(world: World, sizes: Sequence[int], told: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """What each rank has of all rows, waited for on another stream than they were started on."""

    def run(world: World, rank: int) -> Tensor:
        group = Group(world.communicator(tuple(range(world.size))).member(rank), range(world.size))
        row = on_gpu(torch.arange(sizes[rank], dtype=torch.float32) + 100 * rank)
        expected = sizes if told is None else told[rank]
        output, side = torch.zeros(sum(expected), device=DEVICE), torch.cuda.Stream()
        with world.machine.never_waiting():
            work = group.all_gather_v(output, row, expected)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work.wait()
                copy = output.clone()
                del work
            for _ in range(2):  # whoever asks for memory next
                torch.zeros(world.size * max(1, *sizes), device=DEVICE)
            torch.cuda.current_stream().wait_stream(side)
        return read(copy)

    return world.run(run)


def expected_rows(sizes: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(size, dtype=torch.float32) + 100 * rank for rank, size in enumerate(sizes)])


lengths = st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any)
LATE = st.sampled_from([None, *(f"{rank} {name}" for rank in range(2) for name in ("default", "side 1", "nccl"))])


@settings(max_examples=25, deadline=None)
@given(lengths, LATE, st.sampled_from(["hold", "record"]))
def test_rows_of_any_length_enter_a_node_once(sizes: list[int], late: str | None, keeping: Keeping) -> None:
    """By an all-gather, in which NCCL passes them on: an all-to-all would send each as often as there are ranks."""
    world = World(len(sizes), Schedule(late), keeping)
    for found in gather_rows(world, sizes):
        assert torch.equal(found, expected_rows(sizes))
    ((_, call),) = calls(world)
    assert call.kind == "all_gather"
    assert all(given.numel() == max(sizes) for _, given in call.parts.values())


# -- means -------------------------------------------------------------------------------------------------------------


def test_nccl_divides_to_the_bits_of_a_division_before() -> None:
    """On three ranks, where a third is rounded."""
    recipe = Recipe(OneBit(), "dense", exclude=BIASES, steps=2)
    world = World(3)
    assert not differences(outcomes(recipe, World(3), CPU), outcomes(recipe, world))
    assert {call.kind for _, call in calls(world)} == {"all_reduce" + AVERAGED}


# -- nodes -------------------------------------------------------------------------------------------------------------

#: Ranks in all and on a node, always two nodes.
NODES = [(4, 2), (6, 3), (8, 4)]
CODECS = [OneBit(block=256), TopK(0.05), ChunkedTopK(k=16, chunk=256), Cast(torch.bfloat16)]


def sent_between(world: World, local: int) -> Counter[int]:
    """Bytes that each node hands to collectives among nodes."""
    nodes: Counter[int] = Counter()
    for ranks, call in calls(world):
        if len({rank // local for rank in ranks}) > 1:
            for rank, (_, given) in call.parts.items():
                nodes[rank // local] += given.nbytes
    return nodes


@pytest.mark.parametrize(("size", "local"), NODES[: by_time(2, len(NODES))])
@pytest.mark.parametrize("codec", CODECS[: by_time(2, len(CODECS))], ids=str)
def test_nothing_leaves_a_node_more_than_once(codec: Codec, size: int, local: int) -> None:
    recipe = Recipe(codec, "hierarchical", exclude=BIASES, steps=1, nodes=local)
    world = World(size)
    outcomes(recipe, world)
    numels = [[torch.Size(shape).numel() for shape in bucket.values()] for bucket in BUCKETS]
    wire = extra = 0
    for bucket, sizes in zip(BUCKETS, numels, strict=True):
        beside = sum(n for name, n in zip(bucket, sizes, strict=True) if name in BIASES)
        slices = -(-(sum(sizes) - beside) // local)
        wire += local * codec.wire_bytes(slices)
        extra += 4 * beside
    for sent in sent_between(world, local).values():
        assert extra * recipe.steps < sent <= (wire + extra) * recipe.steps
    inside = {call.kind for ranks, call in calls(world) if len({rank // local for rank in ranks}) == 1}
    assert inside == {"reduce_scatter" + AVERAGED, "all_gather"}


def test_what_travels_as_it_is_is_exact_on_any_nodes() -> None:
    """The mean of excluded parameters, on nodes of three ranks, which do not divide 5 or 7."""
    size, local = NODES[1]
    recipe = Recipe(OneBit(block=256), "hierarchical", exclude=BIASES, steps=1, nodes=local)
    reference = outcomes(replace(recipe, exchange="dense", nodes=0), World(size), CPU)
    found = outcomes(recipe, World(size))
    for mine, exact in zip(found, reference, strict=True):
        torch.testing.assert_close(mine.applied[0][-7:], exact.applied[0][-7:])  # a.bias, in the first bucket
        torch.testing.assert_close(mine.applied[2][:5], exact.applied[2][:5])  # b.bias, in the last one
    assert all(torch.equal(a, b) for one in found for a, b in zip(one.applied, found[0].applied, strict=True))
