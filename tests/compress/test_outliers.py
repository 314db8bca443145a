"""`Outliers`: what is selected is exact, the inner code has the rest, and only "gather" carries it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.compress import QSGD, Cast, Codec, OneBit, Outliers, Ternary, TernGrad, TopK, new_draw
from gradwire.compress.backends import use_backend
from gradwire.compress.backends.cpu import block_codec
from gradwire.compress.backends.cpu.kernels import topk as cpu_topk
from gradwire.compress.codec import DTYPES
from gradwire.hooks.auto.planner import check_exchange, default_exchange
from gradwire.hooks.core.options import Options
from gradwire.hooks.exchanges import possible
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import KINDS, decode, encode, gradient, hostile_wires, parts_of, same
from torch import Tensor

VALUES = (torch.float32, torch.bfloat16, torch.int8)


def chosen_by(codec: Outliers, x: Tensor) -> Tensor:
    """The indices of the largest magnitudes, ties to the lower, ascending."""
    order = torch.sort(x.abs(), descending=True, stable=True).indices
    return order[: min(codec.k(len(x)), int(torch.count_nonzero(x)))].sort().values


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(1, 6000),
    density=st.sampled_from([0.001, 0.01, 0.2, 1.0]),
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
    assert same(wire, torch.cat([encode(selection, x), encode(inner, rest)]))
    decoded = decode(inner, encode(inner, rest), numel)
    decoded[chosen] = decode(selection, encode(selection, x), numel)[chosen]
    assert same(decode(codec, wire, numel) + 0.0, decoded + 0.0)
    if values == torch.float32:
        assert same(decode(codec, wire, numel)[chosen], x[chosen])


@settings(max_examples=40, deadline=None)
@given(
    numel=st.sampled_from([1, 1023, 1025, 2561, 9001]),
    kinds=st.lists(st.sampled_from(tuple(KINDS)), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from(VALUES),
    density=st.sampled_from([0.001, 0.05, 1.0]),
    pieces=st.integers(1, 3),
    inner=st.sampled_from(
        [OneBit(), OneBit(block=256), OneBit(block=768), Ternary(), QSGD(rounding="nearest"), Cast()]
    ),
)
def test_no_prediction_and_no_thread_changes_the_bytes(
    numel: int, kinds: list[str], dtype: torch.dtype, values: torch.dtype, density: float, pieces: int, inner: Any
) -> None:
    codec, sides = Outliers(inner, density, values), []
    with pytest.MonkeyPatch.context() as patch:
        for module in (cpu_topk, block_codec):
            patch.setattr(module, "pieces_of", lambda elements, count: min(pieces, count))
        for backend in ("reference", "cpu"):
            with use_backend(backend):
                workspace, residual, wires = codec.workspace(numel), gradient("normal", numel, 9), []
                for step, kind in enumerate(kinds):
                    wire = torch.zeros(codec.wire_bytes(numel), dtype=torch.uint8)
                    codec.encode_feedback(gradient(kind, numel, step, dtype), residual, wire, None, workspace)
                    wires.append(wire)
                mean, total = torch.empty(numel, dtype=dtype), gradient("wide", numel, 5)
                wires.append(hostile_wires(codec, numel, 1, numel)[0])
                codec.decode_mean(parts_of(codec, torch.stack(wires), numel), mean, workspace)
                codec.decode_add(wires[-1], total, -0.3, workspace)
                sides.append((*wires[:-1], residual, mean, total, workspace.status))
    assert all(same(a, b) for a, b in zip(*sides, strict=True))


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


def test_the_exchange_is_gather() -> None:
    codec = Outliers(OneBit())
    assert possible(codec) == ("gather", "dense")
    assert default_exchange(codec, 8) == "gather"
    check_exchange("gather", codec)
    check_exchange("auto", codec)
    for exchange in ("two_pass", "union", "split"):
        with pytest.raises(ValueError, match=rf"exchange='{exchange}' .*Outliers\(.*use one of 'gather', 'dense'"):
            check_exchange(exchange, codec)
        with pytest.raises(ValueError, match=f"exchange='{exchange}'"):
            Options(codec, exchange=exchange).choice(0)


@pytest.mark.parametrize("inner", [TopK(), Outliers(OneBit()), OneBit, None, "onebit"], ids=str)
def test_what_cannot_be_inside_is_named(inner: Any) -> None:
    with pytest.raises(TypeError, match=r"inner=.*expected a codec of blocks, such as OneBit\(\), Ternary\(\) or QSGD"):
        Outliers(inner)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Outliers(OneBit(), density=0), "density=0"),
        (lambda: Outliers(OneBit(), density=1.5), "density=1.5"),
        (lambda: Outliers(OneBit(), values=torch.float16), "values=torch.float16"),
        (lambda: Outliers(OneBit()).wire_bytes(1 << 31), "Outliers sends 32-bit indices and cannot serve 2147483648"),
    ],
)
def test_bad_options_are_named(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        make()


def test_bytes_and_density() -> None:
    bits = Outliers(OneBit()).bits_per_element()
    assert bits == pytest.approx(OneBit().bits_per_element() + TopK().bits_per_element())
    assert Outliers(OneBit(), 0.013).speed_key == Outliers(OneBit(), 2.0**-6)
