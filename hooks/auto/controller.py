"""The choice that "auto" makes for a step: the plan's, a trial's, and a new trial's after the network has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .drift import Drift
from .planner import Choice, Plan, Planner
from .timer import StepTimer
from .trial import FALLBACK, HALF, WIN_RATIO, WIN_RATIO_ON_GPU, Trial


class Controller:
    """Follows a user's choices through trials, alike on all ranks.

    Args:
        planner: of these ranks.
        timed: steps can be timed.
        averaged: a collective among hosts: the ranks' mean of each number.
    """

    def __init__(self, planner: Planner, timed: bool, averaged: Callable[[list[float]], list[float]]) -> None:
        self._planner, self._timed, self._averaged = planner, timed, averaged
        self._timer = StepTimer[tuple[Trial, int]](planner.device)
        self._win_ratio = WIN_RATIO_ON_GPU if planner.device.type == "cuda" else WIN_RATIO
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
            self._trial = self._trials.setdefault(_alike(choice), Trial(self._win_ratio)) if tried else None
        if self._trial is not None and self._trial.candidate != self._current.candidate:
            self._current = replace(choice, candidate=self._trial.candidate)
        return self._current

    @property
    def dense_steps(self) -> int:
        """Steps from the next one on that may take the dense path without disturbing a trial."""
        return self._trial.dense_steps if self._trial is not None and self.tuning else sys.maxsize

    def begin_timing(self) -> None:
        """The first bucket of a step is ready."""
        if self._trial is not None:
            self._timer.begin()

    def end_timing(self, ahead: int = 0) -> None:
        """The last mean of the step is there.

        Args:
            ahead: steps that have taken the dense path before it, and that `took_dense_path` does not know of yet.
        """
        if self._trial is None:
            return
        self._timer.end((self._trial, self._trial.steps + ahead))
        for (trial, step), seconds in self._timer.read():
            if trial.verdict is None:
                trial.record(step, seconds)
            elif trial is self._trial and step >= trial.decided:
                self._drift.observe(seconds)

    def took_dense_path(self, steps: int) -> None:
        """So many steps have taken the dense path, the same number on all ranks, at most `dense_steps`."""
        if self._trial is not None:
            for _ in range(steps):
                self._trial.end_step(_nobody, self._averaged)

    def ended(self, served: Callable[[], Sequence[tuple[int, int, Plan]]], changed: bool) -> bool:
        """A step has ended. A collective at the end of a trial's rounds, and when the network has changed.

        Args:
            served: returns elements, union and plan of each bucket (`Planner.challengers`).
            changed: a rank has seen the network change; the same on all ranks.

        Returns:
            True if each bucket must be planned again.
        """
        trial, asked = self._trial, self._asked
        if trial is None or asked is None:
            return False
        decided = trial.verdict is not None
        self.end_timing()
        trial.end_step(lambda: self._planner.challengers(asked, served()), self._averaged)
        if trial.verdict is None or (decided and not changed):
            return False
        if decided:
            self._planner.recalibrate()
            self._trial = Trial(self._win_ratio)
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
