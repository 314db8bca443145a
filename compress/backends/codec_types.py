"""The options of codecs that kernels read: backends do not import codecs."""

from __future__ import annotations

from typing import Protocol

import torch

from .kernels import BlockLike, CodecLike
from .sparse import SparseLike


class OneBitLike(BlockLike, Protocol):
    @property
    def block(self) -> int: ...

    @property
    def scale(self) -> str: ...


class QSGDLike(BlockLike, Protocol):
    @property
    def block(self) -> int: ...

    @property
    def bits(self) -> int: ...

    @property
    def levels(self) -> int: ...

    @property
    def norm(self) -> str: ...


class TernaryLike(BlockLike, Protocol):
    @property
    def block(self) -> int: ...


class TernGradLike(TernaryLike, Protocol):
    @property
    def clip(self) -> float: ...


class EDENLike(BlockLike, Protocol):
    @property
    def levels(self) -> int: ...


class CastLike(BlockLike, Protocol):
    @property
    def dtype(self) -> torch.dtype: ...


class ChunkedTopKLike(BlockLike, Protocol):
    @property
    def k(self) -> int: ...

    @property
    def chunk(self) -> int: ...

    @property
    def values(self) -> torch.dtype | int: ...

    @property
    def bits(self) -> int: ...

    @property
    def level_bytes(self) -> int: ...

    @property
    def index_bytes(self) -> int: ...


class ThresholdLike(SparseLike, Protocol):
    @property
    def threshold(self) -> float: ...


class PowerSGDLike(CodecLike, Protocol):
    @property
    def rank(self) -> int: ...

    def pieces(self, numel: int) -> tuple[PieceLike, ...]: ...


class PieceLike(Protocol):
    """A matrix, or, without columns, elements that are in none."""

    @property
    def start(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...
