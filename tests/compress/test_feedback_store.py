"""What codecs touch, what they draw, and what they keep while a real model learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from gradwire import QSGD, Codec, TernGrad, TopK
from gradwire.compress import new_draw
from gradwire.compress.backends import backend_names, use_backend
from gradwire.compress.backends.reference import arithmetic
from gradwire.compress.codec import DTYPES
from guarded import Room
from strategies import VARIANTS, gradient, same
from torch import Tensor


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.close()


@pytest.mark.parametrize("end", ["front", "back"])
@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("codec", VARIANTS, ids=str)
def test_nothing_is_touched_outside_the_arguments(codec: Codec, backend: str, end: str, room: Room) -> None:
    def guarded(tensor: Tensor) -> Tensor:
        return room.put(tensor, end)

    for numel, dtype in ((1, DTYPES[0]), (3, DTYPES[1]), (65, DTYPES[2]), (1281, DTYPES[0]), (3001, DTYPES[1])):
        x, draw = gradient("normal", numel, numel, dtype), new_draw(11, 3, 5)
        wire, target = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8), torch.zeros(numel, dtype=dtype)
        with use_backend(backend):
            workspace = codec.workspace(numel)
            codec.encode_feedback(x, torch.ones(numel), wire, draw, workspace)
            codec.encode_feedback(guarded(x), torch.ones(numel), torch.zeros_like(wire), draw, workspace)
            codec.encode_feedback(x, guarded(torch.ones(numel)), torch.zeros_like(wire), draw, workspace)
            written = guarded(torch.zeros_like(wire))
            codec.encode_feedback(x, torch.ones(numel), written, draw, workspace)
            assert same(written.clone(), wire)
            codec.decode_add(guarded(wire), torch.zeros(numel), 1.0, workspace)
            codec.decode_add(wire, guarded(torch.zeros(numel)), 1.0, workspace)
            parts = [part.clone()[None] for part in wire.split(codec.part_bytes(numel))]
            codec.decode_mean(parts, guarded(target), workspace)
            for i, part in enumerate(parts):
                codec.decode_mean([*parts[:i], guarded(part[0])[None], *parts[i + 1 :]], target, workspace)
            assert room.untouched()


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("codec", [QSGD(bits=2, block=256), QSGD(bits=2), TernGrad(clip=math.inf)], ids=str)
@pytest.mark.parametrize("ids", [(0, 0, 0), (-1, 7, -1), (0x299F31D0A4093822, 0x113198A2E, 3 << 40 | 5)])
def test_the_wire_shows_the_very_draws_of_philox(backend: str, codec: Codec, ids: tuple[int, int, int]) -> None:
    numel, block = 4000, codec.block_size
    words = arithmetic.philox(*ids, np.arange(numel // 8)).astype("<u4").view("<u2").reshape(-1)
    draws = torch.from_numpy(words.astype(np.float32))
    workspace = codec.workspace(numel)
    # One minus a draw's share rounds up to one; a 2^-16 less of it does not.
    for below, expected in ((0, 1.0), (1, 0.0)):
        x = 1 - (draws + below) / 65536
        x[::block] = 1.0  # every block's scale
        wire, out = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8), torch.zeros(numel)
        with use_backend(backend):
            codec.encode(x, wire, new_draw(*ids), workspace)
            codec.decode_add(wire, out, 1.0, workspace)
        out[::block] = expected
        assert bool((out == expected).all())


def learn(feedback: Callable[[Tensor, int], Tensor]) -> float:
    """400 steps of logistic regression on gradients that went through `feedback`; final loss over the first."""
    generator = torch.Generator().manual_seed(3)
    inputs, truth = torch.randn(512, 640, generator=generator), torch.randn(640, 4, generator=generator)
    labels = (inputs @ truth).argmax(1)
    weights = torch.zeros(640, 4)
    first = float(torch.nn.functional.cross_entropy(inputs @ weights, labels))
    for step in range(400):
        rows = torch.randint(0, 512, (64,), generator=generator)
        wrong = (inputs[rows] @ weights).softmax(1)
        wrong[torch.arange(64), labels[rows]] -= 1
        weights -= 0.1 * feedback((inputs[rows].T @ wrong / 64).reshape(-1), step).view(640, 4)
    loss = float(torch.nn.functional.cross_entropy(inputs @ weights, labels))
    return loss / first


def residual_of_learning(codec: Codec) -> tuple[float, float]:
    """The largest residual in units of the largest gradient, both in norm, and how far the loss fell."""
    numel = 2560
    residual, wire = torch.zeros(numel), torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
    workspace = codec.workspace(numel)
    largest = {"gradient": 0.0, "residual": 0.0}

    def feedback(grad: Tensor, step: int) -> Tensor:
        largest["gradient"] = max(largest["gradient"], float(grad.norm()))
        codec.encode_feedback(grad, residual, wire, new_draw(0, step), workspace)
        largest["residual"] = max(largest["residual"], float(residual.norm()))
        out = torch.zeros(numel)
        codec.decode_add(wire, out, 1.0, workspace)
        return out

    fell = learn(feedback)
    return largest["residual"] / largest["gradient"], fell


@pytest.mark.parametrize("codec", [c for c in VARIANTS if not c.lossless and c != TopK(0.001)], ids=str)
def test_residuals_stay_bounded_while_a_model_learns(codec: Codec) -> None:
    residual, loss = residual_of_learning(codec.with_feedback())
    assert residual < 60
    assert loss < 0.7


def test_feedback_around_an_expanding_code_is_noticed() -> None:
    residual, _ = residual_of_learning(QSGD(bits=2, block=2560, norm="l2"))
    assert residual > 60
