"""Options of parameter groups: their validation, and the names of parameters in messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..hooks.training.names import unwrapped


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for invalid options that all optimizers have."""
    betas = group["betas"]
    check_range("lr", group["lr"], float("inf"))
    check_range("weight_decay", group["weight_decay"], float("inf"))
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas={betas!r}: expected two numbers in [0, 1)")
    for place, beta in enumerate(betas):
        check_range(f"betas[{place}]", beta, 1.0)
    if not isinstance(group["maximize"], bool):
        raise ValueError(f"maximize={group['maximize']!r}: expected True or False")


def called(group: Mapping[str, Any], number: int, place: int) -> str:
    """A parameter for messages: its name, if the optimizer was given names, and its place."""
    names = group.get("param_names")
    name = "" if names is None else f" {unwrapped(names[place])!r},"
    return f"parameter{name} {place} of group {number}, of shape {tuple(group['params'][place].shape)},"


def check_range(name: str, value: object, end: float) -> None:
    """Raise ValueError unless `value` is a number with 0 <= value < end."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < end:
        raise ValueError(f"{name}={value!r}: expected a number in [0, {end})")
