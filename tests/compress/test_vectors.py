"""Passes over vectors: to torch's bits on every backend, at any length and address."""

from __future__ import annotations

import math

import pytest
import torch
from gradwire.compress.backends import VectorKernels, _backend
from gradwire.compress.backends.cpu.runtime import threads
from gradwire.hooks.exchanges import all_finite
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
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shift=st.integers(0, 3),
    restart=st.booleans(),
    carry=st.booleans(),
    pieces=st.integers(1, 3),
)
def test_every_backend_gives_torch_s_bits(
    backend: str,
    numel: int,
    kinds: tuple[str, ...],
    dtype: torch.dtype,
    shift: int,
    restart: bool,
    carry: bool,
    pieces: int,
) -> None:
    found, device = [], device_of(backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "pieces_of", lambda elements, count: min(pieces, count))
        for kernels in (_backend(backend).vectors, VectorKernels()):
            made = [gradient(kind, numel, seed) for seed, kind in enumerate(kinds)]
            agreed, step, own = (placed(x, torch.float32, shift, device) for x in made)
            own = placed(own, dtype, shift, device)
            kernels.difference(agreed, own, step, restart)
            found.append([agreed.clone(), step.clone(), own.clone()])
            step = placed(made[1], torch.float32, shift, device)
            kernels.descend(agreed, step, own, carry)
            found[-1] += [agreed, step, own, kernels.all_finite(own), kernels.all_finite(agreed)]
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
