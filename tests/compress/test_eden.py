"""EDEN: rotations make any elements normal, so that few levels leave what they leave of normal numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradwire.compress import EDEN, Codec, TernGrad, new_draw
from gradwire.compress.backends import use_backend
from gradwire.compress.backends.reference.eden import hadamard, signs
from strategies import ALL_BACKENDS, decode, device_of, encode, same
from torch import Tensor

NUMEL = 51200
every_level = pytest.mark.parametrize("levels", [2, 3])


def of_kind(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUMEL, generator=generator)
    if kind == "heavy":  # Student's t with three degrees of freedom
        x = x / torch.randn(3, NUMEL, generator=generator).square().mean(0).sqrt()
    if kind == "scaled":  # each 256 elements have a size of their own
        x = x * torch.logspace(-3, 3, NUMEL // 256).repeat_interleave(256)
    return x


def error(codec: Codec, x: Tensor, step: int = 0) -> float:
    """The share of Σx² that the code leaves."""
    return float((decode(codec, encode(codec, x, new_draw(1, step)), len(x)) - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("kind", ["normal", "heavy", "scaled"])
def test_the_error_is_that_of_normal_numbers(kind: str) -> None:
    x = of_kind(kind)
    assert 0.2 < error(EDEN(), x) < 0.245
    assert 0.16 < error(EDEN(scale="closest"), x) < 0.2
    assert error(TernGrad(), x) > 2 * error(EDEN(), x)
    assert 0.5 < error(EDEN(levels=2), x) < 0.59  # π/2 - 1
    assert 0.32 < error(EDEN(scale="closest", levels=2), x) < 0.38  # 1 - 2/π


@pytest.mark.parametrize(
    ("levels", "count", "share", "low", "high"),
    [
        *((3, 1, 0.0, 0.98, 1.02), (3, 1, 0.8, 0.9, 1.1), (3, 1, 0.99, 0.0, 0.1), (3, 2, 0.9, 0.2, 0.5)),
        *((3, 3, 0.96, 1.9, 2.5), (2, 1, 0.0, 0.98, 1.02), (2, 1, 0.5, 0.75, 0.9), (2, 1, 0.8, 0.2, 0.35)),
        *((2, 2, 0.9, 1.4, 1.8), (2, 3, 0.96, 0.0, 0.15)),
    ],
)
def test_what_few_far_larger_elements_of_256_hide_or_magnify(
    levels: int, count: int, share: float, low: float, high: float
) -> None:
    """How much of the others arrives on average, beside some that have a share of Σx²."""
    codec, x = EDEN(levels=levels), of_kind("normal")[:5120]
    rows = x.view(-1, 256)
    large = torch.arange(count) * 31 + 7
    rows[:, large] = 0
    rows[:, large] = (rows.square().sum(1).sqrt() * (share / (1 - share) / count) ** 0.5)[:, None]
    mean = sum(decode(codec, encode(codec, x, new_draw(1, step)), len(x)) for step in range(200)) / 200
    others = ~torch.isin(torch.arange(5120) % 256, large)
    assert low <= float((mean * x)[others].sum() / x[others].square().sum()) <= high


@pytest.mark.parametrize("rows", [5, 8])
def test_a_rotation_changes_no_length_and_undoes_itself(rows: int) -> None:
    x = of_kind("normal").numpy().reshape(-1, rows, 256)
    turns = signs(np.arange(len(x), dtype=np.uint16), rows)
    turned = hadamard(x * turns)
    assert np.allclose(np.square(turned).sum(2), 256 * np.square(x).sum(2), rtol=1e-5)
    assert np.allclose(hadamard(turned) * turns, 256 * x, atol=1e-3)
    drawn = signs(np.arange(1 << 12, dtype=np.uint16), rows)
    assert np.abs(drawn.mean(0)).max() < 6 / 64
    assert np.abs(drawn.mean((1, 2))).max() < 6 / (256 * rows) ** 0.5


@every_level
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_scales_whose_sums_overflow_are_counted(backend: str, levels: int) -> None:
    codec, device = EDEN(levels=levels), device_of(backend)
    numel = codec.block_size
    for row in range(numel // 256):
        wire = encode(codec, of_kind("normal")[:numel]).to(device)
        wire[2 * row : 2 * row + 2] = 0x7F
        with use_backend(backend):
            workspace = codec.workspace(numel, device)
            codec.decode_add(wire, torch.zeros(numel, device=device), 1.0, workspace)
        assert workspace.status.tolist() == [0, 1]


@every_level
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_zeros_are_zeros_on_the_wire_and_stay_what_they_are(backend: str, levels: int) -> None:
    codec, device = EDEN(scale="closest", levels=levels), device_of(backend)
    numel = codec.block_size
    x, residual = (torch.full((numel,), -0.0, device=device) for _ in range(2))
    wire = torch.full((codec.wire_bytes(numel),), 0xA5, dtype=torch.uint8, device=device)
    with use_backend(backend):
        codec.encode_feedback(x, residual, wire, None, codec.workspace(numel, device))
    assert not wire.any()
    assert same(residual, x)


def test_three_levels_have_the_text_of_before_there_were_two() -> None:
    """Checkpoints name their codec by it."""
    assert [str(EDEN()), str(EDEN("closest", 3))] == ["EDEN(scale='unbiased')", "EDEN(scale='closest')"]
    assert str(EDEN(levels=2).with_feedback()) == "EDEN(scale='closest', levels=2)"
    with pytest.raises(ValueError, match="levels=4: expected one of 2, 3"):
        EDEN(levels=4)
