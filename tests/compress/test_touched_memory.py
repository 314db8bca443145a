"""The memory that codecs touch, and the numbers that they draw."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gradwire import QSGD, Codec, TernGrad
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
@pytest.mark.parametrize("codec", VARIANTS, ids=str)
def test_nothing_is_touched_outside_the_arguments(codec: Codec, end: str, room: Room) -> None:
    """On CPUs, by kernels that would not say so; the emulator's checked build does."""

    def guarded(tensor: Tensor) -> Tensor:
        return room.put(tensor, end)

    for numel, dtype in ((1, DTYPES[0]), (3, DTYPES[1]), (65, DTYPES[2]), (1281, DTYPES[0]), (3001, DTYPES[1])):
        x, draw = gradient("normal", numel, numel, dtype), new_draw(11, 3, 5)
        wire, target = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8), torch.zeros(numel, dtype=dtype)
        with use_backend("cpu"):
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
