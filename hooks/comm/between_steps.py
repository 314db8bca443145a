"""Calls from a signal's handler, which Python runs in the main thread between any two bytecodes of what that executes.

Functions that leave a step or a checkpoint half done meanwhile are `undivided`, or `part_of_step` where residuals can
be saved nevertheless. A call that needs them done looks for them on its thread's stack, so that steps pay nothing.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Set
from functools import wraps
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Reentered(RuntimeError):
    """A call that a signal's handler cannot make where it is; no failure of what it has interrupted."""


REMEDY = "set a flag in the handler, and call it between steps"
_OWN = tuple(str(Path(__file__).parents[2] / folder) for folder in ("hooks", "optim", "trainers"))
_undivided: set[CodeType | str] = set()
_parts: set[CodeType] = set()


def undivided(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function whose work must be done before a call that is `between_steps`."""
    _undivided.add(inspect.unwrap(function).__code__)
    return function


def part_of_step(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that `undivided` functions alone leave half done as far as residuals are concerned."""
    _parts.add(inspect.unwrap(function).__code__)
    return function


def undivided_module(module: ModuleType) -> None:
    """Make all functions of another library's module `undivided`."""
    _undivided.add(module.__file__ or "")


def within_step(owner: Any) -> bool:
    """True if this call interrupts a part of a step on its thread, or the owner has `_in_step` and says so."""
    return getattr(owner, "_in_step", False) or _interrupts(_undivided | _parts)


def interrupts_undivided() -> bool:
    """True if this call interrupts an `undivided` function on its thread."""
    return _interrupts(_undivided)


def _interrupts(codes: Set[CodeType | str]) -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):  # of the call itself
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None:
        if frame.f_code in codes or frame.f_code.co_filename in codes:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _refused_where(unready: Callable[[Any], bool], method: Callable[P, T]) -> Callable[P, T]:
    undivided(method)

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if unready(args[0]):
            raise Reentered(
                f"gradwire: {method.__name__}() was called within a step or a save, by a signal's handler or by a hook "
                f"of backward, where no checkpoint could go on: {REMEDY}"
            )
        return method(*args, **kwargs)

    return checked


def between_steps(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that needs the end of a step. Within one, which a signal's handler may have interrupted, it
    raises RuntimeError and changes nothing. The method is `undivided` itself."""
    return _refused_where(within_step, method)


def within_steps_too(method: Callable[P, T]) -> Callable[P, T]:
    """As `between_steps`, for a method that needs no more than the end of `undivided` functions."""
    return _refused_where(lambda _: interrupts_undivided(), method)


class Section:
    """A lock that the thread which holds it, interrupted by a signal's handler, cannot take again.

    Raises:
        Reentered: it does.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    def __enter__(self) -> None:
        if self._lock._is_owned():
            raise Reentered(f"gradwire: a signal's handler has interrupted a call like its own: {REMEDY}")
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
