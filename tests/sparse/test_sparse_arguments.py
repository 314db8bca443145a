"""What `sparse_all_reduce` is given: whatever cannot be reduced is refused on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_type

import pytest
import torch
import torch.distributed as dist
from gradwire import sparse_all_reduce
from ranks import Pool
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

Ranks = Callable[[int], Pool]


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(10)


def sparse_vector(size: int) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (size,), check_invariants=True)


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


SOUND: dict[str, Any] = {"indices": torch.tensor([1, 4, 7]), "values": torch.ones(3), "numel": 10}
#: What rank 1 may hand in instead, and what every rank is told then.
FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "beyond": (lambda: {"indices": torch.tensor([1, 4, 10])}, ["rank 1: index 10 is out of range"]),
    "far beyond": (lambda: {"indices": torch.tensor([1, 4, 4 + (1 << 32)])}, ["rank 1: index 4294967300 is out of"]),
    "negative": (lambda: {"indices": torch.tensor([-3, 1, 4])}, ["rank 1: index -3 is out of range"]),
    "unsorted": (lambda: {"indices": torch.tensor([4, 1, 7])}, ["rank 1", "position 1", "sort them"]),
    "duplicate": (lambda: {"indices": torch.tensor([1, 4, 4])}, ["rank 1", "position 2", "coalesce"]),
    "lengths": (lambda: {"values": torch.ones(2)}, ["rank 1: 3 indices", "2 values"]),
    "no row": (lambda: {"values": torch.ones(3, 0)}, ["rank 1: values must be"]),
    "float64": (lambda: {"values": torch.ones(3).double()}, ["rank 1: values must be", "float64"]),
    "row": (lambda: {"values": torch.ones(3, 11)}, ["disagree on "]),
    "kind": (lambda: {"indices": torch.ones(3)}, ["rank 1: indices must be", "torch.float32"]),
    "no tensor": (lambda: {"values": [1.0, 2.0, 3.0]}, ["rank 1: values must be", "a list"]),
    "cube": (lambda: {"values": torch.ones(3, 1, 1)}, ["rank 1: values must be", "(3, 1, 1)"]),
    "meta": (lambda: {"values": torch.ones(3, device="meta")}, ["rank 1: values must be", "meta"]),
    "all meta": (
        lambda: {"indices": torch.zeros(3, dtype=torch.int64, device="meta"), "values": torch.ones(3, device="meta")},
        ["rank 1: indices must be", "meta"],
    ),
    "fake": (lambda: {"values": fake()}, ["rank 1: values must be", "FakeTensor"]),
    "sparse": (lambda: {"values": sparse_vector(3)}, ["rank 1: values must be", "torch.sparse_coo"]),
    "numel": (lambda: {"numel": 11}, ["disagree on numel", "has 10", "rank 1 has 11"]),
    "no numel": (lambda: {"numel": None}, ["rank 1: numel=None"]),
    "op": (lambda: {"op": "sum"}, ["disagree on op", "has mean", "rank 1 has sum"]),
    "unknown op": (lambda: {"op": "max"}, ["rank 1: op='max'", "'mean', 'sum'"]),
    "a tensor for an op": (lambda: {"op": torch.ones(2)}, ["rank 1: op=tensor"]),
    "unspeakable": (lambda: {"op": Unspeakable()}, ["rank 1: no words"]),
    "dtype": (lambda: {"values": torch.ones(3).bfloat16()}, ["disagree on dtype", "bfloat16"]),
    "algorithm": (lambda: {"algorithm": "gather"}, ["disagree on algorithm", "rank 1 has gather"]),
    "out": (lambda: {"out": torch.zeros(9)}, ["rank 1: out must be", "(10,)", "(9,)"]),
    "out of another type": (lambda: {"out": "here"}, ["rank 1: out must be", "a str"]),
    "out of one address": (lambda: {"out": torch.zeros(1).expand(10)}, ["rank 1", "at one address", "clone()"]),
    "out of rows that overlap": (
        lambda: {"values": torch.ones(3, 2), "out": torch.zeros(11).unfold(0, 2, 1)},
        ["rank 1: rows of out overlap", "strides of (1, 1)", "clone()"],
    ),
    "out elsewhere": (lambda: {"out": torch.zeros(10, device="meta")}, ["rank 1: out must be", "on meta"]),
    "sparse out": (lambda: {"out": sparse_vector(10)}, ["rank 1: out must be", "torch.sparse_coo"]),
    "out of inference mode": (lambda: {"out": inference()}, ["rank 1: out cannot be written to", "InferenceMode"]),
}


def refused(rank: int, fault: str) -> str:
    """Rank 1 hands in something wrong; what every rank is told."""
    arguments = SOUND | (FAULTS[fault][0]() if rank == 1 else {})
    try:
        sparse_all_reduce(**arguments)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    # The group still works, and in step.
    assert sparse_all_reduce(torch.tensor([rank]), torch.ones(1), 10, op="sum")[0].tolist() == [0, 1, 2]
    return said


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_reduced_is_refused_on_every_rank(ranks: Ranks, fault: str) -> None:
    told = ranks(3).run(refused, fault)
    assert len(set(told)) == 1, told
    for word in FAULTS[fault][1]:
        assert word in told[0]


def outside(rank: int, how: str) -> str:
    """What a rank is told that has no group to call with."""
    group: Any = dist.GroupMember.NON_GROUP_MEMBER if how == "not in it" else "gloo"
    try:
        sparse_all_reduce(torch.tensor([0]), torch.ones(1), 10, group=group)
    except TypeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("how", ["not in it", "no group"])
def test_a_rank_outside_is_told(ranks: Ranks, how: str) -> None:
    (said,) = ranks(1).run(outside, how)
    assert "expected a process group that this rank is in" in said


def types(indices: Tensor, values: Tensor, out: Tensor, maybe: Tensor | None) -> None:
    """Read by mypy."""
    assert_type(sparse_all_reduce(indices, values, 10), tuple[Tensor, Tensor])
    assert_type(sparse_all_reduce(indices, values, 10, out=None), tuple[Tensor, Tensor])
    assert_type(sparse_all_reduce(indices, values, 10, op="sum", algorithm="split", out=out), Tensor)
    assert_type(sparse_all_reduce(indices, values, 10, out=maybe), Tensor | tuple[Tensor, Tensor])
    sparse_all_reduce(indices, values, 10, op="max")  # type: ignore[call-overload]
    sparse_all_reduce(indices, values, 10, algorithm="gahter")  # type: ignore[call-overload]
