"""Comparison of the ranks' models and options before anything is exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def describe_model(parameters: Mapping[str, Tensor], excluded: Iterable[str], sparse: Iterable[str] = ()) -> list[str]:
    """One line for each parameter, in the model's order.

    Args:
        excluded, sparse: names of parameters that are not compressed, and of those with sparse gradients.
    """
    marks = dict.fromkeys(excluded, " (excluded)") | dict.fromkeys(sparse, " (sparse)")
    return [
        f"{name}: {str(p.dtype).removeprefix('torch.')}{list(p.shape)}{marks.get(name, '')}"
        for name, p in parameters.items()
    ]


def side(description: dict[str, Any], problem: Exception | None) -> dict[str, Any]:
    """A rank's side for `compare`: its description, or the error because of which it cannot go on."""
    return description if problem is None else {"error": f"{type(problem).__name__}: {problem}"}


def compare(sides: list[dict[str, Any]], remedy: str) -> None:
    """Compare the ranks' descriptions. A rank that cannot go on has a key "error".

    Args:
        sides: one description for each rank. Only the first difference counts, as later keys may follow from it.
        remedy: a sentence for the user.

    Raises:
        ValueError: on every rank alike, naming the first difference and both sides.
    """
    failed = [f"rank {rank}: {side['error']}" for rank, side in enumerate(sides) if "error" in side]
    if failed:
        raise ValueError("gradwire cannot go on, on any rank: " + "; ".join(failed))
    for rank, side in enumerate(sides):
        if side is sides[0]:
            continue  # equal sides are one object
        if (found := difference(sides[0], side)) is not None:
            key, expected, got = found
            raise ValueError(f"ranks disagree on {key}: rank 0 has {expected}, rank {rank} has {got}. {remedy}")


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key on which two descriptions differ, and both values; of lists, the first entries that do."""
    for key in one | other:
        a, b = one.get(key), other.get(key)
        if a != b and isinstance(a, list) and isinstance(b, list):
            return (key, *_first_difference(a, b))
        if a != b:
            return key, a, b
    return None


def _first_difference(left: list[Any], right: list[Any]) -> tuple[Any, Any]:
    for a, b in zip(left, right, strict=False):
        if a != b:
            return a, b
    return f"{len(left)} entries", f"{len(right)} entries"
