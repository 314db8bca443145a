"""`Ternary` against the best that three levels can do to a block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gradwire.compress import Ternary
from gradwire.compress.backends import use_backend
from gradwire.compress.codec import Codec
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import FINITE, decode, encode, gradient

BLOCK = 1280


def spiked(rng: np.random.Generator, n: int, size: float) -> np.ndarray:
    x = rng.standard_normal(n)
    x[n // 3] = size
    return x


def thinned(rng: np.random.Generator, n: int, share: float) -> np.ndarray:
    return rng.standard_normal(n) * (rng.random(n) < share)


#: What a block may look like, and how far above the least possible error it may end, on average over blocks.
BLOCKS = {
    "normal": (lambda rng, n: rng.standard_normal(n), 1.01),
    "laplace": (lambda rng, n: rng.laplace(size=n), 1.01),
    "uniform": (lambda rng, n: rng.uniform(-1, 1, n), 1.01),
    "student 3": (lambda rng, n: rng.standard_t(3, n), 1.01),
    "student 1.5": (lambda rng, n: rng.standard_t(1.5, n), 1.02),
    "cauchy": (lambda rng, n: rng.standard_t(1, n), 1.02),
    "lognormal": (lambda rng, n: np.exp(3 * rng.standard_normal(n)), 1.02),
    "outlier of 10": (lambda rng, n: spiked(rng, n, 10.0), 1.01),
    "outlier of 40": (lambda rng, n: spiked(rng, n, 40.0), 1.02),
    "outlier of 1000": (lambda rng, n: spiked(rng, n, 1000.0), 1.01),
    "sparse 30 %": (lambda rng, n: thinned(rng, n, 0.3), 1.02),
    "sparse 2 %": (lambda rng, n: thinned(rng, n, 0.02), 1.02),
    "two scales": (lambda rng, n: rng.standard_normal(n) * np.where(np.arange(n) % 8, 1.0, 10.0), 1.02),
}


def least_error(x: np.ndarray) -> np.ndarray:
    """Of each row: Σx² less the largest (Σ of the m largest magnitudes)² / m, over every m."""
    sorted_ = -np.sort(-np.abs(x.astype(np.float64)), axis=1)
    kept = np.cumsum(sorted_, axis=1) ** 2 / np.arange(1, x.shape[1] + 1)
    return np.maximum((sorted_**2).sum(axis=1) - kept.max(axis=1), 0.0)


def error(codec: Codec, x: np.ndarray) -> np.ndarray:
    """What a codec leaves of each row's Σx²."""
    flat = torch.from_numpy(x.reshape(-1))
    decoded = decode(codec, encode(codec, flat), flat.numel()).numpy().astype(np.float64)
    return ((x - decoded.reshape(x.shape)) ** 2).sum(axis=1)


def blocks(kind: str, rows: int, length: int = BLOCK) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([BLOCKS[kind][0](rng, length) for _ in range(rows)]).astype(np.float32)


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_error_left_is_near_the_least(kind: str) -> None:
    x = blocks(kind, 200)
    ratio = error(Ternary(), x) / least_error(x)
    assert ratio.min() > 1 - 1e-5  # no code does better than the best
    assert ratio.mean() < BLOCKS[kind][1]
    assert ratio.max() < 1.25


@pytest.mark.parametrize("kind", ["normal", "student 1.5", "outlier of 40"])
@pytest.mark.parametrize("length", [1, 2, 3, 10, 100, 1000])
def test_the_error_left_of_a_tail_is_near_the_least(kind: str, length: int) -> None:
    x = blocks(kind, 60, length)
    for row, least in zip(x, least_error(x), strict=True):
        assert error(Ternary(), row[None])[0] <= 1.5 * least + 1e-6 * float((row.astype(np.float64) ** 2).sum())


def test_what_three_levels_can_say_is_said_exactly() -> None:
    """A constant, signs, one element among zeros, a constant with zeros, and no element at all."""
    rows = np.zeros((6, BLOCK), np.float32)
    rows[0], rows[1] = -1.5, np.where(np.arange(BLOCK) % 3, 0.7, -0.7)
    rows[2, 77], rows[3, ::5], rows[4, 9] = -3e30, 2.0**-149, 1e-38
    assert not error(Ternary(), rows).any()


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, BLOCK),
    kind=st.sampled_from(FINITE),
    scale=st.integers(-130, 90),
    seed=st.integers(0, 1000),
)
def test_it_contracts_and_no_scale_matters(length: int, kind: str, scale: int, seed: int) -> None:
    """Every element moves towards zero or to the level nearest to it; powers of two change the level alone."""
    x = gradient(kind, length, seed)
    decoded = decode(Ternary(), encode(Ternary(), x), length)
    assert bool(((x - decoded).abs() <= x.abs()).all())
    level = decoded.abs().max()
    assert bool((decoded.abs()[x.abs() > level / 2] == level).all())
    assert not decoded[x.abs() <= level / 2].any()
    assert bool(level > 0) == bool((x != 0).any())
    if kind in ("normal", "ties"):
        factor = 2.0**scale
        assert torch.equal(decode(Ternary(), encode(Ternary(), x * factor), length), decoded * factor)


def test_of_normal_numbers_the_level_and_the_threshold_are_the_known_ones() -> None:
    """Max, "Quantizing for minimum distortion", 1960, table I, three levels: ±1.224, with thresholds at ±0.612."""
    x = np.random.default_rng(1).standard_normal((1, 51 * BLOCK)).astype(np.float32)
    codec = Ternary(block=51 * BLOCK)
    decoded = decode(codec, encode(codec, torch.from_numpy(x[0])), x.size).numpy()
    assert np.abs(decoded).max() == pytest.approx(1.224, rel=0.02)
    assert np.abs(x[0][decoded != 0]).min() == pytest.approx(0.612, rel=0.02)
    assert error(codec, x)[0] / float((x.astype(np.float64) ** 2).sum()) == pytest.approx(0.190, abs=0.002)


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_the_search_leaves_out_could_not_have_won(kind: str) -> None:
    """It takes four thresholds at a time, and stops where no higher one can be better: the bytes are the same."""
    for scale in (1.0, 2.0**-140, 1e37 / float(np.abs(blocks(kind, 40)).max())):
        x, sides = torch.from_numpy(blocks(kind, 40).reshape(-1) * np.float32(scale)), []
        for backend in ("reference", "cpu"):
            with use_backend(backend):
                sides.append(encode(Ternary(), x))
        assert torch.equal(*sides)
