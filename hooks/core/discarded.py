"""Means that nobody applies: they go back to the residuals.

When every rank adds such a mean to its residual, the mean of the residuals is what it was before, with the gradients
that had gone in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Layout
from ..comm.pipeline import Pipeline
from .dense_path import RAISED_TIMEOUT
from .step import Step


class DiscardedMeans:
    """Returns the means of a model that are not applied.

    Args:
        feedback: the residuals that take them.
    """

    def __init__(self, feedback: FeedbackStore) -> None:
        self._feedback = feedback

    def discard(self, step: Step, pipeline: Pipeline) -> None:
        """No mean of the step is applied: the backward pass raised, here or on the pipeline."""
        if step.settled:
            return
        step.settled = True
        if not pipeline.failed:
            pipeline.submit(partial(self.keep, step))
        # Before DDP's buckets change; but the other ranks may be in trouble too.
        if pipeline.idle(RAISED_TIMEOUT.total_seconds()) and pipeline.failed:
            self.keep(step)

    def keep(self, step: Step, names: Collection[str] | None = None) -> Tensor:
        """Nobody applies the means of these parameters, or of all: keep them. On the pipeline."""
        for layout, mean, _ in self._returned(step):
            returned = [(slot, None) for slot in layout if names is None or slot.name in names]
            self._feedback.restore(layout, mean, returned)
        return torch.empty(0, device="cpu")

    def _returned(self, step: Step) -> Iterator[tuple[Layout, Tensor, Tensor]]:
        """Each layout of which something is kept, the flat mean in it, and DDP's buffer. A step that is undone sent
        nothing."""
        if not step.undone:
            for bucket, buffer in step.reduced:
                mean = buffer if bucket.packed is None else bucket.packed
                if bucket.packed is None and step.share != 1.0:
                    mean = mean / step.share
                for layout, means in ((bucket.layout, mean), (bucket.beside, bucket.extra)):
                    if self._feedback.holds(layout):
                        yield layout, means, buffer
