"""Feedback around each rank's own momentum: Deep Gradient Compression, for SGD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import Workspace, backend_for
from ..codec import Codec, check_flag
from ..formats.layout import Slot
from ..sparse_codec import SparseCodec
from .base import RESIDUAL, Feedback, FeedbackState, check_beta, check_clip

MOMENTUM = "momentum"


@dataclass(frozen=True)
class Momentum(Feedback):
    """Deep Gradient Compression (Lin et al., ICLR 2018): momentum goes before compression, so that what waits in the
    residual is what SGD with momentum would have moved, and is not accumulated a second time when it is sent.

    Each rank has u = βu + g and compresses u + e; with `nesterov` u = β(u + g), and u + g is what e is added to. What
    has not been sent stays in e, the rounding of what has been included, which the published code loses. With
    `masking` u is zero from where this rank has sent an entry, so that old gradients do not push on what they have
    moved late enough already: where an exchange returns entries, as "split" does, u stays with them.

    Only entries of sparse codecs are masked. A code that sends every element leaves nothing out for long, and masking
    would leave no momentum at all: there this is dist-EF-SGDM (Zheng, Huang and Kwok, NeurIPS 2019). So it is in
    "hierarchical", which compresses the mean of a node's ranks.

    The mean of what was sent is handed out, so the optimizer has to do without momentum of its own: `SGD(momentum=0)`.
    Published results have the learning rate of `SGD(momentum=β)`. Steps that send everything, and parameters that are
    excluded, have exactly the momentum of the mean, as torch's SGD has it. The optimizer's weight decay does not pass
    through the momentum, and is about 1/(1-β) times weaker than there: scale it.

    Where a rank's gradient is not finite, that goes out, and u stays as it was. A parameter that no rank uses in a step
    has a gradient of zero in it. Every synchronised backward pass is a step: to accumulate gradients, run all but the
    last under `no_sync()`. For densities that fall during the first epochs see `gradwire.schedules.dgc`.

    Takes 8 bytes an element (u and e, float32) in the place of the optimizer's 4, twice that with a GradScaler, 4 more
    with gradients of 16 bits.

    Args:
        beta: β, in [0, 1).
        nesterov: the kind of momentum.
        masking: whether u is cleared where entries are sent.
        clip: scale each rank's own gradient, of all parameters together, to at most this norm before it enters u. The
            paper has threshold · P^(-1/2) here on P ranks, where `threshold` is that of clipping the mean. All buckets
            wait for the last one's gradients then, which gives up the overlap with backward. None: they are taken as
            they are.

    Raises:
        ValueError: an argument is none of these.
    """

    state_names: ClassVar[tuple[str, ...]] = (RESIDUAL, MOMENTUM)

    beta: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_flag("nesterov", self.nesterov)
        check_flag("masking", self.masking)
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
        self.flush(kept, one)
        backend_for(device).momentum.mask(kept[MOMENTUM], torch.zeros(1, dtype=torch.int32, device=device), one)

    def encode(
        self, kept: FeedbackState, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        kept.masked_momentum, kernels = None, backend_for(grad.device).momentum
        velocity = kernels.momentum_input(grad, kept[MOMENTUM], self.beta, self.nesterov)
        codec.encode_momentum(velocity, kept[RESIDUAL], wire, draw, workspace)
        if self.masking and isinstance(codec, SparseCodec):
            codes = workspace.kernels or codec.kernels(grad.device)
            entries = codes.entries_of(codec, wire, grad.numel(), workspace)
            kept.masked_momentum = kernels.mask(kept[MOMENTUM], *entries)

    def flush(self, kept: FeedbackState, grad: Tensor) -> Tensor:
        kept.masked_momentum, velocity = None, torch.empty_like(kept[RESIDUAL])
        backend_for(grad.device).momentum.enter(grad, kept[MOMENTUM], self.beta, self.nesterov, velocity)
        return super().flush(kept, velocity)

    def on_extra_sent(self, kept: FeedbackState, indices: Tensor, values: Tensor, count: Tensor | None = None) -> None:
        if self.masking:
            backend_for(values.device).momentum.mask(kept[MOMENTUM], indices, values, count)

    def on_unsent(self, kept: FeedbackState, indices: Tensor, later: Tensor) -> None:
        if kept.masked_momentum is not None:
            if kept.masked_momentum.is_cuda:  # made on the stream that encodes
                kept.masked_momentum.record_stream(torch.cuda.current_stream(kept.masked_momentum.device))
            before = torch.where(later, kept.masked_momentum[: len(indices)], -0.0)
            backend_for(before.device).entries.add(kept[MOMENTUM], indices, before)
            kept.masked_momentum = None

    def on_discarded(self, kept: FeedbackState, slot: Slot, mean: Tensor, gradient: Tensor | None) -> None:
        """As of a step in which a gradient that comes again was zero: it must leave u as well as e."""
        if gradient is None:
            super().on_discarded(kept, slot, mean, None)
            return
        momentum = slot.view(kept[MOMENTUM])
        in_momentum, sent = (self.beta, 1.0 + self.beta) if self.nesterov else (1.0, 1.0)
        super().on_discarded(kept, slot, mean, sent * gradient)
        entered = (in_momentum * gradient).masked_fill_(~gradient.isfinite(), 0.0)
        if self.masking:  # what has been masked holds nothing of it
            entered.masked_fill_(momentum == 0.0, 0.0)
        momentum.sub_(entered)

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """What was handed out and what waits is what waited and the momentum; and that is the gradients' own, unless
        ranks have masked theirs, each elsewhere."""
        momentum = self.beta * before[MOMENTUM] + (self.beta if self.nesterov else 1.0) * gradient
        velocity = momentum + gradient if self.nesterov else momentum
        lost = before[RESIDUAL] + velocity - applied - after[RESIDUAL]
        return lost if self.masking else torch.stack([lost, after[MOMENTUM] - momentum])
