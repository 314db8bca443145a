"""The schedule of exchanges and of outer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compress.feedback.base import Feedback
from ...compress.feedback.residual import Residual
from ...compress.feedback.store import FeedbackStore
from ..training.grad_scaler import LossScale, ScalerSync


@dataclass(frozen=True)
class Rounds:
    """Options of the rounds of `LocalUpdates`. Equal on all ranks.

    Args:
        fragments: F groups of parameters of about equal size. Each is exchanged every H steps, one group every H/F.
        delay: τ steps from sending to applying, fewer than H/F. Training goes on while messages are in flight.
        mixing: α in [0, 1): θ becomes θ0 + α·(θ - θ0). The rest of the progress during the delay is lost.
        keep_local: keep the progress during the delay: θ becomes θ0 as soon as Δ is taken, and makes θ0's step when
            that is made. The next round then sends the progress made in between, as in Overlap-Local-SGD with its
            anchor (Wang et al., ICASSP 2020). Needs a delay, and excludes mixing.
        sync_until: an exchange follows every step before this one (post-local SGD).
        bucket_cap_mb: size of the pieces in which Δ is compressed and sent, in MiB, as of DDP's buckets.
        keep_unsent: what the codec leaves out stays in this rank's own parameters, θ = θ0 - e, until it is sent, so
            that gradients are not taken where the rank has been already: step-ahead error feedback (Xu, Huo and Huang,
            AAAI 2021), here behind the optimizer. `synchronise` ends at θ0 all the same. Needs `Residual()`, and
            excludes mixing and keep_local.
        lengthen_steps: multiply the step that an adaptive optimizer, such as AdamW, makes with a tensor by
            √(E‖g‖² / E‖ḡ‖²), between 1 and √ranks, where ḡ is the ranks' mean of their gradients g. Each rank divides
            by a second moment of its own gradients, which have more noise than their mean, and so steps shorter than
            one optimizer would. Ranks compare 16 elements of each tensor in each round, as float32. Memory: 4 bytes an
            element during the optimizer's step.
    """

    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    keep_local: bool = False
    sync_until: int = 0
    bucket_cap_mb: float = 25.0
    keep_unsent: bool = False
    lengthen_steps: bool = False


@dataclass(frozen=True)
class Schedule:
    """H, and the rounds' options. Equal on all ranks."""

    every: int
    rounds: Rounds

    def check(self) -> None:
        """Raise TypeError or ValueError for arguments that are invalid, or exclude each other."""
        rounds = self.rounds
        if not isinstance(rounds, Rounds):
            raise TypeError(f"rounds={rounds!r}: expected Rounds(fragments=…, delay=…)")
        for name, value, least in (
            ("every", self.every, 1),
            ("sync_until", rounds.sync_until, 0),
            ("fragments", rounds.fragments, 1),
        ):
            if not _is_whole(value) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number of {least} or more")
        if self.every % rounds.fragments:
            raise ValueError(
                f"every={self.every} is no multiple of fragments={rounds.fragments}: one fragment is exchanged every "
                "every / fragments steps, so choose numbers that divide"
            )
        delay, mixing = rounds.delay, rounds.mixing
        if not _is_whole(delay) or not 0 <= delay < self.interval:
            raise ValueError(
                f"delay={delay!r}: expected 0 or more steps, fewer than every / fragments = {self.interval}"
            )
        if isinstance(mixing, bool) or not isinstance(mixing, int | float) or not 0 <= mixing < 1:
            raise ValueError(f"mixing={mixing!r}: expected a number in [0, 1), where 0 takes the global parameters")
        for name in ("keep_local", "keep_unsent", "lengthen_steps"):
            if not isinstance(getattr(rounds, name), bool):
                raise ValueError(f"{name}={getattr(rounds, name)!r}: expected True or False")
        if rounds.keep_local and (not delay or mixing):
            raise ValueError(
                f"keep_local=True with delay={delay}, mixing={mixing}: it keeps all that a rank trains while messages "
                "are in flight, so it needs a delay of 1 or more, and leaves nothing to mix"
            )
        if rounds.keep_unsent and (rounds.keep_local or mixing):
            raise ValueError(
                f"keep_unsent=True with keep_local={rounds.keep_local}, mixing={mixing}: a rank goes on from the "
                "global parameters and what it has not sent: leave out the other"
            )

    def check_strategy(self, error_feedback: object, strategy: Feedback | None) -> None:
        """Raise ValueError for a strategy with which nothing that is unsent can stay in the parameters."""
        plain = strategy is None or (type(strategy) is Residual and strategy.decay == 1.0)
        if self.rounds.keep_unsent and (error_feedback is False or not plain):
            raise ValueError(
                f"keep_unsent=True with error_feedback={error_feedback}: a rank's parameters keep what a plain "
                "residual would: use Residual(), of any dtype"
            )

    @property
    def interval(self) -> int:
        """Steps between two exchanges."""
        return self.every // self.rounds.fragments

    def fragment(self, count: int) -> int | None:
        """The fragment that is exchanged after `count` steps, if any."""
        number, rest = divmod(count, self.interval)
        return None if rest or not number else (number - 1) % self.rounds.fragments

    @property
    def agrees(self) -> bool:
        """True if every exchange leaves all ranks with the same parameters."""
        rounds = self.rounds
        return rounds.fragments == 1 and rounds.delay == 0 and rounds.mixing == 0 and not rounds.keep_unsent


class RoundRollback(ScalerSync):
    """Rolls residuals back if the mean of a round is not finite, as after a step that a scaler skips."""

    def __init__(self, feedback: FeedbackStore) -> None:
        super().__init__(LossScale(None), feedback)

    @property
    def skips(self) -> bool:
        return True

    def asks(self, step: Any) -> bool:
        return False

    def follow(self, others: Any, step: Any, scaling: Any) -> bool:
        self._overflowed = False
        return False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
