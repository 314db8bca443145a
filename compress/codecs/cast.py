"""The honest baselines: half precision, and no compression at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..codec import BlockCodec
from ..formats.wire import Field


@dataclass(frozen=True)
class Cast(BlockCodec):
    """Round to nearest even in half precision, what PyTorch's fp16 and bf16 hooks send, with the rounding error kept
    as a residual. Beyond float16's range a value becomes infinite, and is seen.

    Args:
        dtype: torch.float16 or torch.bfloat16.
    """

    name: ClassVar[str] = "cast"
    source: ClassVar[str] = "IEEE 754 binary16; bfloat16"

    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype={self.dtype}: expected torch.float16 or torch.bfloat16")

    @property
    def block_size(self) -> int:
        return 2  # a record must be a multiple of 4 bytes

    def fields(self) -> tuple[Field, ...]:
        return (Field("value", "<u2", 2, "the elements in half precision"),)


@dataclass(frozen=True)
class Identity(BlockCodec):
    """float32 as it is: what compression is measured against."""

    name: ClassVar[str] = "identity"
    source: ClassVar[str] = "IEEE 754 binary32"

    @property
    def block_size(self) -> int:
        return 1

    @property
    def lossless(self) -> bool:
        return True

    def fields(self) -> tuple[Field, ...]:
        return (Field("value", "<f4", 1, "the element"),)
