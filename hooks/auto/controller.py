"""What "auto" does in a step: as planned, or as a trial says; and a trial again when the network has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from .drift import Drift
from .planner import Choice, Plan, Planner
from .trial import Trial


class Controller:
    """Follows a user's choices through trials, alike on all ranks.

    Args:
        planner: of these ranks.
        timed: whether the host knows how long a step takes, so that steps can be compared.
        averaged: a collective: the ranks' means, of the numbers that each hands in.
    """

    def __init__(self, planner: Planner, timed: bool, averaged: Callable[[list[float]], list[float]]) -> None:
        self._planner, self._timed, self._averaged = planner, timed, averaged
        self._asked: Choice | None = None  # the step's choice, as the user wants it
        self._current: Choice  # and as a trial of it does
        self._trial: Trial | None = None
        # Of all choices since the network was measured, those that are much alike being one: a schedule may come back
        # to each, or change a little in every step.
        self._trials: dict[Choice, Trial] = {}
        self._drift = Drift()

    @property
    def deciding(self) -> bool:
        """Whether a trial is going on."""
        return self._trial is not None and self._trial.verdict is None

    @property
    def changed(self) -> bool:
        """Whether the network has changed since the last decision, as far as this rank has seen."""
        return self._drift.changed

    def follow(self, choice: Choice) -> Choice:
        """What a step of this choice is, as a trial wants it."""
        if choice != self._asked:
            self._asked = self._current = choice
            tried = self._timed and self._planner.needs_trial(choice)
            self._trial = self._trials.setdefault(_alike(choice), Trial()) if tried else None
        if self._trial is not None and self._trial.way != self._current.way:
            self._current = replace(choice, way=self._trial.way)
        return self._current

    @property
    def dense_steps(self) -> int:
        """How many steps, from the next one on, may go straight if all is dense, as far as a trial is concerned."""
        return self._trial.dense_steps if self._trial is not None and self.deciding else sys.maxsize

    def took_dense_path(self, steps: int, spans: Sequence[float]) -> None:
        """Steps have gone straight, no more than might.

        Args:
            steps: how many, alike on all ranks.
            spans: seconds on this rank, as far as they are known.
        """
        if self._trial is not None and self.deciding:
            for step in range(steps):
                self._trial.end_step(spans[step] if step < len(spans) else None, _nobody, self._averaged)

    def ended(self, span: float, served: Callable[[], Sequence[tuple[int, int, Plan]]], changed: bool) -> bool:
        """A step has ended. A collective at the end of a trial's turns, and when the network has changed.

        Args:
            span: its seconds, on this rank.
            served: of each bucket, elements, union, and what served it (`Planner.challengers`).
            changed: whether a rank has seen that the network has changed, alike on all ranks.

        Returns:
            Whether there is something new to be decided for each bucket.
        """
        trial, asked = self._trial, self._asked
        if trial is None or asked is None:
            return False
        if trial.verdict is None:
            trial.end_step(span, lambda: self._planner.challengers(asked, served()), self._averaged)
            if trial.verdict is None:
                return False
        else:
            self._drift.observe(span)
            if not changed:
                return False
            self._planner.recalibrate()
            self._trial = Trial()
            self._trials = {_alike(asked): self._trial}
        self._drift.restart()
        return True

    def __str__(self) -> str:
        """What the last trial found, for people; nothing where there is none."""
        return "" if self._trial is None else str(self._trial)


def _alike(choice: Choice) -> Choice:
    """What stands for choices of which the same is to be expected."""
    return replace(choice, codec=choice.codec.speed_key)


def _nobody() -> tuple[str, dict[str, float]]:
    raise AssertionError("a turn ends in a step that does not go straight")
