"""Passes over vectors: to torch's bits on every backend, at any length and address."""

from __future__ import annotations

import math

import pytest
import torch
from gradwire.compress.backends import MomentumKernels, TrackingKernels, VectorKernels, _backend, all_finite
from gradwire.compress.backends.cpu.runtime import threads
from gradwire.compress.codec import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ALL_BACKENDS, KINDS, device_of, gradient, same
from torch import Tensor

NUMELS = st.one_of(st.integers(1, 200), st.sampled_from([8191, 8192, 8257, 20_001]))


def placed(x: Tensor, dtype: torch.dtype, shift: int, device: torch.device) -> Tensor:
    """A copy, at an address that no vector is aligned to."""
    return torch.empty(len(x) + shift, dtype=dtype, device=device)[shift:].copy_(x)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    numel=NUMELS,
    kinds=st.tuples(*[st.sampled_from(tuple(KINDS))] * 3),
    dtype=st.sampled_from(DTYPES),
    shift=st.integers(0, 3),
    restart=st.booleans(),
    carry=st.booleans(),
    share=st.sampled_from([0.1, 0.25, 1.0]),
    pieces=st.integers(1, 3),
)
def test_every_backend_gives_torch_s_bits(
    backend: str, numel: int, kinds: tuple[str, ...], dtype: torch.dtype, shift: int, restart: bool, carry: bool,
    share: float, pieces: int,
) -> None:  # fmt: skip
    """Passes of sums, of periodic updates, of Tracking, Lead and Momentum."""
    found, device, ours = [], device_of(backend), _backend(backend)
    made = [gradient(kind, numel, seed) for seed, kind in enumerate(kinds)]
    made.append(made[0].where(made[0].isfinite(), 0.0))  # nothing else is ever in a momentum

    def put(place: int, kind: torch.dtype = torch.float32) -> Tensor:
        return placed(made[place], kind, shift, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "pieces_of", lambda elements, count: min(pieces, count))
        for vectors, tracking, momentum in (
            (ours.vectors, ours.tracking, ours.momentum),
            (VectorKernels(), TrackingKernels(), MomentumKernels()),
        ):
            agreed, step, own = put(0), put(1), put(2, dtype)
            vectors.difference(agreed, own, step, restart)
            written = [agreed.clone(), step, own.clone()]
            vectors.descend(agreed, step := put(1), own, carry)
            written += [agreed, step, own, vectors.all_finite(own), vectors.all_finite(agreed)]
            written += [vectors.accumulate(part := put(1), summed := put(0)), part, summed]
            change, kept, estimate, total, past, led = put(0), put(3), put(0), put(1), put(0), put(1)
            tracking.change(put(2, dtype), kept, share, change)
            sound = tracking.follow(estimate, total)
            assert not sound or bool(total.isfinite().all())
            assert sound or backend == "cuda" or not total.isfinite().all()
            tracking.lead(past, led, 0.9, 0.4)
            written += [change, kept, estimate, total, past, led]
            tracking.divide(put(2, dtype), magnitudes := put(3).abs_(), quotient := put(0))
            tracking.multiply(handed_out := put(1), magnitudes, 0.9)
            written += [quotient, handed_out, magnitudes]
            momentum.enter(put(2, dtype), entered := put(3), 0.8, restart, out := put(0))
            found.append([*written, entered, out])
    assert all(same(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("numel", [1, 64, 65, 9000])
def test_one_that_is_not_finite_is_found_wherever_it_is(
    bad: float, backend: str, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "pieces_of", lambda elements, count: min(3, count))
    kernels, device = _backend(backend).vectors, device_of(backend)
    largest = torch.full((numel,), torch.finfo(torch.float32).max, device=device)
    for at in {0, numel // 2, numel - 1}:
        for x in (largest, -largest):
            assert bool(kernels.all_finite(x))
            x = x.clone()
            x[at] = bad
            assert not bool(kernels.all_finite(x))


def test_tensors_with_gaps_and_empty_ones_are_searched_too() -> None:
    x = torch.zeros(6, 4)
    x[3, 1] = math.inf
    assert bool(all_finite(x[:, ::2]))
    assert not bool(all_finite(x[:, 1::2]))
    assert not bool(all_finite(x.t()))
    assert not bool(all_finite(torch.complex(x, x).conj().imag))
    assert bool(all_finite(torch.zeros(0)))
