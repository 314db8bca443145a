"""Options of `LocalUpdates`, and their validation."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist

from ...compress.aggregation import CLIPS, MEANS, Aggregation
from ...compress.codec import Codec, check_choice
from ..auto.planner import Choice, default_exchange
from ..core.options import Options
from ..exchanges import EXCHANGES, ExchangeKind
from .meeting.options import Meeting

#: An argument of former versions: the argument that took its place, and the field there.
FORMER = {
    **dict.fromkeys(("fragments", "delay", "bucket_cap_mb"), ("rounds", "")),
    "after": ("rounds", "sync_until"),
    "blend": ("rounds", "mixing"),
    "carry": ("rounds", "keep_local"),
    "outer_lr": ("outer", "lr"),
    "outer_momentum": ("outer", "momentum"),
    **dict.fromkeys(("nesterov", "device"), ("outer", "")),
    **dict.fromkeys(("mean", "clip"), ("exchange", "")),
}


@dataclass(frozen=True)
class Aggregate:
    """An exchange by "gather" that decodes every rank's part by itself, at some P passes, and combines the parts
    otherwise than by the ranks' mean. Parameters excluded from compression keep the mean.

    Args:
        mean: "senders" divides each coordinate by the number of ranks that have sent it, rather than by that of all
            ranks, P. A coordinate then moves up to P times as far as the mean, so that outputs and residuals no longer
            add up to the ranks' progress.
        clip: "median" scales a rank's part of a piece (`Rounds.bucket_cap_mb`) down to the median of all ranks'
            Euclidean norms there, so that no rank outweighs the majority. The clipped part is lost.
    """

    mean: Literal["ranks", "senders"] = "ranks"
    clip: Literal["median"] | None = None


#: The argument `exchange` of `LocalUpdates`: one of these, the name of a registered class, or an `Aggregate`.
LocalExchange = Literal["auto"] | ExchangeKind | str | Aggregate


@dataclass
class LocalOptions(Options):
    """Options that are equal on all ranks. The arguments are `LocalUpdates`'."""

    world_size: int = 1
    mean: Literal["ranks", "senders"] = "ranks"
    clip: Literal["median"] | None = None

    def check(self, world_size: int | None) -> None:
        check_choice("mean", self.mean, MEANS)
        check_choice("clip", self.clip, CLIPS)
        check_choice("exchange", self.exchange, ("auto", *EXCHANGES))
        if self.aggregates:
            asked = f"mean={self.mean!r}, clip={self.clip!r}"
            if self.keeps_all:
                raise ValueError(f"{asked} is not the mean that {self.strategy} follows: use Residual()")
        super().check(world_size)

    def check_meeting(self) -> None:
        """Raise ValueError for a strategy that needs all ranks from the first step on."""
        if self.keeps_all:
            raise ValueError(
                f"error_feedback={self.strategy} keeps vectors that a newcomer cannot take over: with meeting=… use "
                "Residual()"
            )

    @property
    def aggregates(self) -> bool:
        """True if parts are combined otherwise than by the ranks' mean."""
        return self.mean != "ranks" or self.clip is not None

    def describe(self, world_size: int) -> dict[str, Any]:
        return super().describe(world_size) | {"mean": self.mean, "clip": self.clip}

    def resize(self, world_size: int) -> None:
        """Choose for so many ranks from now on."""
        self.world_size, self._chosen = world_size, None

    def _choose(self, codec: Codec, warm: bool) -> Choice:
        choice = super()._choose(codec, warm)
        if self.aggregates:
            return replace(choice, codec=Aggregation(choice.codec, self.mean, self.clip), exchange="gather")
        if choice.exchange == "auto":
            return replace(choice, exchange=default_exchange(choice.codec, self.world_size))
        return choice


def meeting_of(meeting: str | Meeting | None, process_group: Any) -> Meeting | None:
    """The meeting point to use; None: ranks are those of torch.distributed.

    Raises:
        TypeError, ValueError: it is none, or excluded by a process group.
        RuntimeError: torch.distributed is not initialised.
    """
    found = Meeting.of(meeting) if meeting is not None or process_group is None else None
    if found is not None and process_group is not None:
        raise ValueError("meeting and process_group exclude each other: replicas that meet make groups of their own")
    if found is None and not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "LocalUpdates needs torch.distributed: call torch.distributed.init_process_group() first, or pass "
            "meeting='host:port' of a gradwire-meet"
        )
    return found


def modern(former: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Move arguments of former versions to their present place, with a warning.

    Raises:
        TypeError: an argument is unknown, or is given twice.
    """
    for name, value in former.items():
        if name not in FORMER:
            raise TypeError(f"LocalUpdates got an unexpected keyword argument {name!r}")
        place, field = FORMER[name][0], FORMER[name][1] or name
        given = arguments[place]
        if place == "exchange":
            aggregate = given if isinstance(given, Aggregate) else Aggregate()
            if aggregate is not given and given not in ("auto", "gather") and value != getattr(aggregate, field):
                raise ValueError(
                    f"{name}={value!r} takes every rank's part by itself, and exchange={given!r} hands out the ranks' "
                    "mean alone: use exchange=Aggregate(…)"
                )
            given = aggregate
        arguments[place] = replace(given, **{field: value})
        warnings.warn(
            f"LocalUpdates({name}=…) becomes {place}={type(given).__name__}({field}=…) and will go in the next release",
            DeprecationWarning,
            stacklevel=4,  # past the constructor and its decorator
        )
    return arguments
