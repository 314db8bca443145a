"""PowerSGD: matrices of gradients by two thin factors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

from ..codec import Codec
from ..formats.layout import Layout, Slot
from ..formats.wire import Field, Part

#: So that scratch stays small beside a matrix.
MOST_RANK = 64


class Piece(NamedTuple):
    """A matrix of `rows` times `columns` elements from `start` on, row by row; or, without columns, so many elements
    that travel as they are."""

    start: int
    rows: int
    columns: int


@dataclass(frozen=True, repr=False)
class PowerSGD(Codec):
    """Low rank (Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019): a matrix M of n x m elements travels as P·Qᵀ,
    in r·(n + m) numbers, by one step of subspace iteration from S [m, r]:

        P = orthonormal columns of M·S;  Q = Mᵀ·P

    The exchange `factors`, made for it, averages M·S and then Mᵀ·P over the ranks, so that all is as if one rank had
    compressed the mean gradient, whatever their number; and S is Q of the step before, each column of length 1. That is
    in no checkpoint: after one is loaded it is drawn anew, alike on all ranks, so a resumed run has other bits than one
    that went on, though nothing is lost. By `gather` each rank sends factors of its own, and S is drawn anew for every
    encoding, alike on all ranks: numbers in (-1, 1), (u + 1/2) / 2^15 - 1 with u being Philox's 16 bits (`new_draw`; of
    the stream the low 32 bits).

    The matrices are the model's: of each parameter the dimension that is outermost in memory, by all others. What that
    makes no smaller travels as it is, such as biases. Where shapes are not known, as on a bare tensor, the elements are
    one matrix as square as may be, and the rest as it is.

    P is made orthonormal by modified Gram-Schmidt in float64, each column rounded to float32 after every step. A column
    that the ones before it leave less than 2^-13 of is zero, with its part of Q: the matrix has a lower rank. M·S adds
    up in 256 partial sums for each row, as statistics of blocks do, and Mᵀ·P by 64 rows at a time, one after the other.

    If anything in a matrix is not finite, all of it decodes to NaN, as one block.

    Args:
        rank: r, from 1 to 64. More cost more bytes and time, and lose less in each step; what is lost is kept.
        shapes: rows and columns of each matrix, one after the other, as the exchanges fill it in; (n, 0) is n elements
            that travel as they are.
    """

    name: ClassVar[str] = "power_sgd"
    source: ClassVar[str] = "Vogels et al. 2019"
    exchange: ClassVar[str] = "factors"

    rank: int = 4
    shapes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or not 1 <= self.rank <= MOST_RANK:
            raise ValueError(f"rank={self.rank!r}: expected a whole number from 1 to {MOST_RANK}")
        if not isinstance(self.shapes, tuple) or not all(map(_is_shape, self.shapes)):
            raise ValueError(
                f"shapes={self.shapes!r}: expected rows and columns of each matrix in a tuple, as ((64, 32), (10, 0)); "
                "the exchanges fill it in, so leave it out"
            )

    def __str__(self) -> str:
        return f"PowerSGD(rank={self.rank})"

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, shapes={self.shapes})" if self.shapes else str(self)

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def default_feedback(self) -> bool:
        return True

    @property
    def speed_key(self) -> PowerSGD:
        return replace(self, shapes=())

    def for_layout(self, layout: Layout) -> PowerSGD:
        return replace(self, shapes=tuple(_shape(slot) for slot in layout))

    def pieces(self, numel: int) -> tuple[Piece, ...]:
        """What so many elements consist of, in order.

        Raises:
            ValueError: `shapes` have another number of elements.
        """
        return _pieces(self.rank, self.shapes, numel)

    def parts(self, numel: int) -> tuple[Part, ...]:
        pieces = self.pieces(numel)
        whole = sum(piece.rows for piece in pieces if not piece.columns)
        left, right = (self.rank * sum(p[side] for p in pieces if p.columns) for side in (1, 2))
        fields = (
            Field("whole", "<f4", whole, "elements that are in no matrix"),
            Field("left", "<f4", left, "P of each matrix, column by column"),
            Field("right", "<f4", right, "Q of each matrix, column by column"),
        )
        return (Part("factors", fields, 1),)


def _is_shape(value: object) -> bool:
    """Whether it is rows and columns, either of which may be 0. A codec must be hashable."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in value)


def _shape(slot: Slot) -> tuple[int, int]:
    """Rows and columns of a parameter as it lies in memory. The stride of a length of 1 means nothing."""
    sizes = [size for _, size in sorted(zip(slot.stride, slot.shape, strict=True)) if size != 1]
    return (sizes[-1], slot.numel // sizes[-1]) if len(sizes) > 1 and slot.numel else (slot.numel, 0)


@lru_cache(maxsize=4096)
def _pieces(rank: int, shapes: tuple[tuple[int, int], ...], numel: int) -> tuple[Piece, ...]:
    side = math.isqrt(numel)
    shapes = shapes or ((side, side), (numel - side * side, 0))
    pieces: list[Piece] = []
    start = 0
    for rows, columns in shapes:
        if rank * (rows + columns) >= rows * columns:
            length = rows * max(1, columns)
            if pieces and not pieces[-1].columns:  # one run with what is before it
                last = pieces.pop()
                pieces.append(Piece(last.start, last.rows + length, 0))
            elif length:
                pieces.append(Piece(start, length, 0))
        else:
            length = rows * columns
            pieces.append(Piece(start, rows, columns))
        start += length
    if start != numel:
        raise ValueError(f"PowerSGD's shapes {shapes} have {start} elements, not {numel}: give the matrices' own")
    return tuple(pieces)
