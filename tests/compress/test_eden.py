"""EDEN: rotations make any elements normal, so that three levels leave what they leave of normal numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradwire.compress import EDEN, Codec, TernGrad, new_draw
from gradwire.compress.backends import use_backend
from gradwire.compress.backends.reference.eden import hadamard, signs
from strategies import ALL_BACKENDS, decode, device_of, encode
from torch import Tensor

NUMEL = 51200


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


@pytest.mark.parametrize(
    ("count", "share", "low", "high"),
    [(1, 0.0, 0.98, 1.02), (1, 0.8, 0.9, 1.1), (1, 0.99, 0.0, 0.1), (2, 0.9, 0.2, 0.5), (3, 0.96, 1.9, 2.5)],
)
def test_what_few_far_larger_elements_of_256_hide_or_magnify(count: int, share: float, low: float, high: float) -> None:
    """How much of the others arrives on average, beside some that have a share of Σx²."""
    x = of_kind("normal")[:5120]
    rows = x.view(-1, 256)
    large = torch.arange(count) * 31 + 7
    rows[:, large] = 0
    rows[:, large] = (rows.square().sum(1).sqrt() * (share / (1 - share) / count) ** 0.5)[:, None]
    mean = sum(decode(EDEN(), encode(EDEN(), x, new_draw(1, step)), len(x)) for step in range(200)) / 200
    others = ~torch.isin(torch.arange(5120) % 256, large)
    assert low <= float((mean * x)[others].sum() / x[others].square().sum()) <= high


def test_a_rotation_changes_no_length_and_undoes_itself() -> None:
    x = of_kind("normal").numpy().reshape(-1, 5, 256)
    turned = hadamard(x * signs(np.arange(len(x), dtype=np.uint16)))
    assert np.allclose(np.square(turned).sum(2), 256 * np.square(x).sum(2), rtol=1e-5)
    assert np.allclose(hadamard(turned) * signs(np.arange(len(x), dtype=np.uint16)), 256 * x, atol=1e-3)
    drawn = signs(np.arange(1 << 12, dtype=np.uint16))
    assert np.abs(drawn.mean(0)).max() < 6 / 64
    assert np.abs(drawn.mean((1, 2))).max() < 6 / 1280**0.5


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_scales_whose_sums_overflow_are_counted(backend: str) -> None:
    wire = encode(EDEN(), of_kind("normal")[:1280])
    wire[:10] = torch.tensor([0x7F] * 10, dtype=torch.uint8)
    with use_backend(backend):
        workspace = EDEN().workspace(1280, device_of(backend))
        EDEN().decode_add(wire.to(device_of(backend)), torch.zeros(1280, device=device_of(backend)), 1.0, workspace)
    assert workspace.status.tolist() == [0, 1]
