"""Top-k: the largest elements with their indices, and nothing of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import torch

from .codec import Codec, check_choice, check_number
from .entries import VALUE_BLOCK, VALUE_DTYPES, index_layout
from .wire import Field, Part


@dataclass(frozen=True)
class TopK(Codec):
    """The k largest magnitudes, exactly (Gradient Dropping: Aji & Heafield, EMNLP 2017; Deep Gradient Compression:
    Lin et al., ICLR 2018).

    k = max(1, ⌈density · n⌉). Ties go to the lower index, indices ascend, a zero is never selected, and NaN ranks above
    infinity, so it is sent and seen. What is not sent stays in the residual, the rounding of values included.

    Args:
        density: share of the elements to send, in (0, 1]. 0.01 costs 0.41 bits an element.
        indices: "packed" (Elias–Fano: 8.6 bits each at 1 %) or "plain", 32 bits each.
        values: torch.float32, torch.bfloat16 or torch.int8 (a unit for each 256 values): `compress.entries`.
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
        """How many elements of `numel` are sent, zeros left out."""
        return _k(self.density, numel)

    @property
    def plain(self) -> bool:
        """Whether the wire is the entries as they are: a count, 32-bit indices, float32 values."""
        return self.indices == "plain" and self.values == torch.float32

    def parts(self, numel: int) -> tuple[Part, ...]:
        if numel >= 1 << 31:
            raise ValueError(f"TopK sends 32-bit indices and cannot serve {numel} elements: use buckets below 2^31")
        k = self.k(numel)
        return Part("indices", self._index_fields(numel, k), 1), Part("values", self._value_fields(k), 1)

    def _index_fields(self, numel: int, k: int) -> tuple[Field, ...]:
        if self.indices == "plain":
            count = Field("count", "<u4", 1, "how many of the k entries are used; the others are zero")
            return count, Field("index", "<u4", k, "positions of the largest magnitudes, ascending")
        layout = index_layout(numel, k)
        upper = "bit (position >> l) + i is set for entry i; l is the number of low bits, and k·l + n / 2^l smallest"
        low = "the l low bits of each position, from the lowest bit up; unused ones are zero"
        fields = (Field("upper", "<u4", layout.upper_words, upper), Field("low", "<u4", layout.low_words, low))
        return tuple(field for field in fields if field.count)

    def _value_fields(self, k: int) -> tuple[Field, ...]:
        if self.values == torch.float32:
            return (Field("value", "<f4", k, "their values"),)
        if self.values == torch.bfloat16:
            return (Field("value", "<u2", -(-k // 2) * 2, "their values as bfloat16"),)
        unit = Field("unit", "<f4", -(-k // VALUE_BLOCK), "for each 256 values, the largest finite magnitude / 127")
        return unit, Field("code", "i1", -(-k // 4) * 4, "value / unit, to nearest; -128 is NaN")


@lru_cache(maxsize=4096)
def _k(density: float, numel: int) -> int:
    # As the decimal fraction that was written down: 0.07 · 100 is 7, though not in floating point.
    return max(1, math.ceil(Fraction(repr(density)) * numel))
