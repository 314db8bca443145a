"""Former names: they warn, and do what they did."""

from __future__ import annotations

import pytest
from gradwire import CompressState, OneBit


def test_states_have_their_former_names() -> None:
    state = CompressState(codec=OneBit())
    with pytest.warns(DeprecationWarning, match=r"\.deciding is called tuning now"):
        assert state.deciding == state.tuning
