"""`on_ranks`: a test fails if one rank does, or returns something else than the others."""

from __future__ import annotations

import pytest
from ranks import RankError, Ranks, on_ranks


@on_ranks(2)
def returned(rank: int, shared: bool) -> int:
    return 5 if shared else rank


@on_ranks(2)
def raised(rank: int) -> None:
    assert rank == 0


def test_on_ranks(ranks: Ranks) -> None:
    returned(ranks=ranks, shared=True)
    with pytest.raises(AssertionError, match=r"the ranks differ: \[0, 1\]"):
        returned(ranks=ranks, shared=False)
    with pytest.raises(RankError, match=r"rank 1: (?s:.*)assert rank == 0"):
        raised(ranks=ranks)
