"""Whether compression pays for a whole step, found out by trying where arithmetic cannot tell.

`cost` knows what each bucket takes by itself. How much of that hides behind backward, and what backward, the codecs and
the network's own threads take from each other on shared cores, shows in steps alone. So "auto" trains a few steps each
way, what it has planned for every bucket by itself and the other extreme, in turns, and stays with the faster. What
could not win if all else took no time is not tried.

A step's *span* lasts from when its first bucket is ready until its last one holds the mean; of the ranks' spans the
longest counts. Those that count of a dense turn go straight, if they can, as they would afterwards. Over NCCL the host
does not wait for the network and knows no spans: there the plan is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

#: As the cost model says for each bucket; the fallback in every bucket; compression in every bucket.
PLANNED, FALLBACK, COMPRESSED = "planned", "fallback", "compressed"
#: Steps before the first is timed: DDP rebuilds its buckets after the first one.
SETTLING = 3
#: Steps of a turn, of which so many at its begin do not count: residuals are delivered, and memory is new. Nor does the
#: last, in which ranks compare.
TURN, UNCOUNTED = 6, 2
#: Turns, alternately of both ways; and of those after which the way that compresses more wins, if not clearly.
TURNS, MOST_TURNS = 4, 8
#: How much faster the network may be than it was when it was probed, and how much slower one way may be than the other
#: in its first turn and still get a second one.
DOUBT, HOPELESS = 1.25, 1.5
#: By how much the way that compresses more has to win: it takes processor time from the rest of the step too, and noise
#: is no reason to compress.
CLEARLY = 0.8


def typical(spans: Sequence[float]) -> float:
    """The mean of some steps' spans, of which none counts as more than twice their median: spans have two or three
    values where threads share cores, between which a median jumps, and now and then a step waits for something else."""
    most = 2 * median(spans)
    return fmean(min(span, most) for span in spans)


class Trial:
    """The trial of one choice. It moves step by step, so it is where it is on all ranks alike.

    Attributes:
        verdict: the way that won, or None while it is not known.
        spans: seconds, as the slowest rank had them, of both ways, as far as they are known.
    """

    def __init__(self) -> None:
        self.verdict: str | None = None
        self.spans: dict[str, float] = {}
        self._other = PLANNED
        self._steps = 0
        self._mine: dict[str, list[float]] = {}

    @property
    def way(self) -> str:
        """Which way the step goes that comes next."""
        if self.verdict is not None:
            return self.verdict
        turn = max(0, self._steps - SETTLING) // TURN
        return self._other if turn % 2 else PLANNED

    @property
    def straight(self) -> int:
        """How many steps, from the next one on, may go straight: they count, and end before ranks compare."""
        place = (self._steps - SETTLING) % TURN
        return TURN - 1 - place if self._steps >= SETTLING and place >= UNCOUNTED else 0

    def end_step(
        self,
        span: float,
        rival: Callable[[], tuple[str, float]],
        agreed: Callable[[list[float]], list[float]],
    ) -> None:
        """A step has ended.

        Args:
            span: its seconds, on this rank.
            rival: the way to try besides what is planned, and the seconds in which the network carries its bytes.
            agreed: a collective: the slowest rank's, of the numbers that each hands in.
        """
        way, place = self.way, (self._steps - SETTLING) % TURN
        self._steps += 1
        if self._steps <= SETTLING or self.verdict is not None:
            return
        if UNCOUNTED <= place < TURN - 1:
            self._mine.setdefault(way, []).append(span)
        if place < TURN - 1:
            return
        (self.spans[way],) = agreed([typical(self._mine[way])])
        turns = (self._steps - SETTLING) // TURN
        if turns == 1:
            self._other, least = rival()
            if least > DOUBT * self.spans[PLANNED]:
                self.verdict = PLANNED
            return
        more, less = (PLANNED, FALLBACK) if self._other == FALLBACK else (self._other, PLANNED)
        handicapped = {more: self.spans[more] / CLEARLY, less: self.spans[less]}
        faster, slower = sorted(handicapped, key=handicapped.__getitem__)
        if turns >= (MOST_TURNS if faster == more else TURNS) or self.spans[slower] > HOPELESS * self.spans[faster]:
            self.verdict = faster

    def __str__(self) -> str:
        """What it found, for people; nothing while that is not known."""
        if self.verdict is None:
            return ""
        tried = ", ".join(f"{way} {span * 1e3:.3g} ms" for way, span in self.spans.items())
        return f"; from the first bucket to the last, {tried}"
