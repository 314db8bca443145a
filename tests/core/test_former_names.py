"""Former names: they warn, and do what they did."""

from __future__ import annotations

import pytest
from gradwire import CompressState, OneBit
from gradwire.compress.deprecated import former_property


class Now:
    tuning = True
    deciding = former_property("deciding", "tuning")


def test_a_former_name_warns_and_serves() -> None:
    with pytest.warns(DeprecationWarning, match=r"Now\.deciding is called tuning now"):
        assert Now().deciding


def test_states_have_their_former_names() -> None:
    state = CompressState(codec=OneBit())
    with pytest.warns(DeprecationWarning, match=r"\.deciding is called tuning now"):
        assert state.deciding == state.tuning
