"""Momentum: what is handed out is the ranks' own momentum, of which nothing is lost, as Deep Gradient Compression."""

from __future__ import annotations

import pytest
import torch
from gradwire import QSGD, Codec, Momentum, OneBit, Residual, TopK
from gradwire.benchmarks.learning.ranks import InProcessRanks
from gradwire.compress import SparseCodec, new_draw
from gradwire.compress.backends import MomentumKernels, _backend, use_backend
from gradwire.compress.feedback.base import RESIDUAL, FeedbackState
from gradwire.compress.feedback.momentum import MOMENTUM
from gradwire.compress.feedback.store import FeedbackStore
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_of_chunk import LargestOfChunk
from strategies import ALL_BACKENDS, FINITE, OTHER_BACKENDS, device_of, gradient, same
from test_feedback import layout_of
from torch import Tensor, nn
from toys import AboveMean, Stretch

BETA, I8 = 0.8, torch.int8
KINDS = [Momentum(BETA), Momentum(BETA, nesterov=True), Momentum(BETA, masking=False), Momentum(0.0)]


# -- the laws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", OTHER_BACKENDS)
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 600), st.integers(0, 3), st.data())
def test_entries_are_masked_as_by_torch(backend: str, numel: int, shift: int, data: st.DataObject) -> None:
    """torch on the CPU: its atomics on a GPU take subnormal numbers for zeros. Also off any alignment."""
    momentum = gradient(data.draw(st.sampled_from(FINITE)), numel, numel)
    chosen = sorted(data.draw(st.sets(st.integers(0, numel - 1), max_size=numel)))
    used, indices = len(chosen), torch.tensor([*chosen, 0, -1], dtype=torch.int32)
    values = torch.cat([data.draw(st.sampled_from([0.0, 1.0, torch.inf])) * momentum[chosen], torch.ones(2)])
    count, found = torch.tensor([used], dtype=torch.int32), []
    for kernels, device in ((_backend(backend).momentum, device_of(backend)), (MomentumKernels(), torch.device("cpu"))):
        at, numbers = indices.to(device), values.to(device)
        u = torch.empty(numel + shift, device=device)[shift:].copy_(momentum)
        before = kernels.mask(u, at, numbers, count.to(device))[:used]
        assert torch.equal(before.cpu(), momentum[chosen])
        if used % 2:
            kernels.mask(u, at[:used], numbers[:used])  # once more, which changes nothing
        found.append(u.cpu())
    assert same(*found)


CODECS: list[SparseCodec] = [
    TopK(0.1), TopK(1.0), TopK(0.2, values=I8), TopK(0.2, indices="plain"),
    AboveMean(), AboveMean(3.0), AboveMean(3.0).raw_entries, LargestOfChunk(), Stretch(),
]  # fmt: skip


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_what_an_entry_has_taken_leaves_the_momentum(codec: SparseCodec, backend: str) -> None:
    """To the same bits on every backend; of what could not be sent the momentum stays."""
    numel, device = 700, device_of(backend)
    grads = torch.randn(3, numel, generator=torch.Generator().manual_seed(1))
    grads[:, 600:] = 0.0  # more entries than there is anything to send, where all are
    grads[2, 77] = torch.inf
    found = []
    for name in ("reference", backend):
        with use_backend(name):
            place = device if name == backend else torch.device("cpu")
            kept = FeedbackState(Momentum(BETA), {v: torch.zeros(numel, device=place) for v in Momentum.state_names})
            workspace = codec.workspace(numel, place)
            for step, grad in enumerate(grads.to(place)):
                expected = BETA * kept[MOMENTUM] + grad
                expected = torch.where(expected.isfinite(), expected, kept[MOMENTUM])
                wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8, device=place)
                draw = new_draw(0, step, 0, place)
                kept.encode(codec, grad, wire, draw, workspace)
                sent = torch.zeros(numel, device=place)
                codec.decode_add(wire, sent, 1.0, workspace)
                masked = (sent != 0) & sent.isfinite()
                assert masked.any() == (step < 2 or not isinstance(codec, Stretch))
                # An int8 may be zero where there is an entry.
                assert bool((kept[MOMENTUM][masked] == 0).all())
                stays = (sent == 0) | ~sent.isfinite()
                changed = (kept[MOMENTUM] != expected) & stays
                assert int(changed.sum()) <= (codec.value_dtype == torch.int8) * codec.k(numel)
                found.append([kept[v].cpu().clone() for v in Momentum.state_names])
    for reference, other in zip(found[:3], found[3:], strict=True):
        assert all(same(a, b) for a, b in zip(reference, other, strict=True))


