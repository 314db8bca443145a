"""Periodic updates: which parameters are exchanged after which of the local steps, and when the outcome is applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compress.feedback.store import Memory
from ..core.grad_scaler import LossScale, ScalerSync


@dataclass(frozen=True)
class Schedule:
    """Equal on all ranks. The arguments are `LocalUpdates`'."""

    every: int
    after: int
    fragments: int
    delay: int
    blend: float
    carry: bool

    def check(self) -> None:
        """Raises ValueError for what cannot be meant."""
        for name, least in (("every", 1), ("after", 0), ("fragments", 1)):
            value = getattr(self, name)
            if not _is_whole(value) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number of {least} or more")
        if self.every % self.fragments:
            raise ValueError(
                f"every={self.every} is no multiple of fragments={self.fragments}: one fragment is exchanged every "
                "every / fragments steps, so choose numbers that divide"
            )
        if not _is_whole(self.delay) or not 0 <= self.delay < self.interval:
            raise ValueError(
                f"delay={self.delay!r}: expected 0 or more steps, fewer than every / fragments = {self.interval}"
            )
        blend = self.blend
        if isinstance(blend, bool) or not isinstance(blend, int | float) or not 0 <= blend < 1:
            raise ValueError(f"blend={blend!r}: expected a number in [0, 1), where 0 takes the global parameters")
        if not isinstance(self.carry, bool):
            raise ValueError(f"carry={self.carry!r}: expected True or False")
        if self.carry and (not self.delay or blend):
            raise ValueError(
                f"carry=True with delay={self.delay}, blend={blend}: it keeps all that a rank trains while messages "
                "are under way, so it needs a delay of 1 or more, and leaves nothing to blend"
            )

    @property
    def interval(self) -> int:
        """Steps between two exchanges."""
        return self.every // self.fragments

    def fragment(self, count: int) -> int | None:
        """Which fragment is exchanged after so many steps; None: none."""
        turn, rest = divmod(count, self.interval)
        return None if rest or not turn else (turn - 1) % self.fragments

    @property
    def agrees(self) -> bool:
        """Whether every exchange leaves all ranks with the same parameters."""
        return self.fragments == 1 and self.delay == 0 and self.blend == 0


class RoundRollback(ScalerSync):
    """Puts back what was kept where the mean of a round is not finite, as after a step that a scaler skips."""

    def __init__(self, feedback: Memory) -> None:
        super().__init__(LossScale(None), feedback)

    @property
    def skips(self) -> bool:
        return True

    def asks(self, step: Any) -> bool:
        return False

    def follow(self, others: Any, step: Any, scaling: Any) -> bool:
        self.feedback.commit()
        self._overflowed = False
        return False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
