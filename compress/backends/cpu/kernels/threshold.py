"""Threshold: TopK among those that exceed it."""

from __future__ import annotations

import numpy as np

from ...codec_types import ThresholdLike
from .topk import TopK


class Threshold(TopK[ThresholdLike]):
    """The largest of what exceeds the threshold, in the same pass: nothing below it becomes a candidate."""

    def lowest(self, codec: ThresholdLike) -> int:
        return int(np.float32(codec.threshold).view(np.int32)) + 1
