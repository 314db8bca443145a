"""Options of `compress_fsdp`, and their validation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...compress.codec import Codec, check_choice
from ...compress.feedback.residual import Residual
from ..auto.planner import Choice
from ..core.options import Options
from ..exchanges import EXCHANGES, SCATTERS, ExchangeKind

#: The argument `exchange` of `compress_fsdp`: one of these, or the name of a registered class.
FSDPExchange = Literal["auto"] | ExchangeKind | str


@dataclass
class FSDPOptions(Options):
    """Options of `compress_fsdp` with `mesh`, equal on all ranks."""

    replicas: int = 1

    def check(self, world_size: int | None) -> None:
        super().check(world_size)
        check_choice("exchange", self.exchange, ("auto", *EXCHANGES))
        if self.strategy is not None and self.strategy.largest_norm is not None:
            raise ValueError(
                f"error_feedback={self.strategy} scales gradients by the norm of all of them, of which a rank has "
                "shards only: leave out clip, and call torch.nn.utils.clip_grad_norm_ after backward"
            )

    def _choose(self, codec: Codec, warm: bool) -> Choice:
        choice = super()._choose(codec, warm)
        return replace(choice, exchange="dense") if self.replicas == 1 else choice  # no other rank to send to


@dataclass
class ScatterOptions(Options):
    """Options of `compress_fsdp` without `mesh`, equal on all ranks."""

    def check(self, world_size: int | None) -> None:
        super().check(world_size)
        if self.exchange not in SCATTERS or self.fallback != "auto":
            raise ValueError(
                f"exchange={self.exchange!r}, fallback={self.fallback}: between shards there is one exchange, and it "
                "always compresses: leave both out, take 'mask' for a TopK whose elements all ranks share, or 'blocks' "
                "for Identity() where gradients are mostly zero, or compress between replicas by "
                'mesh=mesh["replicate"]'
            )
        if self.strategy is not None and not (isinstance(self.strategy, Residual) and self.strategy.only_residual):
            raise ValueError(
                f"error_feedback={self.strategy}: a rank is handed back its own shard alone, so that between shards "
                "only residuals can be kept: take Residual(), or False for stochastic codes, as QSGD() and EDEN()"
            )

    def _choose(self, codec: Codec, warm: bool) -> Choice:
        return replace(super()._choose(codec, warm), exchange="dense" if warm else SCATTERS[self.exchange].name)
