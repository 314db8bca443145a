"""A trial of whole steps, which decides whether compression pays.

The cost model predicts each bucket alone. It cannot predict the overlap with backward, nor contention between backward,
codecs and network threads on shared cores. So "auto" trains a few steps with each candidate in turns, the plan for each
bucket and one alternative for all buckets at a time, and keeps the fastest. Candidates whose transfer alone takes
longer than the planned step are not tried.

A step's time lasts from its first ready bucket to its last mean. The mean over ranks counts, as an early rank's time
includes its wait for the others. Timed steps of a dense round use the dense path if they can, as later steps would.
On a GPU a time is known some steps later (`StepTimer`), maybe after its round: a candidate without any time gets
another round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

#: Candidates: the cost model's plan for each bucket; or compression, half precision or the fallback in all of them.
PLANNED, COMPRESSED, HALF, FALLBACK = "planned", "compressed", "half", "fallback"
#: Steps before the first round: DDP rebuilds its buckets after the first step.
SETTLING = 3
#: Steps of a round, and of its first ones those that do not count, as residuals are flushed and memory is new. The last
#: one, in which ranks agree, does not count either.
ROUND_STEPS, UNCOUNTED = 6, 2
#: Rounds of each candidate; and their number where the best one compresses more than another and wins by little.
ROUNDS, MOST_ROUNDS = 2, 4
#: Candidates are tried if the network carries their bytes in so many times the planned step's time, and dropped when
#: they take so many times the best one's.
SPEEDUP_MARGIN, DROP_RATIO = 1.25, 1.5
#: The share of the fallback's step time that a candidate must stay below: compression also takes processor time from
#: the rest of the step, and noise is no reason to compress. On a GPU a step's time holds all that it takes.
WIN_RATIO = {COMPRESSED: 0.8, HALF: 0.9, FALLBACK: 1.0}
WIN_RATIO_ON_GPU = {COMPRESSED: 0.95, HALF: 0.95, FALLBACK: 1.0}


def typical(step_times: Sequence[float]) -> float:
    """The mean of step times, each clipped to twice their median. A plain median jumps between the two or three values
    that step times have when threads share cores; a plain mean follows outliers."""
    most = 2 * median(step_times)
    return fmean(min(seconds, most) for seconds in step_times)


class Trial:
    """The trial of one choice. It advances once a step, so all ranks are at the same point of it.

    Args:
        win_ratio: `WIN_RATIO`, or that on a GPU.

    Attributes:
        verdict: the candidate that won; None: not known yet.
        step_times: seconds of each candidate that has been timed.
        steps: number of steps so far; and as it was with the verdict.
    """

    def __init__(self, win_ratio: Mapping[str, float] = WIN_RATIO) -> None:
        self.verdict: str | None = None
        self.step_times: dict[str, float] = {}
        self.steps = self.decided = 0
        self._win_ratio = win_ratio
        self._candidates = [PLANNED]  # that may still win, in the order of their next rounds
        self._rounds: dict[str, int] = {}
        self._level: str | None = None  # the other candidate that the plan counts as; None: not known yet
        self._taken: list[str] = []  # the candidate of each step
        self._mine: dict[str, list[float]] = {}

    @property
    def candidate(self) -> str:
        """The candidate of the next step."""
        return self.verdict or self._candidates[0]

    @property
    def timed(self) -> dict[str, float]:
        """Seconds of a step by candidate, with the plan as the one that it counts as; empty without a verdict."""
        if self.verdict is None:
            return {}
        return {self._counts_as(name): seconds for name, seconds in self.step_times.items()}

    @property
    def dense_steps(self) -> int:
        """Steps from the next one on that may take the dense path: they are timed, and end before ranks agree."""
        place = (self.steps - SETTLING) % ROUND_STEPS
        return ROUND_STEPS - 1 - place if self.steps >= SETTLING and place >= UNCOUNTED else 0

    def record(self, step: int, seconds: float) -> None:
        """Note the time of a step on this rank.

        Args:
            step: its number in this trial: a former one, or one of those that take the present candidate.
            seconds: how long it took.
        """
        candidate = self._taken[step] if step < len(self._taken) else self.candidate
        place = (step - SETTLING) % ROUND_STEPS
        if step >= SETTLING and UNCOUNTED <= place < ROUND_STEPS - 1:
            self._mine.setdefault(candidate, []).append(seconds)

    def end_step(
        self,
        challengers: Callable[[], tuple[str, Mapping[str, float]]],
        averaged: Callable[[list[float]], list[float]],
    ) -> None:
        """A step has ended, whose time may have been recorded or not.

        Args:
            challengers: returns the candidate nearest to the plan, and the others with the seconds in which the network
                carries their bytes.
            averaged: a collective: the ranks' mean of each number.
        """
        candidate, place = self.candidate, (self.steps - SETTLING) % ROUND_STEPS
        self.steps += 1
        if self.verdict is not None:
            return
        self._taken.append(candidate)
        if self.steps <= SETTLING or place < ROUND_STEPS - 1:
            return
        self._rounds[candidate] = self._rounds.get(candidate, 0) + 1
        mine = [self._mine.get(name) for name in self._rounds]
        means = averaged([number for times in mine for number in ((typical(times), 1.0) if times else (0.0, 0.0))])
        for name, total, known in zip(self._rounds, means[::2], means[1::2], strict=True):
            if known:
                self.step_times[name] = total / known
        if self._level is None:
            if candidate not in self.step_times:
                return
            self._level, others = challengers()
            longest = SPEEDUP_MARGIN * self.step_times[candidate]
            self._candidates = [candidate, *(other for other, least in others.items() if least <= longest)]
        self._candidates.append(self._candidates.pop(0))
        self._judge()

    def _counts_as(self, candidate: str) -> str:
        return self._level if candidate == PLANNED and self._level is not None else candidate

    def _judge(self) -> None:
        """Drop candidates that cannot win any more, and decide if enough is known."""
        share = {name: self._win_ratio[self._counts_as(name)] for name in self._candidates}
        known = [candidate for candidate in self._candidates if candidate in self.step_times]
        best = min(known, key=lambda candidate: self.step_times[candidate] / share[candidate])
        hopeless = {candidate for candidate in known if self.step_times[candidate] > DROP_RATIO * self.step_times[best]}
        self._candidates = [candidate for candidate in self._candidates if candidate not in hopeless]
        rounds = min(self._rounds.get(name, 0) if name in self.step_times else 0 for name in self._candidates)
        enough = ROUNDS if share[best] == max(share[candidate] for candidate in self._candidates) else MOST_ROUNDS
        if self._candidates == [best] or rounds >= enough:
            self.verdict, self.decided = best, self.steps

    def __str__(self) -> str:
        """A summary for people; empty without a verdict."""
        if self.verdict is None:
            return ""
        tried = ", ".join(f"{candidate} {seconds * 1e3:.3g} ms" for candidate, seconds in self.step_times.items())
        return f"; from the first bucket to the last, {tried}"
