"""Kills of replicas by a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Kill:
    """One death: `replica` is killed `at` seconds after the first round, and started again at once."""

    at: float
    replica: int


def schedule(seed: int, seconds: float, every: float, replicas: int) -> list[Kill]:
    """One kill in each `every` seconds, at a drawn moment of a drawn replica; the same for all arms.

    A piece of `every` that ends after `seconds` has none: of its kill too little would be seen.
    """
    draw = random.Random(seed)
    return [Kill((piece + draw.random()) * every, draw.randrange(replicas)) for piece in range(int(seconds // every))]
