"""Outliers: the largest elements of each chunk exactly, and all the others in another code."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .chunked import MOST_ENTRIES, ChunkedTopK
from .codec import BlockCodec, check_number
from .entries import VALUE_DTYPES
from .wire import Field

#: Elements of a chunk, or as many as are whole blocks: few enough to lie in cache until they are coded.
CHUNK = 8192


@dataclass(frozen=True)
class Outliers(BlockCodec):
    """The k largest magnitudes of every chunk as `ChunkedTopK` sends them, and the rest in a code of blocks, as
    outliers of weights beside their low-bit codes (Dettmers et al., "SpQR", ICLR 2024).

    Gradients are heavy-tailed within a block: a code of few levels caps the outliers, which then arrive late and swell
    the residual. With the largest sent beside it, the levels fit what is left.

    A chunk is 8192 elements, or as many as are whole blocks of the inner code, at least one; k = ⌈density · chunk⌉.
    What is selected counts as zero for the inner code, and what that says of it is not heard. What neither has sent is
    the residual, the rounding of values included. Where an element of a chunk is not finite, nothing is selected there,
    and the inner code says which of its blocks are not. Unbiased if the inner code is and values are float32.

    A record is that of a chunk's entries, then the inner code's, so every exchange carries it that carries blocks.

    Args:
        inner: codes the rest: `OneBit()`, `Ternary()`, `QSGD()` or any other `BlockCodec`.
        density: share of the elements that are sent as they are, above 0: 0.01 costs 0.41 bits an element.
        values: how these travel: torch.float32, torch.bfloat16 or torch.int8, as in `ChunkedTopK`.

    Raises:
        TypeError: `inner` is no codec of blocks.
        ValueError: another argument is out of range: a chunk has at most 1024 outliers.
    """

    name: ClassVar[str] = "outliers"
    source: ClassVar[str] = "Dettmers et al. 2024"

    inner: BlockCodec
    density: float = 0.01
    values: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not isinstance(self.inner, BlockCodec) or isinstance(self.inner, Outliers):
            raise TypeError(f"inner={self.inner!r}: expected a codec of blocks, such as OneBit(), Ternary() or QSGD()")
        check_number("density", self.density, 0.0, 1.0)
        if self.values not in VALUE_DTYPES:
            raise ValueError(f"values={self.values!r}: expected one of {', '.join(map(str, VALUE_DTYPES))}")
        if self.k > MOST_ENTRIES:
            raise ValueError(
                f"density={self.density!r}: {self.k} of {self.block_size} elements, and a chunk has at most "
                f"{MOST_ENTRIES} outliers: take {MOST_ENTRIES / self.block_size:.3g} or less"
            )

    @property
    def blocks(self) -> int:
        """Blocks of the inner code in a chunk."""
        return max(1, CHUNK // self.inner.block_size)

    @property
    def block_size(self) -> int:
        return self.blocks * self.inner.block_size

    @property
    def k(self) -> int:
        """The most outliers of a chunk."""
        return max(1, math.ceil(self.density * self.block_size))

    @property
    def selection(self) -> ChunkedTopK:
        """The codec of what is sent as it is."""
        return ChunkedTopK(min(self.k, MOST_ENTRIES), self.block_size, self.values)

    @property
    def stochastic(self) -> bool:
        return self.inner.stochastic

    @property
    def lossless(self) -> bool:
        return self.inner.lossless and self.values == torch.float32

    def with_feedback(self) -> Outliers:
        inner = self.inner.with_feedback()
        assert isinstance(inner, BlockCodec)
        return replace(self, inner=inner)

    def fields(self) -> tuple[Field, ...]:
        inside = self.inner.wire_bytes(self.block_size)
        meaning = f"records of the inner code, of {self.inner.block_size} elements each; zero beyond the last element"
        return *self.selection.fields(), Field("rest", "u1", inside, meaning)
