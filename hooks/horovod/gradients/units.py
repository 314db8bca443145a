"""Units: gradients that go into one operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..runtime.engine import Pending

#: Bytes of a bucket that a codec compresses as one; what DDP's are.
BUCKET_BYTES = 25 << 20


@dataclass(eq=False)
class Unit:
    parameters: list[Tensor]
    #: The gradients that backward has made, and the versions of their memory then.
    arrived: dict[Tensor, tuple[Tensor | None, int]] = field(default_factory=dict)
    pending: Pending | None = None
    contexts: list[Any] = field(default_factory=list)


def buckets_of(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Buckets for a codec, in reverse order of the parameters: of one dtype on one device, up to `BUCKET_BYTES`."""
    for kind in dict.fromkeys((p.dtype, p.device) for p in parameters):
        bucket, filled = list[Tensor](), 0
        for p in reversed([p for p in parameters if (p.dtype, p.device) == kind]):
            if bucket and filled + p.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(p)
            filled += p.nbytes
        yield bucket


def check_alike(every: Sequence[tuple[int, list[list[str]]]]) -> None:
    """Raises ValueError unless all ranks' units of several are the same, by name: in a unit places count."""
    (first, units), *others = every
    for rank, theirs in others:
        if theirs != units:
            pairs = zip(
                (name for unit in units for name in unit), (name for unit in theirs for name in unit), strict=False
            )
            what = next((f": {a} and {b} have one place" for a, b in pairs if a != b), "")
            raise ValueError(
                f"ranks {first} and {rank} do not have their parameters in one order, or in one way of grouping{what}. "
                "What is reduced together is told apart by order: make model, optimizer and groups alike everywhere; "
                "that of a set differs from process to process"
            )


def empty_rows(p: Tensor, dimensions: int) -> Tensor:
    indices = torch.zeros((dimensions, 0), dtype=torch.int64, device=p.device)
    values = torch.zeros((0, *p.shape[dimensions:]), dtype=p.dtype, device=p.device)
    return torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=True)
