"""Top-k: the largest elements with their indices, and nothing of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

from .codec import Codec, check_number
from .wire import Field, Part


@dataclass(frozen=True)
class TopK(Codec):
    """The k largest magnitudes, exactly (Gradient Dropping: Aji & Heafield, EMNLP 2017; Deep Gradient Compression:
    Lin et al., ICLR 2018).

    k = max(1, ⌈density · n⌉). Ties go to the lower index, indices ascend, a zero is never selected, and NaN ranks above
    infinity, so it is sent and seen. What is not sent stays in the residual.

    Args:
        density: share of the elements to send, in (0, 1]. 0.01 costs 0.64 bits an element.
    """

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "Aji & Heafield 2017"

    density: float = 0.01

    def __post_init__(self) -> None:
        check_number("density", self.density, 0.0, 1.0)

    def k(self, numel: int) -> int:
        """How many elements of `numel` are sent, zeros left out."""
        return _k(self.density, numel)

    def parts(self, numel: int) -> tuple[Part, ...]:
        if numel >= 1 << 31:
            raise ValueError(f"TopK sends 32-bit indices and cannot serve {numel} elements: use buckets below 2^31")
        k = self.k(numel)
        count = Field("count", "<u4", 1, "how many of the k entries are used; the others are zero")
        index = Field("index", "<u4", k, "positions of the largest magnitudes, ascending")
        return Part("indices", (count, index), 1), Part("values", (Field("value", "<f4", k, "their values"),), 1)


@lru_cache(maxsize=4096)
def _k(density: float, numel: int) -> int:
    # As the decimal fraction that was written down: 0.07 · 100 is 7, though not in floating point.
    return max(1, math.ceil(Fraction(repr(density)) * numel))
