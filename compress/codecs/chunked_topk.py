"""Chunked top-k: the largest elements of every chunk, with indices and levels of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from ..codec import BlockCodec
from ..formats.entries import index_bytes, index_fields, value_fields
from ..formats.wire import Field

#: Bits of a value on the wire.
VALUE_BITS: dict[torch.dtype | int, int] = {2: 2, 4: 4, torch.int8: 8, torch.bfloat16: 16, torch.float32: 32}
#: More entries do not fit beside each other on a GPU's multiprocessor.
MOST_ENTRIES = 1024


@dataclass(frozen=True)
class ChunkedTopK(BlockCodec):
    """The k largest magnitudes of every chunk (DeMo: Peng et al., 2024; SparseLoCo: Sarfi et al., 2025).

    Against `TopK` of the whole gradient: nothing is searched beyond a chunk, indices count from its start, levels fit
    its own values, and records are equal, so that every exchange carries it that carries blocks, slices included. What
    is lost is the choice between chunks: each sends k, however large its elements are.

    Within a chunk the rules are `TopK`'s: ties go to the lower index, indices ascend, a zero is never selected, and
    what is not sent stays in the residual, the rounding of values included. A chunk that is not finite decodes to NaN,
    as a whole. Indices are Elias–Fano (`formats.entries`): 8 bits each for 64 of 4096, where a plain one takes 12. A
    tail sends up to k elements too.

    Values of 2 and 4 bits and torch.int8 are a sign and one of 2, 8 or 128 levels at equal distances, from `smallest`
    to `largest`; each magnitude takes the nearest. They are the chunk's own: one pair for a whole gradient would leave
    most chunks nothing to say. For 4 bits and more the levels span what is selected. The two of 2 bits begin there, and
    four steps of Lloyd's (1957) make each the mean of what is nearest to it: 0.4 % of the Σx² of what is selected are
    left for normal numbers, 5 % for Student's t of 3 degrees. There is no float16: it would lose small gradients.

    Args:
        k: entries of a chunk, from 1 to 1024, at most `chunk`. 64 of 4096 with 2 bits cost 0.172 bits an element.
        chunk: elements that are selected from together, a multiple of 256 up to 65536.
        values: how values travel: 2 or 4 (bits), torch.int8, torch.bfloat16 or torch.float32.

    Raises:
        ValueError: an argument is none of these.
    """

    name: ClassVar[str] = "chunked_topk"
    source: ClassVar[str] = "Peng et al. 2024; Sarfi et al. 2025"

    k: int = 64
    chunk: int = 4096
    values: torch.dtype | int = 2

    def __post_init__(self) -> None:
        self._check_block(self.chunk, "chunk")
        most = min(self.chunk, MOST_ENTRIES)
        if isinstance(self.k, bool) or not isinstance(self.k, int) or not 1 <= self.k <= most:
            raise ValueError(f"k={self.k!r}: expected a whole number of entries from 1 to {most} in a chunk")
        known = isinstance(self.values, int | torch.dtype) and not isinstance(self.values, bool)
        if not known or self.values not in VALUE_BITS:
            raise ValueError(f"values={self.values!r}: expected one of {', '.join(map(str, VALUE_BITS))}")

    @cached_property  # kernels ask for it with every bucket
    def block_size(self) -> int:
        return self.chunk

    @property
    def bits(self) -> int:
        """Bits of a value; fewer than 16 are a sign and a level."""
        return VALUE_BITS[self.values]

    @property
    def level_bytes(self) -> int:
        """Bytes of the levels, with which a record begins."""
        return 8 if self.bits < 16 else 0

    @property
    def index_bytes(self) -> int:
        """Bytes of the indices, which come next."""
        return index_bytes(self.chunk, self.k)

    def fields(self) -> tuple[Field, ...]:
        indices = index_fields(self.chunk, self.k)
        if isinstance(self.values, torch.dtype) and not self.level_bytes:
            return *indices, *value_fields(self.k, self.values)
        levels = (1 << self.bits - 1) - 1
        step = "(largest - smallest)" + (f" / {levels}" if levels > 1 else "")
        meaning = f"{self.bits} bits an entry from the lowest bit up: level, then sign on top"
        return (
            Field("smallest", "<f4", 1, "magnitude of level 0; NaN: the chunk is not finite"),
            Field("largest", "<f4", 1, f"no level lies above it; level q is smallest + q · {step}"),
            *indices,
            Field("codes", "u1", -(-self.k * self.bits // 32) * 4, meaning),
        )
