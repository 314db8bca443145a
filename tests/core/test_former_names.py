"""Former names: they warn, and do what they did."""

from __future__ import annotations

from collections.abc import Callable

import gradwire
import gradwire.hooks.horovod as hvd
import pytest
import torch
from gradwire import QSGD, CompressState, OneBit, Ternary, TopK


def test_states_have_their_former_names() -> None:
    state = CompressState(codec=OneBit())
    with pytest.warns(DeprecationWarning, match=r"\.deciding is called tuning now"):
        assert state.deciding == state.tuning


@pytest.mark.parametrize("former", [gradwire.Outliers, hvd.Compression.outliers])
def test_outliers_is_top_k(former: Callable[..., TopK]) -> None:
    for inner, density, values in (
        (OneBit(), 0.01, torch.float32),
        (Ternary(), 0.1, torch.int8),
        (QSGD(), 1.0, torch.bfloat16),
    ):
        with pytest.warns(DeprecationWarning, match=r"is TopK\(density=0.04, values=torch.int8\) now, which") as told:
            codec = former(inner, density=density, values=values)
        assert str(told[0].message).startswith(f"Outliers({inner}, density={density}, values={values})")
        assert told[0].filename == __file__
        assert codec == TopK(density=0.04, values=torch.int8)
        assert codec.wire_bytes(10**6) < inner.wire_bytes(10**6)
