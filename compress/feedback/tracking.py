"""Feedback around a running mean of gradients, for optimizers that need a smooth estimate, as Adam does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import Workspace, backend_for
from ..codec import Codec
from ..formats.layout import Slot
from .base import RESIDUAL, Feedback, FeedbackState, check_beta, check_clip

MOMENTUM, ESTIMATE = "momentum", "estimate"


@dataclass(frozen=True)
class Tracking(Feedback):
    """EF21 with momentum (Fatkhullin, Tyurin and Richtárik, NeurIPS 2023): ranks send how their momentum changes.

    Each rank has m = βm + (1-β)g and compresses the change of m plus what is left of earlier ones, δ + e; all ranks add
    the mean of what that decodes to to an estimate H, and H is handed out as the gradient. H follows the mean of m, and
    H + mean e = mean m holds at all times: nothing of the momentum is lost. What reaches the optimizer is smooth, where
    a plain residual comes in bursts, which swell Adam's second moment.

    The optimizer has to do without momentum of its own: `AdamW(betas=(0.0, ...))`, `SGD(momentum=0)`. H is 1-β^t
    times an unbiased estimate in step t, as torch's own first moment is before its correction.

    Steps that send everything, and parameters that are excluded, have exactly the momentum of the mean: H = mean m.
    Where a mean is not finite, NaN is handed out and H stays; so does m where a rank's gradient is not finite. A
    parameter that no rank uses in a step has a gradient of zero in it. Every synchronised backward pass is a step: to
    accumulate gradients, run all but the last under `no_sync()`. Rounding leaves some 1e-7 of the largest momentum so
    far in H after thousands of steps.

    Takes 12 bytes an element (m, e and H, float32), twice that with a GradScaler, 4 more with gradients of 16 bits.

    Args:
        beta: β, in [0, 1).
        clip: scale each rank's own gradient, of all parameters together, to at most this norm before it enters m: what
            a rank sees as an outlier does not stay in its momentum. All buckets wait for the last one's gradients then,
            which gives up the overlap with backward. None: they are taken as they are.
    """

    state_names: ClassVar[tuple[str, ...]] = (RESIDUAL, MOMENTUM, ESTIMATE)

    beta: float = 0.9
    clip: float | None = None

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_clip(self.clip)

    @property
    def largest_norm(self) -> float | None:
        return self.clip

    @property
    def has_momentum(self) -> bool:
        return self.beta > 0.0

    def prepare(self, device: torch.device) -> None:
        one = torch.zeros(1, dtype=torch.float32, device=device)
        kept = FeedbackState(self, {vector: one.clone() for vector in self.state_names})
        self.deliver(kept, self.flush(kept, one))

    def encode(
        self, kept: FeedbackState, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        change = backend_for(grad.device).tracking.changing(grad, kept[MOMENTUM], 1.0 - self.beta)
        codec.encode_momentum(change, kept[RESIDUAL], wire, draw, workspace)

    def flush(self, kept: FeedbackState, grad: Tensor) -> Tensor:
        change = torch.empty_like(kept[RESIDUAL])
        backend_for(grad.device).tracking.change(grad, kept[MOMENTUM], 1.0 - self.beta, change)
        return super().flush(kept, change)

    def deliver(self, kept: FeedbackState, mean: Tensor) -> None:
        estimate = kept[ESTIMATE]
        if not backend_for(mean.device).tracking.follow(estimate, mean):
            # The ranks have sent what did not arrive. On each of them this restores the law.
            kept.replace(mean.isnan(), kept[MOMENTUM] - estimate)

    def on_discarded(self, kept: FeedbackState, slot: Slot, mean: Tensor, gradient: Tensor | None) -> None:
        """A gradient that has entered m goes out with a later H; only one that comes again must leave it."""
        if gradient is not None:
            entered = (1.0 - self.beta) * torch.where(gradient.isfinite(), gradient, 0.0)
            for vector in (MOMENTUM, RESIDUAL):
                slot.view(kept[vector]).sub_(entered)

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """H + mean e - mean m stays what it was, and m is the momentum."""
        balance = [there[ESTIMATE] + there[RESIDUAL] - there[MOMENTUM] for there in (before, after)]
        momentum = self.beta * before[MOMENTUM] + (1.0 - self.beta) * gradient
        return torch.stack([balance[1] - balance[0], after[MOMENTUM] - momentum])
