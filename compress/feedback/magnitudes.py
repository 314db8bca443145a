"""Unbiased codes of gradients that are divided by their mean magnitudes, for optimizers that divide by them, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import Workspace, backend_for
from ..codec import Codec
from .base import FeedbackState, check_beta
from .residual import NoFeedback

MAGNITUDE = "magnitude"


@dataclass(frozen=True)
class Magnitudes(NoFeedback):
    """No residual: gradients are divided before they are compressed, and multiplied after, by how large they have been.

    A code of few bits makes an error that is alike for all elements of a block. Adam divides each element by the root
    of its second moment, so that small elements' errors become steps as large as the large elements' own. Here each
    rank codes x = g/s, so that every element's error is in proportion to its own s, and all ranks hand out u = s·mean
    x. s follows the magnitudes of what was handed out, M² = βM² + (1-β)u², which all ranks know: nothing is sent for
    it. It is 1 + 10 M/ρ, ρ being the root mean square of M over 256 neighbours, those that `EDEN` rotates together. So
    what is unbiased stays unbiased.

    For codecs that are unbiased without a residual: `EDEN`, `TernGrad` and stochastic `QSGD`. Where a mean is not
    finite, M stays. Means that are discarded stay in M. Steps that send everything, and parameters that are excluded,
    have the mean gradient, to float32's rounding. Where "auto" sends bfloat16, its rounding is lost.

    Takes 4 bytes an element (M, float32), twice that with a GradScaler, 4 more with gradients of 16 bits.

    Args:
        beta: β, in [0, 1).

    Raises:
        ValueError: it is not.
    """

    state_names: ClassVar[tuple[str, ...]] = (MAGNITUDE,)

    beta: float = 0.95

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def codec_for(self, codec: Codec) -> Codec:
        """Raises ValueError for a codec that is biased without a residual."""
        if not (codec.unbiased or codec.lossless):
            raise ValueError(
                f"{self} keeps no residual, without which {codec} is biased: take an unbiased codec, as EDEN() or "
                "QSGD(), or Residual()"
            )
        return codec

    def prepare(self, device: torch.device) -> None:
        one = torch.ones(1, dtype=torch.float32, device=device)
        kept = FeedbackState(self, {MAGNITUDE: one.clone()})
        self.deliver(kept, self.flush(kept, one))

    def encode(
        self, kept: FeedbackState, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        with workspace.scratch.open(grad.numel(), grad.device) as quotient:
            backend_for(grad.device).tracking.divide(grad, kept[MAGNITUDE], quotient)
            codec.encode(quotient, wire, draw, workspace)

    def flush(self, kept: FeedbackState, grad: Tensor) -> Tensor:
        quotient = torch.empty_like(kept[MAGNITUDE])
        backend_for(grad.device).tracking.divide(grad, kept[MAGNITUDE], quotient)
        return quotient

    def deliver(self, kept: FeedbackState, mean: Tensor) -> None:
        backend_for(mean.device).tracking.multiply(mean, kept[MAGNITUDE], self.beta)

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """M² is the running mean of the squares of what was handed out."""
        squares = self.beta * before[MAGNITUDE].square() + (1.0 - self.beta) * applied.square()
        return squares.sqrt() - after[MAGNITUDE]
