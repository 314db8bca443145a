"""Training that is drawn: a configuration, and what happens while it trains. `drawn_machine` plays it.

`verdict` compares what the ranks saw; `script` writes it down so that it can be played again.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from gradwire import Codec, Lead, Magnitudes, Momentum, TopK, Tracking
from gradwire.compress import Feedback
from gradwire.hooks.auto.planner import Fallback
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn


class Short:
    """A dataclass that leaves out of its text what is as always, so that the text is short and can be pasted."""

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


# -- configurations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """A codec as a function of the step."""

    codecs: tuple[Codec, ...]

    def __call__(self, step: int) -> Codec:
        return self.codecs[step % len(self.codecs)]


@dataclass(frozen=True, repr=False)
class Parameter(Short):
    """One parameter of the model.

    Attributes:
        use: "always", "tied" (in two places), "never", "turns" (in every other backward pass), "some" (on every other
            rank, by turns), "once" (on rank 0 alone, from the fourth pass on), or "frozen".
        sparse: whether its gradients are, of the first dimension.
    """

    shape: tuple[int, ...]
    use: str = "always"
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    sparse: bool = False

    def used(self, rank: int, number: int) -> bool:
        """Whether a rank uses it in the backward pass of that number."""
        return {
            "always": True,
            "tied": True,
            "never": False,
            "turns": number % 2 == 0,
            "some": (number + rank) % 2 == 0,
            "once": rank == 0 and number > 3,
            "frozen": False,
        }[self.use]


TENTH = TopK(0.1)


@dataclass(frozen=True, repr=False)
class Configuration(Short):
    """How a model is trained. `codec` None is DDP as it is.

    Attributes:
        network: seconds a byte, as "auto" is told.
        exclude: "nothing", "vectors" (fewer than two dimensions) or "first", the first parameter by its name.
        scaler: "none", "enabled" or "disabled".
        cap: bytes of a bucket.
        set_to_none: whether gradients are forgotten between steps, or zero.
    """

    world_size: int = 2
    codec: Codec | Schedule | None = TENTH
    exchange: str = "gather"
    error_feedback: bool | str | Feedback = "auto"
    fallback: Fallback = None
    network: float = 1e-7
    topology: int | None = None
    warmup_steps: int = 0
    exclude: str = "nothing"
    scaler: str = "none"
    parameters: tuple[Parameter, ...] = (Parameter((40, 20)), Parameter((300,)))
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    skip_all_reduce_unused_params: bool = False
    cap: int = 2048
    set_to_none: bool = True
    entropy_coding: bool = False

    @property
    def codecs(self) -> tuple[Codec, ...]:
        if self.codec is None:
            return ()
        return self.codec.codecs if isinstance(self.codec, Schedule) else (self.codec,)

    def keeps(self, codec: Codec) -> bool:
        """Whether a step of this codec keeps what it leaves out."""
        if isinstance(self.error_feedback, Magnitudes):
            return False
        return codec.default_feedback if self.error_feedback == "auto" else bool(self.error_feedback)

    @property
    def tracks(self) -> bool:
        """Whether what is handed out is an estimate of the momentum, and not the gradient."""
        return isinstance(self.error_feedback, Tracking)

    @property
    def momentum(self) -> Momentum | None:
        """What makes a momentum of gradients, if anything does."""
        return self.error_feedback if isinstance(self.error_feedback, Momentum) else None

    @property
    def lead(self) -> Lead | None:
        """The strategy that hands out less of means than arrives, if it is one."""
        return self.error_feedback if isinstance(self.error_feedback, Lead) else None

    @property
    def nothing_is_lost(self) -> bool:
        return (
            not self.tracks
            and self.momentum is None
            and all(codec.lossless or self.keeps(codec) for codec in self.codecs)
        )

    @property
    def nothing_is_kept(self) -> bool:
        """What "auto" casts to bfloat16 always keeps its rounding error."""
        casts = self.exchange == "auto" and self.fallback == torch.bfloat16
        return not casts and not self.tracks and not any(self.keeps(codec) for codec in self.codecs)

    @property
    def scales(self) -> bool:
        return self.scaler == "enabled"

    def excludes(self, name: str, parameter: nn.Parameter) -> bool:
        if self.exclude == "vectors":
            return parameter.dim() < 2
        return self.exclude == "first" and name == "p0"


# -- what happens ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Overflow(Short):
    """An infinity in one gradient of one rank, in one of a step's backward passes."""

    rank: int = 0
    parameter: int = 0
    backward: int = 0


@dataclass(frozen=True, repr=False)
class Step(Short):
    """A step of the optimizer, after `backwards` synchronised backward passes, each behind `no_sync` others."""

    backwards: int = 1
    no_sync: int = 0
    overflow: Overflow | None = None
    unscale: bool = False


@dataclass(frozen=True, repr=False)
class Raise(Short):
    """A backward pass that ends in an exception, on all ranks, when a parameter's gradient is there; before it,
    `backwards` others went well."""

    parameter: int = 0
    backwards: int = 0


