"""Former names, which warn for one release."""

from __future__ import annotations

import warnings
from typing import Any


def former_property(name: str, now: str) -> Any:
    """A property of this name that warns, and returns the attribute of the name that it has now."""

    def former(owner: Any) -> Any:
        warnings.warn(
            f"{type(owner).__name__}.{name} is called {now} now; the former name will go in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(owner, now)

    former.__doc__ = f"Former name of `{now}`."
    return property(former)
