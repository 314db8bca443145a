"""Former names: each works until the next release, and warns."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


class Renamed:
    """Base of an interface whose members have new names. A subclass may still define and call them by the old ones.

    Args:
        renamed: new names by old ones, on the class that declares the interface.
    """

    def __init_subclass__(cls, renamed: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if renamed is not None:
            cls._renamed = dict(renamed)
            for old, new in renamed.items():
                setattr(cls, old, _Alias(old, new))
            return
        for old, new in cls._renamed.items():
            if old in vars(cls) and new not in vars(cls):
                _warn(cls, old, new)
                setattr(cls, new, vars(cls)[old])

    _renamed: dict[str, str]


class _Alias:
    """An old name, read as the new one is: of the class itself, or by `super()` of the classes behind an override."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def __get__(self, instance: Any, owner: type) -> Any:
        _warn(owner, self.old, self.new)
        last = [n for n, cls in enumerate(owner.__mro__) if not isinstance(vars(cls).get(self.old, self), _Alias)][-1:]
        behind = owner.__mro__[last[0] + 1 :] if last else owner.__mro__
        found = next(vars(cls)[self.new] for cls in behind if self.new in vars(cls))
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _warn(cls: type, old: str, new: str) -> None:
    text = f"{cls.__name__}.{old} is called {new} now; the former name will go in the next release"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def former_property(name: str, now: str) -> Any:
    """A property of this name that warns, and returns the attribute of the name that it has now."""

    def former(owner: Any) -> Any:
        _warn(type(owner), name, now)
        return getattr(owner, now)

    former.__doc__ = f"Former name of `{now}`."
    return property(former)
