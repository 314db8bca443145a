"""What `LocalUpdates` is told, and what is said about what cannot be meant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ...compress.aggregation import CLIPS, MEANS, Aggregation
from ...compress.codec import Codec, check_choice
from ..auto.planner import Choice, default_exchange
from ..core.options import Options
from ..exchanges import EXCHANGES

#: The argument `exchange` of `LocalUpdates`: one of these, or the name of a class that was registered.
LocalExchange = Literal["auto", "gather", "two_pass", "union", "split", "factors", "dense"] | str


@dataclass
class LocalOptions(Options):
    """What is equal on all ranks, so many of them. The arguments are `LocalUpdates`'."""

    world_size: int = 1
    mean: Literal["ranks", "senders"] = "ranks"
    clip: Literal["median"] | None = None

    def check(self, world_size: int | None) -> None:
        check_choice("mean", self.mean, MEANS)
        check_choice("clip", self.clip, CLIPS)
        check_choice("exchange", self.exchange, ("auto", *EXCHANGES))
        if self.aggregates:
            asked = f"mean={self.mean!r}, clip={self.clip!r}"
            if self.exchange not in ("auto", "gather"):
                raise ValueError(
                    f"{asked} takes every rank's part by itself, and exchange={self.exchange!r} hands out nothing but "
                    "the ranks' mean: use 'gather'"
                )
            if self.keeps_all:
                raise ValueError(f"{asked} is not the mean that {self.strategy} follows: use Residual()")
        super().check(world_size)

    @property
    def aggregates(self) -> bool:
        """Whether something else than the ranks' mean is asked for."""
        return self.mean != "ranks" or self.clip is not None

    def describe(self, world_size: int) -> dict[str, Any]:
        return super().describe(world_size) | {"mean": self.mean, "clip": self.clip}

    def _choose(self, codec: Codec, warm: bool) -> Choice:
        choice = super()._choose(codec, warm)
        if self.aggregates:
            return replace(choice, codec=Aggregation(choice.codec, self.mean, self.clip), exchange="gather")
        if choice.exchange == "auto":
            return replace(choice, exchange=default_exchange(choice.codec, self.world_size))
        return choice
