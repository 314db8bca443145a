"""`Outliers`: what is selected is exact, the inner code has the rest, chunk by chunk."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.compress import QSGD, Cast, Codec, OneBit, Outliers, Ternary, TernGrad, TopK, new_draw
from gradwire.compress.backends import use_backend
from gradwire.compress.backends.cpu import kernels as cpu_kernels
from gradwire.compress.backends.cpu import outliers as cpu_outliers
from gradwire.compress.codec import DTYPES
from gradwire.hooks.auto.planner import default_exchange
from gradwire.hooks.exchanges import possible
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import KINDS, decode, encode, gradient, hostile_wires, parts_of, same
from torch import Tensor

VALUES = (torch.float32, torch.bfloat16, torch.int8)


def chosen_by(codec: Outliers, x: Tensor) -> Tensor:
    """The indices of the largest magnitudes of each chunk, ties to the lower, ascending."""
    found = []
    for start in range(0, len(x), codec.block_size):
        chunk = x[start : start + codec.block_size]
        order = torch.sort(chunk.abs(), descending=True, stable=True).indices
        found.append(start + order[: min(codec.k, int(torch.count_nonzero(chunk)))].sort().values)
    return torch.cat(found)


def split(codec: Outliers, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """What a wire has of the selection, and of the inner code."""
    sizes = [part.wire_bytes(codec.block_size) for part in (codec.selection, codec.inner)]
    entries, rest = wire.view(-(-numel // codec.block_size), -1).split(sizes, dim=1)
    beyond = codec.inner.wire_bytes(numel)
    assert not rest.flatten()[beyond:].any()
    return entries.flatten(), rest.flatten()[:beyond]


@settings(max_examples=40, deadline=None)
@given(
    numel=st.one_of(st.integers(1, 6000), st.integers(6000, 20_000)),
    density=st.sampled_from([0.001, 0.01, 0.12]),
    values=st.sampled_from(VALUES),
    inner=st.sampled_from([OneBit(), OneBit(block=256), Ternary(), QSGD(bits=3, rounding="nearest"), Cast()]),
    kind=st.sampled_from(["normal", "wide", "ties", "zeros", "constant", "tiny"]),
    seed=st.integers(0, 100),
)
def test_the_wire_is_that_of_top_k_and_that_of_what_is_left(
    numel: int, density: float, values: torch.dtype, inner: Any, kind: str, seed: int
) -> None:
    codec, x = Outliers(inner, density, values), gradient(kind, numel, seed)
    selection = codec.selection
    chosen, rest = chosen_by(codec, x), x.clone()
    rest[chosen] = 0
    wire = encode(codec, x)
    entries, blocks = split(codec, wire, numel)
    assert same(entries, encode(selection, x))
    assert same(blocks, encode(inner, rest))
    decoded = decode(inner, encode(inner, rest), numel)
    decoded[chosen] = decode(selection, encode(selection, x), numel)[chosen]
    assert same(decode(codec, wire, numel) + 0.0, decoded + 0.0)
    if values == torch.float32:
        assert same(decode(codec, wire, numel)[chosen], x[chosen])


@settings(max_examples=40, deadline=None)
@given(
    numel=st.sampled_from([1, 1025, 2561, 9001, 20_001]),
    kinds=st.lists(st.sampled_from(tuple(KINDS)), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from(VALUES),
    density=st.sampled_from([0.001, 0.05, 0.12]),
    pieces=st.integers(1, 3),
    inner=st.sampled_from([OneBit(block=256), Ternary(), QSGD(rounding="nearest")]),
)
def test_a_prediction_never_changes_the_bytes(
    numel: int, kinds: list[str], dtype: torch.dtype, values: torch.dtype, density: float, pieces: int, inner: Any
) -> None:
    """Of the threshold, from the chunk before; and however many threads share the work."""
    codec, sides = Outliers(inner, density, values), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_outliers, "pieces_of", lambda elements, count: min(pieces, count))
        patch.setattr(cpu_outliers, "AT_ONCE", 512)
        for backend in ("reference", "cpu"):
            with use_backend(backend):
                workspace, residual, wires = codec.workspace(numel), gradient("normal", numel, 9), []
                for step, kind in enumerate(kinds):
                    wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
                    with pytest.MonkeyPatch.context() as inside:  # not of decoding, which is in such a piece already
                        inside.setattr(cpu_kernels, "pieces_of", lambda elements, count: min(pieces, count))
                        codec.encode_feedback(gradient(kind, numel, step, dtype), residual, wire, None, workspace)
                    wires.append(wire)
                mean = torch.empty(numel, dtype=dtype)
                wires.append(hostile_wires(codec, numel, 1, numel)[0])
                codec.decode_mean(parts_of(codec, torch.stack(wires), numel), mean, workspace)
                sides.append((*wires[:-1], residual, mean, workspace.status))
    assert all(same(a, b) for a, b in zip(*sides, strict=True))


@pytest.mark.parametrize("inner", [OneBit(), Ternary(), QSGD(rounding="nearest")], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_one_block_and_the_chunk_selects_nothing(inner: Any, bad: float) -> None:
    codec, numel = Outliers(inner), 3 * Outliers(inner).block_size - 100
    at = codec.block_size + 5
    grad, old = gradient("normal", numel, 1), gradient("normal", numel, 2)
    grad[at] = bad
    wire, residual = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8), old.clone()
    codec.encode_feedback(grad, residual, wire, None, codec.workspace(numel))
    decoded, (entries, rest) = decode(codec, wire, numel), split(codec, wire, numel)
    hit = torch.zeros(numel, dtype=torch.bool)
    hit[codec.block_size :][: inner.block_size] = True
    assert torch.equal(~decoded.isfinite(), hit)
    assert same(residual[hit], old[hit])
    records = entries.view(3, -1)
    assert not records[1].any()
    assert records[0].any()
    assert same(rest, encode(inner, torch.where(_picked(codec, grad + old), 0.0, grad + old)))


def _picked(codec: Outliers, x: Tensor) -> Tensor:
    """Which elements are selected."""
    chunk = torch.arange(len(x)) // codec.block_size
    finite = torch.stack([x[chunk == c].isfinite().all() for c in range(int(chunk[-1]) + 1)])[chunk]
    picked = torch.zeros(len(x), dtype=torch.bool)
    picked[chosen_by(codec, torch.where(finite, x, 0.0))] = True
    return picked


def test_slices_of_the_wire_are_wires() -> None:
    """As two_pass needs it, which then carries the codec."""
    codec = Outliers(OneBit(), 0.02)
    chunk, x = codec.block_size, gradient("normal", 3 * 8192 + 77, 1)
    wire, size = encode(codec, x), codec.wire_bytes(codec.block_size)
    for first, last in ((0, 1), (1, 3), (2, 4)):
        part = x[first * chunk : last * chunk]
        assert same(wire[first * size : last * size], encode(codec, part))
    assert "two_pass" in possible(codec)
    assert default_exchange(codec, 8) == "two_pass"


def test_what_is_exact_is_exact_and_leaves_no_residual() -> None:
    grad, residual = gradient("normal", 50_000, 1), gradient("normal", 50_000, 2)
    codec, total = Outliers(OneBit(), 0.02), grad + residual
    wire = torch.zeros(codec.wire_bytes(50_000), dtype=torch.uint8)
    codec.encode_feedback(grad, residual, wire, None, codec.workspace(50_000))
    chosen = chosen_by(codec, total)
    assert not residual[chosen].any()
    assert same(decode(codec, wire, 50_000)[chosen], total[chosen])


def test_outliers_no_longer_cap_the_code() -> None:
    """Of a heavy-tailed gradient much less is left than of the inner code alone, or of the selection alone."""
    x = torch.from_numpy(np.random.default_rng(0).standard_t(2, 1 << 17).astype(np.float32))

    def left(codec: Codec) -> float:
        return float((decode(codec, encode(codec, x), len(x)) - x).norm() / x.norm()) ** 2

    for inner in (OneBit(), Ternary()):
        assert left(Outliers(inner)) < 0.7 * min(left(inner), left(TopK()))


def test_of_ranks_that_select_different_elements_the_mean_is_in_rank_order() -> None:
    codec, numel = Outliers(OneBit(block=256), 0.1), 1000
    xs = [gradient("normal", numel, seed) * 10.0 ** (4 * seed) for seed in range(4)]
    wires, out = torch.stack([encode(codec, x) for x in xs]), torch.empty(numel)
    codec.decode_mean(parts_of(codec, wires, numel), out, codec.workspace(numel))
    total = torch.zeros(numel)
    for wire in wires:
        total += decode(codec, wire, numel)
    assert same(out, total * 0.25)


@pytest.mark.parametrize("inner", [QSGD(), TernGrad(clip=math.inf)], ids=str)
def test_it_is_as_unbiased_as_the_inner_code(inner: Any) -> None:
    codec, x, draws = Outliers(inner, 0.05), gradient("wide", 1280, 1), 150
    assert codec.stochastic
    assert not codec.default_feedback
    assert not codec.with_feedback().stochastic
    found = torch.stack([decode(codec, encode(codec, x, new_draw(1, step)), 1280) for step in range(draws)]).double()
    chosen, error = chosen_by(codec, x), found.mean(0) - x
    assert not error[chosen].any()
    spread = found.std(0) / math.sqrt(draws)
    assert float((error.abs() / spread.clamp(min=1e-30))[spread > 0].square().mean().sqrt()) < 1.3


@pytest.mark.parametrize("inner", [TopK(), Outliers(OneBit()), OneBit, None, "onebit"], ids=str)
def test_what_cannot_be_inside_is_named(inner: Any) -> None:
    with pytest.raises(TypeError, match=r"inner=.*expected a codec of blocks, such as OneBit\(\), Ternary\(\) or QSGD"):
        Outliers(inner)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Outliers(OneBit(), density=0), "density=0"),
        (lambda: Outliers(OneBit(), density=1.5), "density=1.5"),
        (lambda: Outliers(OneBit(), 0.2), "density=0.2: 1639 of 8192 elements, and a chunk has at most 1024 outliers"),
        (lambda: Outliers(OneBit(), 0.2), "1024 outliers: take 0.125 or less"),
        (lambda: Outliers(OneBit(block=65536), 0.1), "1024 outliers: take 0.0156 or less"),
        (lambda: Outliers(OneBit(), values=torch.float16), "values=torch.float16"),
    ],
)
def test_bad_options_are_named(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        make()


def test_a_workspace_of_another_codec_or_length_does_no_harm() -> None:
    x = gradient("normal", 5000, 1)
    for codec in (Outliers(OneBit(), 0.01), Outliers(Ternary(), 0.1), Outliers(QSGD(), 0.1, torch.int8)):
        for other in (OneBit().workspace(5000), TopK().workspace(9), Outliers(QSGD(), 0.12).workspace(5000)):
            wire = torch.zeros(codec.wire_bytes(5000), dtype=torch.uint8)
            codec.encode(x, wire, new_draw(0), other)
            assert same(wire, encode(codec, x))


def test_bytes_and_density() -> None:
    codec = Outliers(OneBit())
    bits = codec.bits_per_element()
    assert bits == pytest.approx(OneBit().bits_per_element() + codec.selection.bits_per_element())
    assert bits == pytest.approx(1.473, abs=1e-3)
