"""Whether compression pays for a whole step, found out by trying where arithmetic cannot tell.

`cost` knows what each bucket takes by itself. How much of that hides behind backward, and what backward, the codecs and
the network's own threads take from each other on shared cores, shows in steps alone. So "auto" trains a few steps each
way, what it has planned for every bucket by itself and what is sent in every bucket instead, in turns, and stays with
the fastest. What could not win if all else took no time is not tried.

A step's *span* lasts from when its first bucket is ready until its last one holds the mean; of the ranks' spans the
mean counts, as one that comes first waits for the others within its own. Those that count of a dense turn go straight,
if they can, as they would afterwards. Over NCCL the host does not wait for the network and knows no spans: there the
plan is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

#: As the cost model says for each bucket; and in every bucket compression, half precision, or the fallback.
PLANNED, COMPRESSED, HALF, FALLBACK = "planned", "compressed", "half", "fallback"
#: Steps before the first is timed: DDP rebuilds its buckets after the first one.
SETTLING = 3
#: Steps of a turn, of which so many at its begin do not count: residuals are delivered, and memory is new. Nor does the
#: last, in which ranks compare.
ROUND_STEPS, UNCOUNTED = 6, 2
#: Turns of each way; and of those after which one that compresses more than another wins by little.
TURNS, MOST_TURNS = 2, 4
#: How much faster the network may be than it was when it was probed, and how much slower one way may be than the best
#: and still get another turn.
SPEEDUP_MARGIN, DROP_RATIO = 1.25, 1.5
#: What share of the fallback's span a way may take: what compresses takes processor time from the rest of the step too,
#: and noise is no reason to compress.
WIN_RATIO = {COMPRESSED: 0.8, HALF: 0.9, FALLBACK: 1.0}


def typical(spans: Sequence[float]) -> float:
    """The mean of some steps' spans, of which none counts as more than twice their median: spans have two or three
    values where threads share cores, between which a median jumps, and now and then a step waits for something else."""
    most = 2 * median(spans)
    return fmean(min(span, most) for span in spans)


class Trial:
    """The trial of one choice. It moves step by step, so it is where it is on all ranks alike.

    Attributes:
        verdict: the way that won, or None while it is not known.
        spans: seconds of every way, as far as they are known.
    """

    def __init__(self) -> None:
        self.verdict: str | None = None
        self.spans: dict[str, float] = {}
        self._ways = [PLANNED]  # that may still win, in the order of their next turns
        self._turns: dict[str, int] = {}
        self._level = PLANNED  # which of the others what is planned counts as
        self._steps = 0
        self._mine: dict[str, list[float]] = {}

    @property
    def way(self) -> str:
        """Which way the step goes that comes next."""
        return self.verdict or self._ways[0]

    @property
    def dense_steps(self) -> int:
        """How many steps, from the next one on, may go straight: they count, and end before ranks compare."""
        place = (self._steps - SETTLING) % ROUND_STEPS
        return ROUND_STEPS - 1 - place if self._steps >= SETTLING and place >= UNCOUNTED else 0

    def end_step(
        self,
        span: float | None,
        challengers: Callable[[], tuple[str, Mapping[str, float]]],
        averaged: Callable[[list[float]], list[float]],
    ) -> None:
        """A step has ended.

        Args:
            span: its seconds, on this rank; None: it does not know.
            rivals: which way what is planned comes nearest to, and the others, with the seconds in which the network
                carries their bytes.
            averaged: a collective: the ranks' means, of the numbers that each hands in.
        """
        way, place = self.way, (self._steps - SETTLING) % ROUND_STEPS
        self._steps += 1
        if self._steps <= SETTLING or self.verdict is not None:
            return
        mine = self._mine.setdefault(way, [])
        if UNCOUNTED <= place < ROUND_STEPS - 1 and span is not None:
            mine.append(span)
        if place < ROUND_STEPS - 1:
            return
        total, known = averaged([typical(mine), 1.0] if mine else [0.0, 0.0])
        self.spans[way] = total / known if known else 0.0
        if not self._turns:
            self._level, others = challengers()
            self._ways = [way, *(other for other, least in others.items() if least <= SPEEDUP_MARGIN * self.spans[way])]
        self._turns[way] = self._turns.get(way, 0) + 1
        self._ways.append(self._ways.pop(0))
        self._judge()

    def _judge(self) -> None:
        """After a turn: which ways may still win."""
        share = {way: WIN_RATIO[self._level if way == PLANNED else way] for way in self._ways}
        known = [way for way in self._ways if way in self.spans]
        best = min(known, key=lambda way: self.spans[way] / share[way])
        hopeless = {way for way in known if self.spans[way] > DROP_RATIO * self.spans[best]}
        self._ways = [way for way in self._ways if way not in hopeless]
        turns = min(self._turns.get(way, 0) for way in self._ways)
        enough = TURNS if share[best] == max(share[way] for way in self._ways) else MOST_TURNS
        if self._ways == [best] or turns >= enough:
            self.verdict = best

    def __str__(self) -> str:
        """What it found, for people; nothing while that is not known."""
        if self.verdict is None:
            return ""
        tried = ", ".join(f"{way} {span * 1e3:.3g} ms" for way, span in self.spans.items())
        return f"; from the first bucket to the last, {tried}"
