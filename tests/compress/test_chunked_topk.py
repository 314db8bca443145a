"""`ChunkedTopK` against what its papers select, and against the best that its levels can do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gradwire.compress import ChunkedTopK, TopK
from gradwire.compress.backends import use_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import FINITE, OTHER_BACKENDS, decode, device_of, encode, gradient, same
from torch import Tensor

CHUNK, K = 4096, 64
EXACT = ChunkedTopK(values=torch.float32)

Draw = Callable[[np.random.Generator, int], np.ndarray]
#: How a gradient may be distributed, and how far above the least error of two levels theirs may be, on average.
DISTRIBUTIONS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, n: rng.standard_normal(n), 1.06),
    "laplace": (lambda rng, n: rng.laplace(size=n), 1.06),
    "uniform": (lambda rng, n: rng.uniform(-1, 1, n), 1.01),
    "student 3": (lambda rng, n: rng.standard_t(3, n), 1.06),
    "cauchy": (lambda rng, n: rng.standard_t(1, n), 1.06),
    "one outlier": (lambda rng, n: np.where(np.arange(n) == 99, 1000.0, rng.standard_normal(n)), 1.01),
}


@settings(max_examples=40, deadline=None)
@given(numel=st.integers(1, 3 * 512), kind=st.sampled_from(FINITE), seed=st.integers(0, 1000))
def test_a_chunk_is_what_topk_makes_of_it(numel: int, kind: str, seed: int) -> None:
    """Ties, zeros, and tails shorter than k among them."""
    codec, x = ChunkedTopK(k=40, chunk=512, values=torch.float32), gradient(kind, numel, seed)
    decoded = decode(codec, encode(codec, x), numel)
    for first in range(0, numel, 512):
        chunk = x[first : first + 512]
        whole = TopK(density=(min(40, len(chunk)) - 0.5) / len(chunk))
        assert whole.k(len(chunk)) == min(40, len(chunk))
        assert same(decoded[first : first + 512], decode(whole, encode(whole, chunk), len(chunk)))


@pytest.mark.parametrize("backend", OTHER_BACKENDS)
@pytest.mark.parametrize("values", [2, torch.float32], ids=str)
def test_no_chunk_misleads_the_search_in_the_next(backend: str, values: int | torch.dtype) -> None:
    """Chunks of scales far apart, of one value, with ties at the threshold, with fewer elements than are sent."""
    rng = np.random.default_rng(0)
    codec = ChunkedTopK(k=16, chunk=512, values=values)
    rows = [rng.standard_normal(512) * 2.0**scale for scale in rng.integers(-120, 120, 12)]
    rows += [np.full(512, 3.0), np.zeros(512), np.where(np.arange(512) < 9, 1e-40, 0), np.round(rows[0]), -rows[1]]
    rows += [np.where(np.arange(512) % 32, 1.0, 2.0), np.where(np.arange(512) % 33, 1.0, 2.0), np.exp(8 * rows[2] % 7)]
    rng.shuffle(rows)
    x = torch.from_numpy(np.concatenate([*rows, *rows[::-1]]).astype(np.float32))
    with use_backend("reference"):
        expected = encode(codec, x)
    with use_backend(backend):
        assert same(encode(codec, x.to(device_of(backend))).cpu(), expected)


def shares_lost(codec: ChunkedTopK, x: np.ndarray) -> np.ndarray:
    """Of each chunk: what rounding loses of Σx² of what is selected."""
    flat = torch.from_numpy(x.astype(np.float32).reshape(-1))
    sent, decoded = (decode(c, encode(c, flat), flat.numel()).view(x.shape).double().numpy() for c in (EXACT, codec))
    lost: np.ndarray = ((sent - decoded) ** 2).sum(axis=1) / (sent**2).sum(axis=1)
    return lost


def least_lost_by_two_levels(x: np.ndarray) -> np.ndarray:
    """The same for the best two levels there are: of all ways to split the selected magnitudes in two."""
    v = np.sort(np.abs(x.astype(np.float32).astype(np.float64)), axis=1)[:, -K:]
    below, split = np.cumsum(v, axis=1), np.arange(1, K)
    kept = below[:, :-1] ** 2 / split + (below[:, -1:] - below[:, :-1]) ** 2 / (K - split)
    least: np.ndarray = 1 - kept.max(axis=1) / (v**2).sum(axis=1)
    return least


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_two_levels_are_near_the_best(kind: str) -> None:
    draw, most = DISTRIBUTIONS[kind]
    rng = np.random.default_rng(2)
    x = np.stack([draw(rng, CHUNK) for _ in range(100)])
    lost, least = shares_lost(ChunkedTopK(), x), least_lost_by_two_levels(x)
    assert (lost > least - 1e-6).all()  # no code does better than the best
    assert lost.sum() < most * least.sum() + 1e-6


def test_what_two_levels_can_say_is_said_exactly() -> None:
    rows = np.zeros((4, CHUNK), np.float32)
    rows[0, ::100], rows[0, 50::100] = 3e30, -2e30
    rows[1, 7], rows[2, ::64], rows[3, :64] = 2.0**-149, -1.5, np.where(np.arange(64) % 3, 2.0, -5.0)
    rows[0, 64 * 64 :] = 0
    x = torch.from_numpy(np.where(np.cumsum(rows != 0, axis=1) <= K, rows, 0).reshape(-1))
    assert same(decode(ChunkedTopK(), encode(ChunkedTopK(), x), x.numel()), x)


def records(wire: Tensor, codec: ChunkedTopK, numel: int) -> np.ndarray:
    """The wire's records, for writing."""
    (part,) = codec.parts(numel)
    return part.view(wire.numpy())


