"""Codecs that change in the course of training."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from gradwire import TopK, schedules
from hypothesis import given
from hypothesis import strategies as st


def densities(schedule: schedules.Stages, steps: int) -> list[float]:
    found = [schedule(step) for step in range(steps)]
    assert all(isinstance(codec, TopK) for codec in found)
    return [codec.density for codec in found if isinstance(codec, TopK)]


@given(st.floats(1e-6, 1.0), st.integers(0, 40), st.integers(1, 9))
def test_densities_fall_as_published(density: float, warmup: int, stages: int) -> None:
    """Epoch by epoch as in the published code, epochs being of equal length."""
    schedule = schedules.dgc(density, warmup_steps=warmup, stages=stages)
    found = densities(schedule, warmup + 3)
    assert found == sorted(found, reverse=True)
    assert found[warmup:] == [density] * 3
    coefficient = density ** (1 / (stages + 1))
    for step, one in enumerate(found[:warmup]):
        epoch = step * stages // warmup
        assert one == pytest.approx(max(coefficient ** (epoch + 1), density), rel=1e-5)


def test_a_stage_has_one_codec() -> None:
    schedule = schedules.dgc(0.01, warmup_steps=20, values=torch.int8)
    assert len({id(schedule(step)) for step in range(100)}) == 6
    assert schedule(99) == TopK(0.01, values=torch.int8)
    assert pickle.loads(pickle.dumps(schedule)) == schedule == schedules.dgc(0.01, warmup_steps=20, values=torch.int8)
    assert schedule != schedules.dgc(0.01, warmup_steps=21, values=torch.int8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"density": 0.0}, "density=0.0: expected a number in"),
        ({"density": 1.5}, "density=1.5: expected a number in"),
        ({"density": float("nan")}, "density=nan: expected a number in"),
        ({"density": True}, "density=True: expected a number in"),
        ({"warmup_steps": -1}, "warmup_steps=-1: expected a whole number of 0 or more"),
        ({"warmup_steps": 2.5}, "warmup_steps=2.5: expected a whole number of 0 or more"),
        ({"stages": 0}, "stages=0: expected a whole number of 1 or more"),
        ({"stages": True}, "stages=True: expected a whole number of 1 or more"),
        ({"values": torch.float16}, "values=torch.float16: expected one of"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match="^" + expected.replace(".", r"\.")):
        schedules.dgc(**{"warmup_steps": 10, **options})
