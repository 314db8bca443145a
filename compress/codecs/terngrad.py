"""TernGrad: every element becomes -1, 0 or +1 times the scale of its block, five to a byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from ..codec import BlockCodec, check_choice, check_number
from ..formats.wire import Field


@dataclass(frozen=True)
class TernGrad(BlockCodec):
    """Ternary gradients (Wen et al., "TernGrad", NeurIPS 2017).

    Elements are clipped at clip·σ, then x becomes sign(x)·scale with probability |x|/scale, scale being the largest
    clipped magnitude: unbiased for the clipped value. σ is the root mean square of the block: gradients are about
    zero, and a block of equal elements, whose deviation from its mean is zero, is not clipped away.

    Args:
        block: elements that share a scale, a multiple of 1280 (5 × 256). 1280 costs 1.625 bits an element.
        clip: in units of σ, above 0; `math.inf` switches clipping off.
        rounding: "stochastic", or "nearest" (what error feedback needs).
    """

    name: ClassVar[str] = "terngrad"
    source: ClassVar[str] = "Wen et al. 2017"
    block_multiple: ClassVar[int] = 1280

    block: int = 1280
    clip: float = 2.5
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        self._check_block(self.block)
        check_number("clip", self.clip, 0.0, float("inf"))
        check_choice("rounding", self.rounding, ("stochastic", "nearest"))

    @cached_property  # kernels ask for it with every bucket
    def block_size(self) -> int:
        return self.block

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def with_feedback(self) -> TernGrad:
        return replace(self, rounding="nearest")

    def fields(self) -> tuple[Field, ...]:
        return trit_fields(self.block)


def trit_fields(block: int) -> tuple[Field, ...]:
    """A record of `block` trits and what they are multiplied by."""
    return Field("scale", "<f4", 1, "what a nonzero trit stands for"), trits_field(block)


def trits_field(block: int) -> Field:
    return Field(
        "trits",
        "u1",
        block // 5,
        "byte j of each 256 holds elements j, j+256, … j+1024 of 1280 as digits of base 3, the first lowest: "
        "0 is zero, 1 plus, 2 minus; 243 and above never occur",
    )
