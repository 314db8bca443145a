"""The choice that "auto" makes for a step: the plan's, a trial's, and a new trial's after the network has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .drift import Drift
from .planner import Choice, Plan, Planner
from .trial import FALLBACK, HALF, Trial


class Controller:
    """Follows a user's choices through trials, alike on all ranks.

    Args:
        planner: of these ranks.
        timed: the host can time steps.
        averaged: a collective: the ranks' mean of each number.
    """

    def __init__(self, planner: Planner, timed: bool, averaged: Callable[[list[float]], list[float]]) -> None:
        self._planner, self._timed, self._averaged = planner, timed, averaged
        self._asked: Choice | None = None  # the step's choice, as the user wants it
        self._current: Choice  # and as a trial of it does
        self._trial: Trial | None = None
        # The trials since the network was probed. Similar choices share one, as a schedule may change a little in every
        # step, and return to earlier choices.
        self._trials: dict[Choice, Trial] = {}
        self._drift = Drift()

    @property
    def tuning(self) -> bool:
        """True during a trial."""
        return self._trial is not None and self._trial.verdict is None

    @property
    def timed(self) -> dict[str, float]:
        """Seconds of a step by what it sent, where a trial has decided: "compressed", "bfloat16", "float32"."""
        half = self._planner.fallback == torch.bfloat16
        names = {HALF: "bfloat16", FALLBACK: "bfloat16" if half else "float32"}
        return {} if self._trial is None else {names.get(name, name): s for name, s in self._trial.timed.items()}

    @property
    def changed(self) -> bool:
        """True if this rank has seen the network change since the last decision."""
        return self._drift.changed

    def follow(self, choice: Choice) -> Choice:
        """The choice for a step that asks for `choice`, with the trial's candidate."""
        if choice != self._asked:
            self._asked = self._current = choice
            tried = self._timed and self._planner.needs_trial(choice)
            self._trial = self._trials.setdefault(_alike(choice), Trial()) if tried else None
        if self._trial is not None and self._trial.candidate != self._current.candidate:
            self._current = replace(choice, candidate=self._trial.candidate)
        return self._current

    @property
    def dense_steps(self) -> int:
        """Steps from the next one on that may take the dense path without disturbing a trial."""
        return self._trial.dense_steps if self._trial is not None and self.tuning else sys.maxsize

    def took_dense_path(self, steps: int, step_times: Sequence[float]) -> None:
        """Steps have taken the dense path, at most `dense_steps`.

        Args:
            steps: their number, the same on all ranks.
            step_times: seconds on this rank, of those that are known.
        """
        if self._trial is not None and self.tuning:
            for step in range(steps):
                self._trial.end_step(step_times[step] if step < len(step_times) else None, _nobody, self._averaged)

    def ended(self, seconds: float, served: Callable[[], Sequence[tuple[int, int, Plan]]], changed: bool) -> bool:
        """A step has ended. A collective at the end of a trial's rounds, and when the network has changed.

        Args:
            seconds: its time on this rank.
            served: returns elements, union and plan of each bucket (`Planner.challengers`).
            changed: a rank has seen the network change; the same on all ranks.

        Returns:
            True if each bucket must be planned again.
        """
        trial, asked = self._trial, self._asked
        if trial is None or asked is None:
            return False
        if trial.verdict is None:
            trial.end_step(seconds, lambda: self._planner.challengers(asked, served()), self._averaged)
            if trial.verdict is None:
                return False
        else:
            self._drift.observe(seconds)
            if not changed:
                return False
            self._planner.recalibrate()
            self._trial = Trial()
            self._trials = {_alike(asked): self._trial}
        self._drift.restart()
        return True

    def __str__(self) -> str:
        """The last trial's summary for people; empty without one."""
        return "" if self._trial is None else str(self._trial)


def _alike(choice: Choice) -> Choice:
    """Cache key: choices expected to perform alike share a trial."""
    return replace(choice, codec=choice.codec.speed_key)


def _nobody() -> tuple[str, dict[str, float]]:
    raise AssertionError("a round never ends on the dense path")
