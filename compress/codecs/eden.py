"""EDEN: every 256 elements are rotated at random, and become -1, 0 or +1 times their scale, five to a byte."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..codec import BlockCodec, check_choice
from ..formats.wire import Field
from .terngrad import trits_field

#: Elements of a record: five rotations, whose trits share bytes.
BLOCK = 1280


@dataclass(frozen=True)
class EDEN(BlockCodec):
    """Ternary codes of rotated gradients (Vargaftik et al., "EDEN", ICML 2022; "DRIVE", NeurIPS 2021).

    Signs that are drawn anew for each record, and Sylvester's Hadamard matrix, rotate each 256 elements x, so that they
    become about normal, whatever they were: r = HDx/16. r becomes 0 where |r| is at most 0.612 σ, σ² being the mean of
    r², and ±L elsewhere: Lloyd's thresholds for normal numbers (1957). L = Σr² of all 256, divided by Σ|r| of those
    that do not become 0, makes the decoded vector unbiased over the rotations where no few elements are far larger than
    the others. One to three elements with four fifths of Σx² or more hide the others of their 256, or magnify them up
    to twice. The error is 0.23 of Σx²; that of `TernGrad`, with as many trits, is more than twice as much on normal and
    on heavy-tailed numbers. No residual is needed, so nothing arrives late. 1.675 bits an element. For σ from 2^-125 to
    2^123: a record beyond counts as not finite, and below elements become 0.

    Args:
        scale: "unbiased", with drawn rotations; or "closest", which error feedback needs: the same rotation always,
            and L = the mean of the |r| that are not 0, which leaves the least error (0.19 of Σx²).
    """

    name: ClassVar[str] = "eden"
    source: ClassVar[str] = "Vargaftik et al. 2022"

    scale: str = "unbiased"

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("unbiased", "closest"))

    @property
    def block_size(self) -> int:
        return BLOCK

    @property
    def stochastic(self) -> bool:
        return self.scale == "unbiased"

    def with_feedback(self) -> EDEN:
        return replace(self, scale="closest")

    def fields(self) -> tuple[Field, ...]:
        meaning = (
            "bfloat16, of each 256 elements: L/16, what Sylvester's Hadamard transform of their trits is multiplied "
            "by, before their signs; NaN in all five: the record is not finite"
        )
        return (
            Field("scales", "<u2", 5, meaning),
            Field(
                "seed", "<u2", 1, "of the signs: those of elements j, j+256, … j+1024 are hash(256·seed + j)'s top bits"
            ),
            trits_field(BLOCK),
        )