@pytest.mark.parametrize("backend", ["reference", *OTHER_BACKENDS])
def test_hostile_indices_are_skipped_and_counted(backend: str) -> None:
    """Beyond a tail, twice, descending, and more than fit."""
    codec, numel = ChunkedTopK(k=16, chunk=512, values=torch.float32), 512 + 100
    x = torch.zeros(numel)
    x[[3, 5, 9, 40, 41]], x[512 + 99] = torch.arange(1.0, 6.0), 7.0
    wire = encode(codec, x)
    record = records(wire, codec, numel)
    # Four low bits. The first three share their upper bits, which are zero: 3, 5 and 9 become 5, 3 and 3.
    record["low"][0, 0] = sum(low % 16 << 4 * i for i, low in enumerate((5, 3, 3, 40, 41)))
    record["upper"][1, 0] |= 1 << 31  # a second entry, beyond the tail's 100 elements
    assert decode_counted(backend, codec, wire, numel) == ({5: 1.0, 40: 4.0, 41: 5.0, 611: 7.0}, [3, 0])
    record["upper"][0] = 0xFFFFFFFF  # 64 entries below 16, where there is room for 16
    found, (skipped, unsound) = decode_counted(backend, codec, wire, numel)
    assert set(found) <= {*range(16), 611}
    assert skipped + len(found) == 64 + 2
    assert unsound == 0


def decode_counted(backend: str, codec: ChunkedTopK, wire: Tensor, numel: int) -> tuple[dict[int, float], list[int]]:
    """What is not zero, by position, and what decoding has counted."""
    with use_backend(backend):
        device = device_of(backend)
        out, workspace = torch.zeros(numel, device=device), codec.workspace(numel, device)
        codec.decode_add(wire.to(device), out, 1.0, workspace)
        return {int(i): float(out[i]) for i in out.nonzero()[:, 0]}, workspace.status.tolist()


@pytest.mark.parametrize("values", [2, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["reference", *OTHER_BACKENDS])
def test_one_value_that_is_not_finite_marks_its_chunk(backend: str, values: int | torch.dtype) -> None:
    codec, numel = ChunkedTopK(k=16, chunk=512, values=values), 1100
    wire = encode(codec, gradient("normal", numel, 5))
    last = codec.parts(numel)[0].fields[-1 if values != 2 else 1].name
    records(wire, codec, numel)[last][1, -1] = 0x7F80 if values == torch.bfloat16 else np.inf
    found, status = decode_counted(backend, codec, wire, numel)
    assert {i for i, v in found.items() if v != v} == set(range(512, 1024))
    assert status == [0, 1]