@dataclass(frozen=True, repr=False)
class Rescale(Short):
    """Another loss scale."""

    factor: float = 0.5


@dataclass(frozen=True, repr=False)
class Join(Short):
    """Uneven inputs under DDP.join(): a number of steps for each rank, the first one without all ranks with an overflow
    on one that has most, or without."""

    steps: tuple[int, ...]
    overflow: Overflow | None = None


@dataclass(frozen=True, repr=False)
class Close(Short):
    """The state gives back its connections, and makes new ones."""


@dataclass(frozen=True, repr=False)
class Resume(Short):
    """A checkpoint, loaded into a fresh model and state, or into the running one."""

    consolidated: bool = False
    fresh: bool = True


@dataclass(frozen=True, repr=False)
class Resize(Short):
    """A consolidated checkpoint, loaded by another number of ranks."""

    world_size: int


@dataclass(frozen=True, repr=False)
class Copy(Short):
    """Training goes on with a copy of the model and its state, and of the scaler, or with the scaler itself."""

    how: str = "deepcopy"
    together: bool = True


Event = Step | Raise | Rescale | Join | Close | Resume | Resize | Copy


def ranks_needed(configuration: Configuration, events: Sequence[Event]) -> int:
    return max([configuration.world_size, *(event.world_size for event in events if isinstance(event, Resize))])


# -- a rank by itself --------------------------------------------------------------------------------------------------


class Player:
    """Plays scripts on one rank: of each event the method that has its name.

    Attributes:
        number: of the next backward pass, alike on all ranks.
        at: where in the script it is.
        violations: what was wrong.
    """

    def __init__(self, rank: int, configuration: Any) -> None:
        self.rank, self.configuration = rank, configuration
        self.number, self.at, self.violations = 0, "the begin", list[str]()
        self.scaler = self.new_scaler()

    def new_scaler(self) -> Any:
        if self.configuration.scaler == "none":
            return None
        enabled = self.configuration.scaler != "disabled"
        return with_scale(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1 << 20, enabled=enabled))

    def play(self, events: Sequence[Any]) -> None:
        for index, event in enumerate(events):
            self.at = f"event {index}"
            if self.takes(event):
                getattr(self, type(event).__name__.lower())(event)
            self.check_event()

    def takes(self, event: Any) -> bool:
        """True if this rank has a part in it."""
        return True

    def check_event(self) -> None:
        """Check what must hold after each event."""

    def rescale(self, event: Rescale) -> None:
        if self.configuration.scales:
            self.scaler.update(self.scaler.get_scale() * event.factor)

    def judge(self, applied: bool, bad: bool) -> None:
        """A step is applied if no rank has had an overflow."""
        if applied == bad:
            what = "a step with an overflow was applied" if bad else "a step was skipped without an overflow"
            self.violations.append(f"{self.at}: {what}")


def with_scale(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    scaler.scale(torch.zeros(()))  # only now it has one that can be changed
    return scaler


# -- the ranks together ------------------------------------------------------------------------------------------------


def verdict(results: Sequence[dict[str, Any]]) -> list[str]:
    """All that is wrong, from what the ranks saw."""
    found = [f"rank {rank}: {text}" for rank, result in enumerate(results) for text in result["violations"]]
    for what in ("digests", "statistics"):
        for key in dict.fromkeys(key for result in results for key in result[what]):
            seen = {rank: result[what][key] for rank, result in enumerate(results) if key in result[what]}
            if len({repr(value) for value in seen.values()}) > 1:
                found.append(f"ranks differ in {what} ({key}): {seen}")
    return found


def script(configuration: Any, events: Sequence[Any]) -> str:
    """What can be pasted into a test to see it again."""
    lines = ",\n        ".join(map(repr, events))
    return f"replay(\n    ranks,\n    {configuration!r},\n    [\n        {lines},\n    ],\n)"


# -- looking for what is wrong -----------------------------------------------------------------------------------------


def search(
    scripts: st.SearchStrategy[Any], replay: Callable[..., None], number: int, examples: int, until: float = math.inf
) -> int:
    """Replay scripts that are drawn by a seed, until a time of `time.monotonic`; how many. The one that fails is made
    small for a minute at most."""
    played, failed_at = 0, math.inf

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(scripts)
    def one(drawn: tuple[Any, Sequence[Any]]) -> None:
        nonlocal played, failed_at
        if time.monotonic() > min(until, failed_at + 60.0):
            return
        played += 1
        try:
            replay(*drawn)
        except AssertionError:
            failed_at = min(failed_at, time.monotonic())
            raise

    one()
    return played


def search_for_long(scripts: st.SearchStrategy[Any], replay: Callable[..., None], examples: int) -> None:
    """`GRADWIRE_DRAWN_SECONDS` says how long."""
    end, played = time.monotonic() + float(os.environ.get("GRADWIRE_DRAWN_SECONDS", "60")), 0
    while time.monotonic() < end:
        number = random.SystemRandom().getrandbits(32)
        print(f"seed {number}", flush=True)
        played += search(scripts, replay, number, examples, end)
    print(f"{played} scripts")
