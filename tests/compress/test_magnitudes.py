"""Magnitudes: every element's error is in proportion to how large the element has been."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gradwire import EDEN, QSGD, Codec, Identity, Magnitudes, OneBit, TernGrad, TopK
from gradwire.benchmarks.learning.ranks import InProcessRanks
from gradwire.compress import new_draw
from gradwire.compress.feedback.base import FeedbackState
from gradwire.compress.feedback.magnitudes import MAGNITUDE
from gradwire.compress.formats.layout import Slot
from gradwire.hooks.core.options import Options
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ODD, parts_of
from test_feedback import hold
from torch import Tensor

UNBIASED = [EDEN(), TernGrad(), QSGD(), QSGD(bits=2, block=256)]


@pytest.mark.parametrize("codec", UNBIASED, ids=str)
def test_the_magnitudes_are_those_of_what_was_handed_out_whatever_happens(codec: Codec) -> None:
    hold(Magnitudes(), codec, unapplied=False)


@settings(deadline=None, max_examples=60)
@given(
    numel=st.one_of(st.integers(1, 300), st.integers(4000, 5000)),
    spread=st.integers(0, 60),
    odd=st.lists(ODD, max_size=3),
    seed=st.integers(0, 99),
)
def test_what_is_sent_whole_is_handed_out(numel: int, spread: int, odd: list[float], seed: int) -> None:
    """Whatever the magnitudes are, and where they are not alike."""
    generator = torch.Generator().manual_seed(seed)
    kept = FeedbackState(Magnitudes(), {MAGNITUDE: torch.zeros(numel)})
    for _ in range(3):
        exponents = torch.randint(-spread, spread + 1, (numel,), generator=generator)
        grad = torch.randn(numel, generator=generator) * 2.0**exponents
        grad[torch.randint(numel, (len(odd),), generator=generator)] = torch.tensor(odd)
        mean = kept.flush(grad)
        kept.deliver(mean)
        normal = ~(grad.abs() <= 2.0**-115)  # others become subnormal
        torch.testing.assert_close(mean[normal], grad[normal], rtol=2.0**-22, atol=0.0, equal_nan=True)
        assert bool(kept[MAGNITUDE].isfinite().all())


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(UNBIASED), st.sampled_from([200, 256, 1500]), st.integers(0, 9))
def test_the_mean_over_draws_is_the_gradient(codec: Codec, numel: int, seed: int) -> None:
    generator, draws = torch.Generator().manual_seed(seed), 400
    grad = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).square()
    magnitudes = grad.abs() * torch.rand(numel, generator=generator) * 2
    wire, workspace = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8), codec.workspace(numel)
    total, squares = torch.zeros(2, numel, dtype=torch.float64)
    for step in range(draws):
        kept = FeedbackState(Magnitudes(), {MAGNITUDE: magnitudes.clone()})
        kept.encode(codec, grad, wire, new_draw(seed, step), workspace)
        out = torch.zeros(numel)
        codec.decode_mean(parts_of(codec, wire[None], numel), out, workspace)
        kept.deliver(out)
        total += out
        squares += out.double().square()
    deviation = (squares / draws - (total / draws).square()).clamp_min(0).sum().sqrt() / math.sqrt(draws)
    # EDEN is unbiased where no few elements are far larger than the others.
    bound = 4.0 * float(deviation) + (0.05 * float(grad.norm()) if isinstance(codec, EDEN) else 1e-3)
    assert float((total / draws - grad).norm()) <= bound


def errors(strategy: Magnitudes | None) -> tuple[float, float]:
    """The relative error of the small and of the large elements of a gradient, after some steps."""
    numel, generator = 2560, torch.Generator().manual_seed(0)
    small = torch.arange(numel) % 2 == 0
    ranks = InProcessRanks(2, (Slot("a", 0, (numel,), (1,)),), EDEN(), "two_pass", strategy)
    found: list[tuple[Tensor, Tensor]] = []
    for step in range(80):
        gradients = torch.randn(2, numel, generator=generator) * torch.where(small, 0.125, 1.0)
        mean = gradients.mean(0)
        if step >= 40:
            found.append((ranks.reduce(list(gradients)) - mean, mean))
        else:
            ranks.reduce(list(gradients))
    off, size = (torch.cat([pair[i] for pair in found]).view(-1, numel).square().sum(0) for i in (0, 1))
    return tuple(float((off[which].sum() / size[which].sum()).sqrt()) for which in (small, ~small))  # type: ignore[return-value]


def test_small_elements_beside_large_ones_have_an_error_of_their_own_size() -> None:
    """Without it the small ones' is that of the large ones."""
    plain, divided = errors(None), errors(Magnitudes())
    assert plain[0] > 3.0
    assert divided[0] < plain[0] / 2.5
    assert divided[1] < 1.5 * plain[1]


@pytest.mark.parametrize("codec", [OneBit(), TopK(0.1), EDEN(scale="closest"), QSGD(rounding="nearest")], ids=str)
def test_a_codec_that_needs_a_residual_is_refused(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"Magnitudes.* keeps no residual, without which .* is biased: take an unb"):
        Options(codec, error_feedback=Magnitudes()).choice(0)


@pytest.mark.parametrize("codec", [*UNBIASED, Identity()], ids=str)
def test_a_codec_keeps_its_form(codec: Codec) -> None:
    assert Options(codec, error_feedback=Magnitudes()).choice(0).codec == codec


@pytest.mark.parametrize("beta", [1.0, -0.1, math.nan, True, "most"])
def test_another_beta_is_refused(beta: Any) -> None:
    with pytest.raises(ValueError, match=r"beta=.*expected a number in \[0, 1\)"):
        Magnitudes(beta)
