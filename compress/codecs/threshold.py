"""Threshold: the elements that exceed a threshold, and nothing of the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..codec import check_number
from ..formats.entries import VALUE_DTYPES
from ..sparse_codec import SparseCodec
from .topk import TopK, entries_at, power_near


@dataclass(frozen=True)
class Threshold(SparseCodec):
    """Elements whose magnitude exceeds τ (Strom, "Scalable distributed DNN training …", Interspeech 2015), in float32,
    bfloat16 or int8: Strom sends ±τ of each and keeps the rest, here they go whole.

    A wire has room for `most` of the elements, whatever τ is, and is as long however few of them there are: by "gather"
    τ saves no bytes, by "union" and "split", which send entries one by one, it does. Where more exceed τ the largest of
    them go, ties to the lower index, so that a τ of 0 is `TopK`. NaN goes before infinity, and that before all else.

    Args:
        threshold: τ, 0 or more, in units of the gradient, as it is scaled where a GradScaler scales it.
        most: share of the elements that there is room for, in (0, 1].
        values: as of `TopK`.
    """

    name: ClassVar[str] = "threshold"
    source: ClassVar[str] = "Strom 2015"

    threshold: float = 1e-3
    most: float = 0.01
    values: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        threshold = self.threshold
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not number or not 0.0 <= threshold < 3.4e38:
            raise ValueError(f"threshold={threshold!r}: expected a number from 0, in units of the gradient")
        check_number("most", self.most, 0.0, 1.0)
        if self.values not in VALUE_DTYPES:
            raise ValueError(f"values={self.values!r}: expected one of {', '.join(map(str, VALUE_DTYPES))}")

    @property
    def value_dtype(self) -> torch.dtype:
        return self.values

    @property
    def raw_entries(self) -> RawThreshold:
        return RawThreshold(self.threshold, self.most)

    @property
    def speed_key(self) -> Threshold:
        """One of the most that there may be: how many exceed τ depends on the gradient."""
        return replace(self, threshold=0.0, most=power_near(self.most))

    def k(self, numel: int) -> int:
        """⌈most · numel⌉."""
        return entries_at(self.most, numel)

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor:
        over = ~(x.abs() <= self.threshold)  # NaN too
        k = self.k(len(x))
        if int(over.sum()) <= k:
            return over.nonzero().view(-1)
        # The largest of all are the largest of those.
        top = TopK(density=self.most, indices="plain")
        wire = torch.empty(top.wire_bytes(len(x)), dtype=torch.uint8, device=x.device)
        top.encode(x, wire, None, top.workspace(len(x), x.device))
        return wire.view(torch.int32)[1 : 1 + k].long()


class RawThreshold(Threshold):
    """The same elements as they are, by the same kernels."""

    @property
    def packs_indices(self) -> bool:
        return False
