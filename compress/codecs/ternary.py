"""Ternary: every element becomes -1, 0 or +1 times the level that leaves its block the least error, five to a byte."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ..codec import BlockCodec
from ..formats.wire import Field
from .terngrad import trit_fields


@dataclass(frozen=True)
class Ternary(BlockCodec):
    """Ternary codes of least squared error (Lloyd 1957; for weights: Li et al., "Ternary Weight Networks", 2016).

    Each element x of a block goes to the nearest of -L, 0 and +L. L is the mean of the m largest magnitudes, with that
    m of which (their sum)² / m is about largest: so much of Σx² the code keeps. Every threshold from half the mean
    magnitude up to the largest one is tried, each twice the one before; the best gives L, and two steps of Lloyd's, L =
    mean of what exceeds L/2, refine it. For normal numbers the threshold comes to 0.61 σ and L to 1.22 σ, and 19 % of
    Σx² are left, where `OneBit` leaves 36 %; outliers move both as far as that pays. Deterministic and a contraction,
    so it keeps a residual by default.

    Args:
        block: elements that share a level, a multiple of 1280 (5 × 256). 1280 costs 1.625 bits an element; longer
            blocks save 0.025 bits at most, and fit gradients less whose scale varies.
    """

    name: ClassVar[str] = "ternary"
    source: ClassVar[str] = "Lloyd 1957; Li et al. 2016"
    block_multiple: ClassVar[int] = 1280

    block: int = 1280

    def __post_init__(self) -> None:
        self._check_block(self.block)

    @cached_property  # kernels ask for it with every bucket
    def block_size(self) -> int:
        return self.block

    def fields(self) -> tuple[Field, ...]:
        return trit_fields(self.block)
