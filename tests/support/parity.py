"""Whether the backend "cuda" writes the bytes of the reference, over some steps of a codec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gradwire.compress import Codec, new_draw
from gradwire.compress.backends import use_backend
from strategies import gradient, hostile_wires, parts_of, same
from torch import Tensor


def rows_of(codec: Codec, numel: int, wires: Sequence[Tensor]) -> list[Tensor]:
    """The wires as `decode_mean` takes them: the ranks' rows, part by part."""
    parts = [wire.split(codec.part_bytes(numel)) for wire in wires]
    return [torch.stack(rows) for rows in zip(*parts, strict=True)]


def steps(codec: Codec, numel: int, kinds: Sequence[str], dtype: torch.dtype, offset: int) -> list[Tensor]:
    """What the backend in use makes of some steps with feedback: wires, the residual, a mean over them as ranks, and
    one over hostile wires, with what it counts."""
    workspace, residual = codec.workspace(numel), gradient("normal", numel, 1) * 0.1
    residual[: numel // 4] = 0
    wires = []
    for step, kind in enumerate(kinds):
        grad = torch.empty(numel + offset, dtype=dtype)[offset:].copy_(gradient(kind, numel, step, dtype))
        wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
        codec.encode_feedback(grad, residual, wire, new_draw(1, step), workspace)
        wires.append(wire)
    mean = torch.empty(numel + offset, dtype=dtype)[offset:]
    codec.decode_mean(rows_of(codec, numel, wires), mean, workspace)
    hostile = parts_of(codec, hostile_wires(codec, numel, 5, numel), numel)
    codec.decode_mean(hostile, fooled := torch.empty(numel), workspace)
    return [*wires, residual, mean, fooled, workspace.status]


def equal(codec: Codec, numel: int, kinds: Sequence[str], dtype: torch.dtype = torch.float32, offset: int = 0) -> bool:
    """Whether the backends "cuda" and "reference" agree on every byte. Tensors lie `offset` elements off alignment."""
    with use_backend("reference"):
        expected = steps(codec, numel, kinds, dtype, offset)
    with use_backend("cuda"):
        got = steps(codec, numel, kinds, dtype, offset)
    return all(same(a, b) for a, b in zip(expected, got, strict=True))
