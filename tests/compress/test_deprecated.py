"""Codecs and strategies written for the release before work, with a warning for each old name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from gradwire.compress import Codec, OneBit, Residual, TopK
from gradwire.compress.feedback.base import RESIDUAL, FeedbackState
from torch import Tensor


def old_strategy() -> Any:
    @dataclass(frozen=True)
    class Halved(Residual):
        vectors: ClassVar[tuple[str, ...]] = (RESIDUAL, "seen")

        def send_all(self, kept: FeedbackState, grad: Tensor) -> Tensor:
            return super().send_all(kept, grad) / 2  # type: ignore[misc]

    return Halved


def test_a_strategy_may_define_and_call_old_names() -> None:
    with pytest.warns(DeprecationWarning, match="is called") as told:
        strategy = old_strategy()()
    assert [str(w.message) for w in told] == [
        "Halved.vectors is called state_names now; the former name will go in the next release",
        "Halved.send_all is called flush now; the former name will go in the next release",
    ]
    assert strategy.state_names == (RESIDUAL, "seen")
    state = FeedbackState(strategy, {RESIDUAL: torch.tensor([1.0])})
    with pytest.warns(DeprecationWarning, match=r"Halved.send_all is called flush now"):
        assert state.flush(torch.tensor([3.0])).tolist() == [2.0]
    with pytest.warns(DeprecationWarning, match=r"Residual.stored_as is called storage_dtype now"):
        assert Residual(dtype=torch.bfloat16).stored_as(RESIDUAL) == torch.bfloat16  # type: ignore[attr-defined]


def test_a_codec_may_define_and_call_old_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"Coarse.of_means is called second_pass now"):

        @dataclass(frozen=True)
        class Coarse(OneBit):
            def of_means(self) -> Codec:
                return TopK()

    assert Coarse().second_pass() == TopK()
    with pytest.warns(DeprecationWarning, match=r"TopK.plain is called raw_entries now"):
        assert TopK().plain == TopK().raw_entries  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"TopK.timed_as is called speed_key now"):
        assert TopK().timed_as == TopK().speed_key  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match=r"OneBit.of_layout is called for_layout now"):
        assert OneBit().of_layout(()) == OneBit()  # type: ignore[attr-defined]
