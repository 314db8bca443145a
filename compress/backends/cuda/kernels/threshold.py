"""Threshold on a GPU: what TopK selects, less what does not exceed it."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import Workspace
from ...codec_types import ThresholdLike
from .topk import TopK


class Threshold(TopK[ThresholdLike]):
    """The largest, as many as there is room for, less those that do not exceed the threshold."""

    def encode_raw(
        self,
        codec: ThresholdLike,
        x: Tensor,
        residual: Tensor | None,
        row: Tensor,
        values: Tensor,
        draw: Tensor | None,
        workspace: Workspace,
    ) -> None:
        super().encode_raw(codec, x, residual, row, values, draw, workspace)
        indices, k = row[1:], len(values)
        slots = torch.arange(k, device=x.device)
        used, low = slots < row[:1], values.abs() <= codec.threshold
        if residual is not None:  # which they had left; of what is not used the values are zero
            self.entries.add(residual, torch.where(used, indices, slots), torch.where(used & low, values, -0.0))
        kept = used & ~low
        place = torch.where(kept, kept.cumsum(0) - 1, k)  # one more, for what is not kept
        for listed in (indices, values):
            listed.copy_(torch.zeros(k + 1, dtype=listed.dtype, device=x.device).scatter_(0, place, listed)[:k])
        row[:1].copy_(kept.sum())
