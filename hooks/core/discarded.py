"""Means that are not applied: they return to the residuals.

If every rank adds such a mean to its residual, the mean of the residuals is that of before the step plus the mean of
the gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Layout
from ..comm.pipeline import Pipeline
from ..timeouts import RAISED_TIMEOUT
from .reducer import Step

#: Flat means by layout.
Means = Sequence[tuple[Layout, Tensor]]


class DiscardedMeans:
    """Returns means that are not applied to the residuals.

    Args:
        feedback: the residuals.
    """

    def __init__(self, feedback: FeedbackStore) -> None:
        self._feedback = feedback

    def discard(self, step: Step, pipeline: Pipeline) -> None:
        """Return all means of a step whose backward pass raised, here or on the pipeline."""
        if step.settled:
            return
        step.settled = True
        if not pipeline.failed:
            pipeline.submit(partial(self.keep, step))
        # Before DDP's buckets change; but the other ranks may be in trouble too.
        if pipeline.idle(RAISED_TIMEOUT.total_seconds()) and pipeline.failed:
            self.keep(step)

    def keep(self, step: Step, names: Collection[str] | None = None) -> Tensor:
        """Return the means of these parameters, or of all, to the residuals. Runs on the pipeline."""
        for layout, mean, _ in self._returned(step):
            returned = [(slot, None) for slot in layout if names is None or slot.name in names]
            self._feedback.restore(layout, mean, returned)
        return torch.empty(0, device="cpu")

    def copied(self, step: Step) -> Means:
        """Copies of a step's means, by layout, of what has a residual."""
        return [(layout, mean.clone()) for layout, mean, _ in self._returned(step)]

    def without(self, step: Step | None) -> dict[str, dict[str, Tensor]]:
        """`FeedbackStore.everything`, as if the means of this step had returned to the residuals; these stay as they
        are. Not while the pipeline runs."""
        means = [] if step is None else [(layout, mean) for layout, mean, _ in self._returned(step)]
        return self._feedback.discarding(means)

    def _returned(self, step: Step) -> Iterator[tuple[Layout, Tensor, Tensor]]:
        """Each layout that has a residual, its flat mean, and DDP's buffer; none of a step that is undone, whose
        residuals are those of before."""
        if not step.undone:
            for bucket, buffer in step.reduced:
                mean = buffer if bucket.packed is None else bucket.packed
                if bucket.packed is None and step.share != 1.0:
                    mean = mean / step.share
                for layout, means in ((bucket.layout, mean), (bucket.uncompressed_layout, bucket.uncompressed)):
                    if self._feedback.holds(layout):
                        yield layout, means, buffer
