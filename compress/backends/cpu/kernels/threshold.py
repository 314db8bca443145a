"""Threshold: TopK among those that exceed it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .topk import TopK


class Threshold(TopK):
    """The largest of what exceeds the threshold, in the same pass: nothing below it becomes a candidate."""

    def lowest(self, codec: Any) -> int:
        return int(np.float32(codec.threshold).view(np.int32)) + 1
