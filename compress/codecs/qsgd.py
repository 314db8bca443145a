"""QSGD: a sign and a few magnitude bits an element, relative to a norm of its block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from ..codec import BlockCodec, check_choice
from ..formats.wire import Field


@dataclass(frozen=True)
class QSGD(BlockCodec):
    """Quantization to s = 2^(bits-1) - 1 levels (Alistarh et al., "QSGD", NeurIPS 2017).

    With u = norm / s, element x becomes sign(x)·u·⌊|x|/u + r⌋, at most s·u: r is uniform in [0, 1) for stochastic
    rounding (unbiased), 1/2 for nearest. `norm="max"` is the paper's recommendation in practice; `"l2"` the one of its
    theorems. The norm is taken of x scaled by a power of two, so no magnitude overflows or vanishes.

    `QSGD(bits=8, rounding="nearest")` is what others call blockwise int8: the largest magnitude of a block is 127. With
    `error_feedback=True` any `QSGD` rounds so.

    Args:
        bits: 2 to 8 bits an element, sign included.
        block: elements that share a norm, a multiple of 256. 512 costs 1/16 bit an element.
        norm: "max" or "l2".
        rounding: "stochastic" or "nearest".
    """

    name: ClassVar[str] = "qsgd"
    source: ClassVar[str] = "Alistarh et al. 2017"

    bits: int = 4
    block: int = 512
    norm: str = "max"
    rounding: str = "stochastic"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"bits={self.bits!r}: expected 2 to 8 bits an element; for 1 bit use OneBit()")
        self._check_block(self.block)
        check_choice("norm", self.norm, ("max", "l2"))
        check_choice("rounding", self.rounding, ("stochastic", "nearest"))

    @property
    def levels(self) -> int:
        """s, the number of levels above zero."""
        return (1 << (self.bits - 1)) - 1

    @cached_property  # kernels ask for it with every bucket
    def block_size(self) -> int:
        return self.block

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def with_feedback(self) -> QSGD:
        # Of the largest element, at least, something must be sent: with the l2 norm all of a block may round to zero.
        return replace(self, rounding="nearest", norm="max")

    def fields(self) -> tuple[Field, ...]:
        return (
            Field("unit", "<f4", 1, "the size of one level: norm / s"),
            Field(
                "codes",
                "u1",
                self.block // 8 * self.bits,
                f"{self.bits} bits an element from the lowest bit up: magnitude, then sign on top; -0 never occurs",
            ),
        )
