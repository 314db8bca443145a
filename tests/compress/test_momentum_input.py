"""A codec that reads what comes out of a momentum does as if it were given that: fused equals composed, to the bit."""

from __future__ import annotations

import pytest
import torch
from gradwire import Codec, Momentum, OneBit, Tracking
from gradwire.compress import new_draw
from gradwire.compress.backends import backend_for
from gradwire.compress.backends.cpu.runtime import threads as cpu_threads
from gradwire.compress.backends.kernels import Kernels
from gradwire.compress.feedback.base import Feedback, FeedbackState
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ODD, VARIANTS, same

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "strategy", [Tracking(), Tracking(0.0), Momentum(masking=False), Momentum(nesterov=True)], ids=str
)
@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(VARIANTS),
    st.one_of(st.integers(1, 300), st.integers(4000, 9000)),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.lists(ODD, max_size=6),
    st.data(),
)
def test_fused_is_composed(
    strategy: Feedback,
    codec: Codec,
    numel: int,
    shift: int,
    dtype: torch.dtype,
    threads: int,
    odd: list[float],
    data: st.DataObject,
) -> None:
    """With tails, on several threads, at addresses that no vector is aligned to."""
    codec = codec.with_feedback()
    before, generator = torch.get_num_threads(), torch.Generator().manual_seed(numel)
    grads = torch.randn(2, numel, generator=generator).to(dtype)
    for value in odd:
        grads[data.draw(st.integers(0, 1)), data.draw(st.integers(0, numel - 1))] = value
    found = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_threads, "ELEMENTS_PER_THREAD", 1000)
            for fused in (True, False):
                torch.set_num_threads(threads if fused else 1)
                vectors = {name: torch.zeros(numel + shift)[shift:] for name in strategy.state_names}
                kept, workspace = FeedbackState(strategy, vectors), codec.workspace(numel)
                wires = torch.zeros(2, codec.wire_bytes(numel), dtype=torch.uint8)
                if not fused:
                    patch.setattr(type(workspace.kernels), "encode_momentum", Kernels.encode_momentum)
                for step, grad in enumerate(grads):
                    own = torch.zeros(numel + shift, dtype=dtype)[shift:].copy_(grad)
                    kept.encode(codec, own, wires[step], new_draw(1, step), workspace)
                found.append([wires, *vectors.values()])
    finally:
        torch.set_num_threads(before)
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_what_does_not_match_is_refused() -> None:
    codec, wire = OneBit(), torch.zeros(OneBit().wire_bytes(8), dtype=torch.uint8)
    momentum_input = backend_for(CPU).tracking.changing(torch.ones(8), torch.zeros(8), 0.1)
    with pytest.raises(ValueError, match="residual has 9 elements, grad 8: they must match"):
        codec.encode_momentum(momentum_input, torch.zeros(9), wire, None, codec.workspace(8))
    with pytest.raises(TypeError, match="residual has dtype"):
        codec.encode_momentum(momentum_input, torch.zeros(8, dtype=torch.float64), wire, None, codec.workspace(8))
    with pytest.raises(ValueError, match="contiguous bytes"):
        codec.encode_momentum(momentum_input, torch.zeros(8), wire[1:], None, codec.workspace(8))
