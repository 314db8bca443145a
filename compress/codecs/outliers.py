"""Outliers: the largest elements exactly, and all the others in another code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..codec import BlockCodec, Codec, check_number
from ..formats.entries import VALUE_DTYPES, index_fields, value_fields
from ..formats.wire import Part
from .topk import TopK


@dataclass(frozen=True)
class Outliers(Codec):
    """The k largest magnitudes as `TopK` sends them, and the rest in a code of blocks (as outliers of weights beside
    their low-bit codes: Dettmers et al., "SpQR", ICLR 2024).

    Gradients are heavy-tailed within a block: a code of few levels caps the outliers, which then arrive late and swell
    the residual. With the largest sent beside it, the levels fit what is left.

    k = max(1, ⌈density · n⌉). What is selected counts as zero for the inner code, and what that says of it is not
    heard; only what is not finite stays, so that its whole block is seen to be. What neither has sent is the residual,
    the rounding of values included. Unbiased if the inner code is and values are float32.

    It goes through the exchange "gather": its entries lie anywhere in the gradient, so no slice of the wire is one of
    the gradient, as "two_pass" needs; and most of the gradient has no entry, as "union" and "split" need. That it looks
    for them in the whole gradient is what makes it learn: with the largest 1 % of each 8192 elements the text model of
    docs/tables-learning.md ended 11 % above float32 under SGD, in the place of 2 %.

    Args:
        inner: codes the rest: `OneBit()`, `Ternary()`, `QSGD()` or any other `BlockCodec`.
        density: share of the elements that are sent as they are, in (0, 1]. 0.01 costs 0.41 bits an element.
        values: how these travel: torch.float32, torch.bfloat16 or torch.int8, as in `TopK`.

    Raises:
        TypeError: `inner` is no codec of blocks.
        ValueError: another argument is out of range.
    """

    name: ClassVar[str] = "outliers"
    source: ClassVar[str] = "Dettmers et al. 2024"

    inner: BlockCodec
    density: float = 0.01
    values: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not isinstance(self.inner, BlockCodec):
            raise TypeError(f"inner={self.inner!r}: expected a codec of blocks, such as OneBit(), Ternary() or QSGD()")
        check_number("density", self.density, 0.0, 1.0)
        if self.values not in VALUE_DTYPES:
            raise ValueError(f"values={self.values!r}: expected one of {', '.join(map(str, VALUE_DTYPES))}")

    @property
    def selection(self) -> TopK:
        """The codec of what is sent as it is."""
        return TopK(density=self.density, values=self.values)

    def k(self, numel: int) -> int:
        """The most entries that a gradient of `numel` elements has."""
        return self.selection.k(numel)

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

    @property
    def speed_key(self) -> Outliers:
        return replace(self, density=self.selection.speed_key.density)

    def parts(self, numel: int) -> tuple[Part, ...]:
        if numel >= 1 << 31:
            raise ValueError(f"Outliers sends 32-bit indices and cannot serve {numel} elements: use buckets below 2^31")
        k = self.k(numel)
        entries = Part("indices", index_fields(numel, k), 1), Part("values", value_fields(k, self.values), 1)
        return *entries, *self.inner.parts(numel)
