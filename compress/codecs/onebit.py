"""1-bit SGD: the sign of every element, and per block what the two signs stand for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ..codec import BlockCodec, check_choice
from ..formats.wire import Field


@dataclass(frozen=True)
class OneBit(BlockCodec):
    """Sign bits and two levels a block (Seide et al., "1-bit stochastic gradient descent …", Interspeech 2014).

    With `scale="sided"` the levels are the means of the block's negative and of its other elements: of all pairs of
    levels these leave the smallest error. With `scale="symmetric"` they are ∓ the mean magnitude (Bernstein et al.,
    signSGD, 2018; Karimireddy et al. 2019). Deterministic and a contraction, so it keeps a residual by default.

    Args:
        block: elements that share two levels, a multiple of 256. 1024 costs 1.0625 bits an element.
        scale: "sided" or "symmetric".
    """

    name: ClassVar[str] = "onebit"
    source: ClassVar[str] = "Seide et al. 2014"

    block: int = 1024
    scale: str = "sided"

    def __post_init__(self) -> None:
        self._check_block(self.block)
        check_choice("scale", self.scale, ("sided", "symmetric"))

    @cached_property  # kernels ask for it with every bucket
    def block_size(self) -> int:
        return self.block

    def fields(self) -> tuple[Field, ...]:
        return (
            Field("negative", "<f4", 1, "what a set bit stands for: mean of the elements below zero"),
            Field("positive", "<f4", 1, "what a clear bit stands for: mean of the other elements"),
            Field("signs", "u1", self.block // 8, "bit i % 8 of byte i // 8: element i is below zero"),
        )
