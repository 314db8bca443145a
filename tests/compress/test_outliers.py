"""`Outliers`: what is selected is exact, the inner code has the rest, and only "gather" carries it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradwire.compress import QSGD, Cast, Codec, OneBit, Outliers, Ternary, TopK
from gradwire.hooks.auto.planner import check_exchange, default_exchange
from gradwire.hooks.core.options import Options
from gradwire.hooks.exchanges import possible
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import decode, encode, gradient, same
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


def test_outliers_no_longer_cap_the_code() -> None:
    """Of a heavy-tailed gradient much less is left than of the inner code alone, or of the selection alone."""
    x = torch.from_numpy(np.random.default_rng(0).standard_t(2, 1 << 17).astype(np.float32))

    def left(codec: Codec) -> float:
        return float((decode(codec, encode(codec, x), len(x)) - x).norm() / x.norm()) ** 2

    for inner in (OneBit(), Ternary()):
        assert left(Outliers(inner)) < 0.7 * min(left(inner), left(TopK()))


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
