"""Top-k: the largest elements with their indices, and nothing of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import torch

from ..codec import check_choice, check_number
from ..formats.entries import VALUE_DTYPES
from ..sparse_codec import SparseCodec


@dataclass(frozen=True)
class TopK(SparseCodec):
    """The k largest magnitudes, exactly (Gradient Dropping: Aji & Heafield, EMNLP 2017; Deep Gradient Compression:
    Lin et al., ICLR 2018).

    k = max(1, ⌈density · n⌉). Ties go to the lower index, indices ascend, a zero is never selected, and NaN ranks above
    infinity, so it is sent and seen. What is not sent stays in the residual, the rounding of values included.

    Args:
        density: share of the elements to send, in (0, 1]. 0.01 costs 0.41 bits an element.
        indices: "packed" (Elias–Fano: 8.6 bits each at 1 %) or "plain", 32 bits each.
        values: torch.float32, torch.bfloat16 or torch.int8 (a unit for each 256 values): `compress.formats.entries`.
    """

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "Aji & Heafield 2017"

    density: float = 0.01
    indices: str = "packed"
    values: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_number("density", self.density, 0.0, 1.0)
        check_choice("indices", self.indices, ("packed", "plain"))
        if self.values not in VALUE_DTYPES:
            raise ValueError(f"values={self.values!r}: expected one of {', '.join(map(str, VALUE_DTYPES))}")

    def k(self, numel: int) -> int:
        """⌈density · numel⌉, at least 1; zeros are left out, so fewer entries may be used."""
        return entries_at(self.density, numel)

    @property
    def packs_indices(self) -> bool:
        return self.indices == "packed"

    @property
    def value_dtype(self) -> torch.dtype:
        return self.values

    @property
    def raw_entries(self) -> TopK:
        return replace(self, indices="plain", values=torch.float32)

    @property
    def speed_key(self) -> TopK:
        """Densities that are powers of two stand for those around them."""
        return replace(self, density=power_near(self.density))


@dataclass(frozen=True)
class Largest(SparseCodec):
    """The `count` largest magnitudes, as `TopK` selects and packs them; what exchanges put into rows of fixed size.

    Args:
        count: k, whatever the number of elements, if there are as many.
        values: as of `TopK`.
    """

    name: ClassVar[str] = TopK.name

    count: int
    values: torch.dtype = torch.float32

    def k(self, numel: int) -> int:
        return min(self.count, numel)

    @property
    def value_dtype(self) -> torch.dtype:
        return self.values


@lru_cache(maxsize=4096)
def entries_at(density: float, numel: int) -> int:
    """max(1, ⌈density · numel⌉)."""
    # As the decimal fraction that was written down: 0.07 · 100 is 7, though not in floating point.
    return max(1, math.ceil(Fraction(repr(density)) * numel))


def power_near(share: float) -> float:
    """The power of two that stands for the shares around it; of 0, 0."""
    return min(1.0, 2.0 ** round(math.log2(share))) if share else 0.0
