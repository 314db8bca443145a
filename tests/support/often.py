"""How many examples a drawn law has: few in `make test`, many where the slow tests run too."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")


def by_time(quick: T, slow: T) -> T:
    """One of the two. `conftest` has loaded the profile of a run without slow tests, or the other."""
    return quick if settings.default is not None and settings.default.derandomize else slow
