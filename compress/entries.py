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
    """The shortest layout of `k` ≥ 0 ascending indices below `numel` ≥ 1."""
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
