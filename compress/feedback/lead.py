"""Error feedback beside an optimizer whose momentum is more than goes with a residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import backend_for
from ..formats.layout import Slot
from .base import RESIDUAL, FeedbackState, betas_of, check_beta
from .residual import Residual

PAST = "past"


@dataclass(frozen=True)
class Lead(Residual):
    """A residual, and a lead compensator that makes the optimizer's momentum β act as a smaller one, β'.

    What a residual holds back arrives late, which acts as momentum (Mitliagkas et al., "Asynchrony begets momentum",
    2016): beside Adam's β1 of 0.9 a model ends clearly worse than beside 0.5. Here the optimizer stays as it is, and
    of the mean u that has arrived all ranks hand out

        x = u - (β - β')·h,    h = βh + x,

    where h is the momentum that the optimizer has made of what was handed out before. Then h = β'h + u, too: an
    optimizer's βm + (1-β)x is (1-β)/(1-β') times what it would be with β' in the place of β. Muon and SGD, whose
    momentum is a sum, do not notice this factor. Adam's steps are that much smaller: search its learning rate anew,
    from 2 to 4 times the usual one for 0.9 and 0.5.

    Every synchronised backward pass is a step of the optimizer: to accumulate gradients, run all but the last under
    `no_sync()`. Where a mean is not finite, NaN is handed out and h stays.

    Takes 8 bytes an element (the residual, which `dtype` may make narrower, and h, float32), twice that with a
    GradScaler.

    Args:
        momentum: β, the optimizer's β1 or momentum.
        acts_as: β', smaller.

    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    state_names: ClassVar[tuple[str, ...]] = (RESIDUAL, PAST)

    momentum: float = 0.9
    acts_as: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.momentum, "momentum")
        check_beta(self.acts_as, "acts_as")
        if not self.acts_as < self.momentum:
            raise ValueError(
                f"acts_as={self.acts_as!r}: expected less than the optimizer's momentum={self.momentum!r}; with as "
                "much take Residual()"
            )

    def storage_dtype(self, vector: str) -> torch.dtype:
        return self.dtype if vector == RESIDUAL else torch.float32

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError for an optimizer of another momentum."""
        for group in optimizer.param_groups:
            betas = betas_of(group)
            found = betas[0] if betas else group.get("momentum")
            if found != self.momentum:
                raise ValueError(
                    f"{type(optimizer).__name__} has the momentum {found!r}, and {self} goes with {self.momentum!r}: "
                    f"pass Lead(momentum={found!r}, acts_as=…), or take Residual()"
                )

    def prepare(self, device: torch.device) -> None:
        super().prepare(device)
        one = torch.zeros(1, dtype=torch.float32, device=device)
        self.deliver(FeedbackState(self, {PAST: one.clone()}), one)

    def deliver(self, kept: FeedbackState, mean: Tensor) -> None:
        kernels = backend_for(mean.device).tracking
        kernels.lead(kept[PAST], mean, self.momentum, self.momentum - self.acts_as)

    def on_discarded(self, kept: FeedbackState, slot: Slot, mean: Tensor, gradient: Tensor | None) -> None:
        """As if zero had been handed out."""
        slot.view(kept[PAST]).sub_(torch.where(mean.isfinite(), mean, 0.0))
        super().on_discarded(kept, slot, mean, gradient)

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """With `decay` 1 nothing of u is lost, and h is the momentum of both u and x."""
        arrived = applied + (self.momentum - self.acts_as) * before[PAST]
        past = self.momentum * before[PAST] + applied
        lost = super().invariant(gradient, before, arrived, after)
        return torch.stack([lost, after[PAST] - past])
