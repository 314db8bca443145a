"""Work that grows by the number of parameters, and not by its square: calls of functions, not their time."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
from fronts import FRONTS
from gradwire import OneBit, TopK
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.compress.formats.layout import Slot, end_to_end, layout_numel
from ranks import Ranks
from torch import Tensor, nn


@contextmanager
def counted(name: str | None = None) -> Iterator[list[int]]:
    """The number of calls of functions in Python, or of those of a name, and of steps of generators, on this thread."""
    calls = [0]

    def see(frame: FrameType, event: str, argument: object) -> None:
        calls[0] += event == "call" and (name is None or frame.f_code.co_name == name)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def slots(count: int) -> list[Slot]:
    return [Slot(f"layer {place}", 8 * place, (8,), (1,)) for place in range(count)]


def life(count: int, each: int) -> int:
    """Calls in the life of a memory: residuals move from buckets of some parameters to others, are saved and loaded."""
    with counted() as calls:
        memory = FeedbackStore(keep_previous=True)
        for order in (slots(count), slots(count)[::-1]):
            layouts = [end_to_end(order[start : start + each]) for start in range(0, count, each)]
            for layout in layouts:
                memory.of(layout).snapshot()
            for layout in layouts:
                memory.drain(layout, torch.zeros(layout_numel(layout)))
            memory.load(memory.everything())
        for layout in layouts:
            memory.drain(layout, torch.zeros(layout_numel(layout)))
            memory.let_go(layout)
    return calls[0]


@pytest.mark.parametrize("each", [1, 1000])
def test_memory_grows_with_parameters(each: int) -> None:
    life(50, each)
    assert life(400, each) < 2.5 * life(200, each)


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([*self.parts]).sum() * x


def first_steps(rank: int, name: str, count: int) -> int:
    warnings.simplefilter("ignore")
    with counted() as calls:
        front = FRONTS[name](Many(count), TopK(0.1) if name == "horovod" else OneBit())
        for _ in range(3):
            front.step(torch.ones(()))
        front.state.load_state_dict(front.state.state_dict())
        front.state.consolidated_state_dict()
    return calls[0]


@pytest.mark.parametrize("front", ["ddp", "local", "adam", "horovod"])
def test_first_steps_grow_with_parameters(ranks: Ranks, front: str) -> None:
    ranks(2).run(first_steps, front, 10)
    fewer, more = (max(ranks(2).run(first_steps, front, count)) for count in (300, 600))
    assert more < 2.5 * fewer
