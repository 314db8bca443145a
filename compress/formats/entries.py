"""How the entries of a sparse gradient are packed: k indices below n near their entropy, k values in 4, 2 or 1 bytes.

Indices ascend, and are split as Elias and Fano do: the l lowest bits of each lie one after the other in `low`; bit
(index >> l) + i of `upper` is set for entry i. That is k·l + k + n / 2^l bits whatever the indices are, and l is chosen
so that it is smallest: within 5 % of the entropy at densities of 0.1 and 1 %. The number of set bits in `upper` is the
number of entries, and an entry is found from the bits before its own, so that words decode in parallel after one scan.

Values are float32, bfloat16 (to nearest, ties to even, the largest finite number for what is beyond it) or int8: for
each 256 values a unit u = max |v| / 127 over those that are finite (2^-149 where that is zero and the maximum is not),
and round(v / u); -128 stands for NaN. A finite value decodes to a finite one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .wire import Field

#: Values that share a unit, and the largest unit: 127 of it are finite.
VALUE_BLOCK = 256
LARGEST_UNIT = 132104.046875 * 2.0**104
VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class IndexLayout:
    """Where the bits of `k` indices below `numel` lie, in 32-bit words: `upper_words`, then `low_words`."""

    low_bits: int
    upper_words: int
    low_words: int

    @property
    def nbytes(self) -> int:
        return 4 * (self.upper_words + self.low_words)


@lru_cache(maxsize=4096)
def index_layout(numel: int, k: int) -> IndexLayout:
    """The shortest layout of `k` ≥ 0 ascending indices below `numel` ≥ 1.

    Raises:
        ValueError: `k` is negative, as a damaged message may say.
    """
    if k < 0:
        raise ValueError(f"{k} indices have no layout: all ranks need the same version of gradwire")
    if k == 0:
        return IndexLayout(0, 0, 0)
    low, highest = 0, numel - 1
    while (highest >> low) - (highest >> (low + 1)) > k:
        low += 1
    return IndexLayout(low, -(-((highest >> low) + k) // 32), -(-k * low // 32))


def index_bytes(numel: int, k: int) -> int:
    """Bytes of `k` packed indices below `numel`, a multiple of 4."""
    return index_layout(numel, k).nbytes


def value_bytes(k: int, dtype: torch.dtype) -> int:
    """Bytes of `k` packed values, a multiple of 4."""
    if dtype == torch.float32:
        return 4 * k
    if dtype == torch.bfloat16:
        return -(-k // 2) * 4
    return 4 * -(-k // VALUE_BLOCK) + -(-k // 4) * 4


def index_fields(numel: int, k: int, packed: bool = True) -> tuple[Field, ...]:
    """The fields in which up to `k` indices below `numel` travel, or lie as they are: a count, then 32 bits each."""
    if not packed:
        count = Field("count", "<u4", 1, "how many of the k entries are used; the others are zero")
        return count, Field("index", "<u4", k, "positions of the entries, ascending")
    layout = index_layout(numel, k)
    upper = "bit (position >> l) + i is set for entry i; l is the number of low bits, and k·l + n / 2^l smallest"
    low = "the l low bits of each position, from the lowest bit up; unused ones are zero"
    fields = (Field("upper", "<u4", layout.upper_words, upper), Field("low", "<u4", layout.low_words, low))
    return tuple(field for field in fields if field.count)


def value_fields(k: int, dtype: torch.dtype) -> tuple[Field, ...]:
    """The fields in which `k` values travel as `dtype`."""
    if dtype == torch.float32:
        return (Field("value", "<f4", k, "their values"),)
    if dtype == torch.bfloat16:
        return (Field("value", "<u2", -(-k // 2) * 2, "their values as bfloat16"),)
    unit = Field("unit", "<f4", -(-k // VALUE_BLOCK), "for each 256 values, the largest finite magnitude / 127")
    return unit, Field("code", "i1", -(-k // 4) * 4, "value / unit, to nearest; -128 is NaN")


def split_raw(wire: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The entries of a raw wire (`SparseCodec.raw_entries`), without a copy: ascending int32 indices, float32 values.

    Waits for the device, to learn how many they are.
    """
    words, first = wire.view(torch.int32), 1 + k
    count = int(words[0])
    return words[1 : 1 + count], wire.view(torch.float32)[first : first + count]