@pytest.mark.parametrize("codec", [OneBit(), QSGD(rounding="nearest")], ids=str)
def test_of_a_code_that_sends_everything_nothing_is_masked(codec: Codec) -> None:
    numel, found = 3000, []
    grads = torch.randn(4, numel, generator=torch.Generator().manual_seed(2))
    for masking in (False, True):
        kept = FeedbackState(Momentum(BETA, masking=masking), {v: torch.zeros(numel) for v in Momentum.state_names})
        workspace, wire = codec.workspace(numel), torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
        for step, grad in enumerate(grads):
            kept.encode(codec, grad, wire, new_draw(0, step), workspace)
        found.append([wire, *kept.vectors.values()])
    expected = sum(BETA ** (3 - step) * grad.double() for step, grad in enumerate(grads))
    assert all(same(a, b) for a, b in zip(*found, strict=True))
    assert torch.allclose(found[1][2].double(), expected, atol=1e-5)


# -- as published ------------------------------------------------------------------------------------------------------


class Published:
    """The update of synxlin/deep-gradient-compression in float64, on all ranks; what exchanges make of entries besides.

    Attributes:
        u, v: momentum, and what has still to be sent, [ranks, elements].
    """

    def __init__(self, size: int, numel: int, k: int, strategy: Momentum) -> None:
        self.u, self.v = torch.zeros(2, size, numel, dtype=torch.float64)
        self.k, self.strategy = k, strategy

    def step(self, grads: Tensor, exchange: str, handed: Tensor) -> Tensor:
        """The mean. Of "split" and "mask" it takes from `handed` which of the sums are kept."""
        beta = self.strategy.beta
        if self.strategy.nesterov:
            self.u = beta * (self.u + grads)
            self.v += self.u + grads
        else:
            self.u = beta * self.u + grads
            self.v += self.u
        sent = torch.zeros_like(self.v, dtype=torch.bool)
        sent.scatter_(1, self.v.abs().topk(self.k, dim=1).indices, True)
        if exchange == "union":
            sent[:] = sent.any(0)
        elif exchange == "split":
            sent &= handed != 0
        elif exchange == "mask":
            sent[:] = handed != 0
        mean = torch.where(sent, self.v, 0.0).mean(0)
        self.v[sent] = 0.0
        if self.strategy.masking:
            self.u[sent] = 0.0
        return mean


@pytest.mark.parametrize("exchange", ["gather", "mask", "union", "split"])
@pytest.mark.parametrize("strategy", [*KINDS, Momentum(BETA, nesterov=True, masking=False)], ids=str)
def test_it_is_what_has_been_published(strategy: Momentum, exchange: str) -> None:
    layout, codec, size = layout_of(["a", "b", "c", "d", "e"]), TopK(0.1), 4
    numel = layout[-1].start + 8
    ranks = InProcessRanks(size, layout, codec, exchange, strategy)
    published = Published(size, numel, codec.k(numel), strategy)
    generator = torch.Generator().manual_seed(5)
    for _ in range(40):
        grads = torch.randn(size, numel, generator=generator)
        handed = ranks.reduce([grad.clone() for grad in grads])
        mean = published.step(grads.double(), exchange, handed)
        assert 0 < int((handed != 0).sum()) < numel
        assert torch.allclose(handed.double(), mean, atol=2e-5)
    for rank, memory in enumerate(ranks.memories):
        for vector, expected in ((MOMENTUM, published.u), (RESIDUAL, published.v)):
            kept = memory.of(layout)[vector].double()
            assert torch.allclose(kept, expected[rank], atol=2e-5), (rank, vector)


# -- what is not finite ------------------------------------------------------------------------------------------------


def test_a_dense_step_keeps_what_it_could_not_send() -> None:
    layout, memory = layout_of(["b"]), FeedbackStore(Momentum(0.5))
    memory.load({RESIDUAL: {"b": torch.ones(5)}, MOMENTUM: {"b": torch.full((5,), 2.0)}})
    sent = memory.drain(layout, torch.tensor([1.0, torch.nan, 3.0, -torch.inf, 0.0]))
    assert sent.nan_to_num(-1.0, neginf=-2.0).tolist() == [3.0, -1.0, 5.0, -2.0, 2.0]
    assert memory.by_name(MOMENTUM)["b"].tolist() == [2.0, 2.0, 4.0, 2.0, 1.0]
    assert memory.by_name(RESIDUAL)["b"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_without_a_momentum_an_optimizer_may_have_its_own() -> None:
    """Others are refused: see tests/core/test_optimizers.py."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    for strategy in (Residual(), Momentum(0.0)):
        strategy.check_optimizer(optimizer)
