"""Detection of steps that have become slower or faster since the last decision, as the network may have changed."""

from __future__ import annotations

from statistics import median

#: Steps in a window.
WINDOW = 16
#: A window within this factor of the first one counts as unchanged.
TOLERANCE = 1.5


class Drift:
    """Compares windows of step times with the first one after a decision. Each revised decision doubles the window, so
    that step times that vary for other reasons do not cause a trial again and again.

    Attributes:
        changed: two windows in a row were slower, or faster, than the first by more than `TOLERANCE`.
    """

    def __init__(self) -> None:
        self.changed = False
        self._window = WINDOW
        self.restart()

    def restart(self) -> None:
        """A decision has been made, or revised."""
        self._window *= 1 + self.changed
        self.changed = False
        self._step_times: list[float] = []
        self._reference: float | None = None
        self._before = 0

    def observe(self, seconds: float) -> None:
        """Record a step's time on this rank."""
        self._step_times.append(seconds)
        if len(self._step_times) < self._window:
            return
        now, self._step_times = median(self._step_times), []
        if self._reference is None:
            self._reference = now
            return
        slower, faster = now > TOLERANCE * self._reference, TOLERANCE * now < self._reference
        direction = slower - faster
        self.changed |= direction != 0 and direction == self._before
        self._before = direction
