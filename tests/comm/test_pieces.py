"""Many tensors between all ranks: how many messages one after the other that takes, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import gradwire
import pytest
import torch
import torch.distributed as dist
from gradwire import TopK
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.hooks.comm import pieces
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.pieces import all_reduce, broadcast, overlap
from gradwire.hooks.core import checkpoint
from gradwire.hooks.core.options import Options
from gradwire.optim import DistributedLion, OneBitAdam
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks
from torch import Tensor, nn

CPU = torch.device("cpu")
PARAMETERS = 40


class Events:
    """A process group of two ranks, of which the other has the same; what is started and waited for, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Tensor]) -> Events:
        tensors[0].mul_(2)
        return self._start()

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> Events:
        assert options.rootRank == 0
        return self._start()

    def _start(self) -> Events:
        self.events.append("start")
        return self

    def wait(self) -> None:
        self.events.append("wait")


DTYPES = [torch.float32, torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.float8_e5m2]


def made(shape: list[int], dtype: torch.dtype, turned: bool) -> Tensor:
    tensor = (torch.arange(max(1, torch.Size(shape).numel())) % 5)[: torch.Size(shape).numel()].view(shape).to(dtype)
    return tensor.t() if turned and tensor.dim() == 2 else tensor


@settings(max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=2), max_size=12),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=12, max_size=12),
    turned=st.booleans(),
    limit=st.integers(1, 64),
)
def test_tensors_of_any_kind_travel_packed(
    shapes: list[list[int]], dtypes: list[torch.dtype], turned: bool, limit: int
) -> None:
    """All are handed on as they were, and of more than two pieces two are under way while one is waited for."""
    tensors = [made(shape, dtype, turned) for shape, dtype in zip(shapes, dtypes, strict=False)]
    copies, gloo = [tensor.clone() for tensor in tensors], Events()
    with patch.object(pieces, "PIECE_BYTES", limit):
        broadcast(Group(gloo, [0, 1]), CPU, tensors)
        numbers = [made(shape, torch.float32, False) for shape in shapes]
        twice = [tensor * 2 for tensor in numbers]
        all_reduce(Group(Events(), [0, 1]), CPU, numbers)
    assert all(map(torch.equal, numbers, twice))
    for tensor, copy in zip(tensors, copies, strict=True):
        assert tensor.dtype == copy.dtype
        assert torch.equal(tensor.double() if tensor.dtype == torch.float8_e5m2 else tensor,
                           copy.double() if copy.dtype == torch.float8_e5m2 else copy)  # fmt: skip
    starts = gloo.events.count("start")
    assert starts <= sum(t.nbytes for t in tensors) // limit + 1
    assert gloo.events.count("wait") == starts
    if starts > 1:
        assert gloo.events[:2] == ["start"] * 2


@given(sizes=st.lists(st.integers(1, 40), max_size=12))
def test_what_is_under_way_is_bounded(sizes: list[int]) -> None:
    """At most a piece, and one thing more; and what came first is finished first."""
    left, done = list[int](), list[int]()

    class Waited:
        def wait(self) -> None:
            assert len(left) <= 2 or sum(left[:-1]) <= 20

    def finish(place: int) -> None:
        left.pop(0)
        done.append(place)

    def start(place: int, size: int) -> pieces.Started:
        left.append(size)
        return size, Waited(), partial(finish, place)

    with patch.object(pieces, "PIECE_BYTES", 20):
        overlap(start(place, size) for place, size in enumerate(sizes))
    assert done == list(range(len(sizes)))


@pytest.mark.parametrize("owner", ["OneBitAdam", "DistributedLion", "LocalUpdates"])
@on_ranks(2)
def test_latencies_do_not_grow_with_the_number_of_parameters(rank: int, owner: str) -> None:
    """How many collectives, and exchanges of objects, it takes to construct something and to consolidate its state."""
    torch.manual_seed(rank)
    model, counted = nn.ParameterList(torch.randn(3, 2) for _ in range(PARAMETERS)), 0

    def counting(plain: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            nonlocal counted
            counted += 1
            return plain(*arguments)

        return call

    def construct() -> gradwire.LocalUpdates | OneBitAdam | DistributedLion:
        if owner == "LocalUpdates":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return gradwire.LocalUpdates(model, optimizer, gradwire.OneBit(), every=1)
        if owner == "OneBitAdam":
            return OneBitAdam(model.parameters(), warmup_steps=1, bucket_cap_mb=1e-4)
        return DistributedLion(model.parameters(), bucket_cap_mb=1e-4)

    found = []
    gloo: Any = dist.ProcessGroupGloo
    with patch.object(Group, "all_reduce", counting(Group.all_reduce)):
        with patch.object(gloo, "broadcast", counting(gloo.broadcast)):
            made = construct()
            found.append(counted)
        assert all(bool((p == p0).all()) for p, p0 in zip(model.parameters(), first_rank_s(model), strict=True))
        for _ in range(3):
            torch.stack(list(model)).square().sum().backward()
            made.step()
        counted = 0
        with patch.object(Group, "all_gather_object", counting(Group.all_gather_object)):
            made.consolidated_state_dict()
        found.append(counted)
    made.close()
    constructed, consolidated = found
    assert constructed == 1
    assert consolidated <= 3


def first_rank_s(model: nn.Module) -> list[Tensor]:
    there = [p.detach().clone() for p in model.parameters()]
    for p in there:
        dist.broadcast(p, 0)
    return there


def checkpoint_of(parameters: dict[str, Tensor]) -> checkpoint.Checkpoint:
    return checkpoint.Checkpoint("CompressState", Options(TopK(0.1)), FeedbackStore(), parameters, None, 0)


def test_means_of_what_only_some_ranks_keep() -> None:
    """In the parameter's shape, whichever rank kept it; none is made where nobody does."""

    class Told:
        def all_gather_object(self, mine: dict[str, list[str]]) -> list[dict[str, list[str]]]:
            return [mine, {"residual": ["b"], "momentum": []}]

    gloo = Events()
    connection = type("Connection", (), {"control": Told(), "group": Group(gloo, [0, 1])})()
    parameters = {name: torch.zeros(2, 3) for name in "abc"}
    kept = {"residual": {"a": torch.ones(2, 3)}, "momentum": {}}
    with patch.object(torch, "zeros", wraps=torch.zeros) as made:
        found = checkpoint_of(parameters).means(connection, kept)
    assert made.call_count == 1
    assert found["momentum"] == {}
    assert list(found["residual"]) == ["a", "b"]
    assert torch.equal(found["residual"]["a"], torch.ones(2, 3))
    assert torch.equal(found["residual"]["b"], torch.zeros(2, 3))
    assert gloo.events == ["start", "wait"]
