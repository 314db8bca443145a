"""Whether steps take longer, or shorter, than when the last decision was made: the network may have changed."""

from __future__ import annotations

from statistics import median

#: Steps that are looked at together.
WINDOW = 16
#: How many times slower or faster than after the decision a window may be and count as unchanged.
TOLERANCE = 1.5


class Drift:
    """Compares windows of step spans with the first one after a decision. Each revision that the ranks make of a
    decision doubles the window, so that spans that vary for other reasons do not lead to a trial again and again.

    Attributes:
        changed: whether two windows in a row differ from the first by more than `TOLERANCE`, the same way.
    """

    def __init__(self) -> None:
        self.changed = False
        self._window = WINDOW
        self.restart()

    def restart(self) -> None:
        """A decision has been made, or revised."""
        self._window *= 1 + self.changed
        self.changed = False
        self._spans: list[float] = []
        self._reference: float | None = None
        self._before = 0

    def observe(self, span: float) -> None:
        """A step has taken so many seconds, on this rank."""
        self._spans.append(span)
        if len(self._spans) < self._window:
            return
        now, self._spans = median(self._spans), []
        if self._reference is None:
            self._reference = now
            return
        slower, faster = now > TOLERANCE * self._reference, TOLERANCE * now < self._reference
        direction = slower - faster
        self.changed |= direction != 0 and direction == self._before
        self._before = direction
