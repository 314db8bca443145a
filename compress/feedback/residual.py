"""Plain error feedback, none at all, and the residuals of slices' owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import Workspace, low_precision_vector
from ..backends.low_precision import DTYPES as LOW_PRECISION_DTYPES
from ..codec import Codec
from ..formats.layout import Slot
from .base import RESIDUAL, Feedback, FeedbackState, Vector

#: The dtypes in which a residual may be stored.
RESIDUAL_DTYPES = (torch.float32, *LOW_PRECISION_DTYPES)


@dataclass(frozen=True)
class Residual(Feedback):
    """Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): a = g + β·e is compressed, and
    e = a less what that decodes to.

    With β = 1 nothing is lost. Below it what decays is lost and counted (SparseLoCo, LoCo): a residual of which little
    is sent for long, as of coarse codes under Adam, then does not outlive the gradients that it comes from.

    A residual may be kept in fewer bytes than float32's 4 an element: 2 as torch.bfloat16, 1.02 as torch.int8, with a
    step for every 256 elements (as LoCo, Xie et al. 2024, and MicroAdam, Modoranu et al., NeurIPS 2024, keep theirs).
    What that rounds off, to the nearest, is lost: 2^-8 of an element at most, or half a step, 1/254 of the largest of
    the 256. An element whose gradients are smaller than that and always the same never adds up; where gradients are
    noisy the rounding averages out. Owners of slices, and copies for undoing, are kept likewise.

    Args:
        decay: β, in (0, 1].
        dtype: how the residual is kept.

    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    decay: float = 1.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay={self.decay!r}: expected a number in (0, 1]")
        if self.dtype not in RESIDUAL_DTYPES:
            names = ", ".join(map(str, RESIDUAL_DTYPES))
            error = ValueError if isinstance(self.dtype, torch.dtype) else TypeError
            raise error(
                f"dtype={self.dtype!r}: a residual is kept as one of {names}; torch.bfloat16 has float32's range in "
                "half the memory, torch.int8 takes a quarter"
            )

    def storage_dtype(self, vector: str) -> torch.dtype:
        return self.dtype

    def prepare(self, device: torch.device) -> None:
        if self.dtype != torch.float32:
            vector = low_precision_vector(1, self.dtype, device)
            vector.write(vector.read())

    def encode(
        self, kept: FeedbackState, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        if self.decay == 1.0 and RESIDUAL not in kept.vectors:
            codec.encode_feedback(grad, kept.low_precision[RESIDUAL], wire, draw, workspace)
            return
        with kept.open():
            self._decay(kept)
            codec.encode_feedback(grad, kept[RESIDUAL], wire, draw, workspace)

    def flush(self, kept: FeedbackState, grad: Tensor) -> Tensor:
        self._decay(kept)
        return super().flush(kept, grad)

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """With β = 1, over any number of steps: `gradient` and `applied` are then their sums. Where the residual is not
        float32, what that has rounded off."""
        return gradient + self.decay * before[RESIDUAL] - applied - after[RESIDUAL]

    def _decay(self, kept: FeedbackState) -> None:
        if self.decay != 1.0:
            residual = kept[RESIDUAL]
            kept.give_up((1.0 - self.decay) * residual.abs().sum(dtype=torch.float64))
            residual.mul_(self.decay)


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Nothing is kept: right for unbiased codes, whose errors average out."""

    state_names: ClassVar[tuple[str, ...]] = ()

    def encode(
        self, kept: FeedbackState, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        codec.encode(grad, wire, draw, workspace)

    def flush(self, kept: FeedbackState, grad: Tensor) -> Tensor:
        return grad

    def on_discarded(self, kept: FeedbackState, slot: Slot, mean: Tensor, gradient: Tensor | None) -> None:
        """It is gone, as without compression."""

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """On average over many steps only."""
        return gradient - applied


#: The state of exchanges that keep nothing.
NOTHING = FeedbackState(NoFeedback(), {})


def server_state(residual: Vector) -> FeedbackState:
    """The state of a slice's owner, whatever the strategy."""
    return FeedbackState(Residual(), {RESIDUAL: residual})
