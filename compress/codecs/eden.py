"""EDEN: every 256 elements are rotated at random, and keep their signs, or become -1, 0 or +1, times their scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..codec import BlockCodec, check_choice
from ..formats.wire import Field
from .terngrad import trits_field

#: By number of levels, the rows of a record: rotations of 256 elements, whose digits share bytes.
ROWS = {2: 8, 3: 5}


@dataclass(frozen=True)
class EDEN(BlockCodec):
    """Codes of two or three levels, of rotated gradients (Vargaftik et al., "EDEN", ICML 2022; "DRIVE", NeurIPS 2021).

    Signs that are drawn anew for each record, and Sylvester's Hadamard matrix, rotate each 256 elements x, so that they
    become about normal, whatever they were: r = HDx/16. Of three levels r becomes 0 where |r| is at most 0.612 σ, σ²
    being the mean of r², and ±L elsewhere: Lloyd's thresholds for normal numbers (1957). Of two it becomes ±L, by its
    sign. L = Σr² of all 256, divided by Σ|r| of those that do not become 0, makes the decoded vector unbiased over the
    rotations where no few elements are far larger than the others. One to three elements with four fifths of Σx² or
    more hide the others of their 256, or magnify them, with 99 % up to five times; of two levels, one with half of Σx²
    hides a sixth of the others, and with four fifths three quarters. No residual is needed, so nothing arrives late.
    For σ from 2^-125 to 2^123: a record beyond counts as not finite, and below elements become 0.

    Three levels take 1.675 bits an element, and their error is 0.23 of Σx²; that of `TernGrad`, with as many trits, is
    more than twice as much on normal and on heavy-tailed numbers. Two levels take 1.078 bits, and their error is 0.57
    of Σx². Owners of slices encode the mean with three all the same, so that "two_pass" receives 1.38 bits an element,
    23 times fewer than float32.

    Args:
        scale: "unbiased", with drawn rotations; or "closest", which error feedback needs: the same rotation always,
            and L = the mean of the |r| that are not 0, which leaves the least error (0.19 of Σx²; of two levels 0.36).
        levels: 3 or 2.
    """

    name: ClassVar[str] = "eden"
    source: ClassVar[str] = "Vargaftik et al. 2022"

    scale: str = "unbiased"
    levels: int = 3

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("unbiased", "closest"))
        check_choice("levels", self.levels, (2, 3))

    def __repr__(self) -> str:
        # Three levels go without saying: checkpoints from before there were two have this text.
        return f"EDEN(scale={self.scale!r}{', levels=2' if self.levels == 2 else ''})"

    @property
    def block_size(self) -> int:
        return 256 * ROWS[self.levels]

    @property
    def stochastic(self) -> bool:
        return self.scale == "unbiased"

    def with_feedback(self) -> EDEN:
        return replace(self, scale="closest")

    def second_pass(self) -> EDEN:
        """With three levels: the owners' error is everybody's, where that of the first pass is averaged over ranks."""
        return self if self.levels == 3 else replace(self, levels=3)

    def fields(self) -> tuple[Field, ...]:
        two = self.levels == 2
        digits, every, last = ("bits, ±1,", "eight", "j+1792") if two else ("trits", "five", "j+1024")
        scales = (
            "bfloat16, of each 256 elements: L/16, what Sylvester's Hadamard transform of their "
            f"{digits} is multiplied by, before their signs; NaN in all {every}: the record is not finite"
        )
        seed = f"of the signs: those of elements j, j+256, … {last} are hash(256·seed + j)'s top bits"
        bits = "bit i of byte j: what element 256·i + j of 2048 becomes, 0 for +1, 1 for -1"
        return (
            Field("scales", "<u2", ROWS[self.levels], scales),
            Field("seed", "<u2", 2 if two else 1, seed + "; then 0" * two),
            Field("bits", "u1", 256, bits) if two else trits_field(self.block_size),
        )
