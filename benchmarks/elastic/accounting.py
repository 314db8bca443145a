"""From what replicas wrote to figures: goodput, stalls, restarts, and whether states of one name were equal."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

#: Of one replica's `replica.say`.
Event = Mapping[str, Any]


@dataclass
class Life:
    """A process of a replica, from its start to its death.

    Attributes:
        replica: its place, in which a killed one is followed by the next.
        started: when.
        killed: when; None: it lived to the end.
    """

    replica: int
    started: float
    events: list[Event] = field(default_factory=list)
    killed: float | None = None

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def reports(self) -> list[Event]:
        """Of rounds, the first of each."""
        return list({event["round"]: event for event in reversed(self.of("round"))}.values())[::-1]

    @property
    def calls(self) -> list[Event]:
        """Calls that are over, with their "begin"."""
        return [event | {"begin": event["at"] - event["seconds"]} for event in self.of("call")]  # type: ignore[operator]

    def in_round(self, moment: float) -> bool:
        """True if it was in a call that makes a round."""
        if any(call["due"] and call["begin"] <= moment <= call["at"] for call in self.calls):
            return True
        begun = [event for event in self.events if event["event"] in ("due", "call")]
        # Its last words were that such a call begins.
        last = bool(begun) and begun[-1]["event"] == "due" and begun[-1]["at"] <= moment
        return last and (self.killed is None or moment <= self.killed)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, ninth decile by nearest rank, maximum and number; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    ninth = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return {"median": statistics.median(ordered), "p90": ninth, "max": ordered[-1], "count": len(ordered)}


def summary(lives: Sequence[Life], zero: float, end: float, replicas: int, step: float) -> dict[str, Any]:
    """The figures of an arm.

    Goodput is the share of the optimizer steps that `replicas` could have made, `step` seconds each, that rounds have
    counted: those of every round after `zero`, the end of the first round, until the last one before `end`.

    Args:
        lives: of all replicas.
    """
    reports = [report for life in lives for report in life.reports if report["at"] <= end]
    counted = [report for report in reports if report["at"] > zero]
    last = max((report["at"] for report in counted), default=zero)
    steps = sum(report["steps"] for report in counted)
    digests = defaultdict[int, list[str]](list)
    for report in reports:
        digests[report["round"]].append(report["digest"])
    found = {
        "goodput": steps / (replicas * (last - zero) / step) if last > zero else 0.0,
        "span_s": last - zero,
        "rounds": len({report["round"] for report in counted}),
        "replica_steps": steps,
        "rounds_compared": sum(len(found) > 1 for found in digests.values()),
        "rounds_differing": sum(len(set(found)) > 1 for found in digests.values()),
        "kills": [
            {"at": life.killed - zero, "replica": life.replica, "inside": inside(lives, life.killed)}
            for life in lives
            if life.killed is not None
        ],
        **stalls(lives),
        **restarts(lives),
        "counts": counts(lives),
    }
    return found


def inside(lives: Iterable[Life], moment: float) -> bool:
    """True if a replica was in a round."""
    return any(life.in_round(moment) for life in lives)


@dataclass(frozen=True)
class Window:
    """A death or a join, until the round that has dealt with it, and what it added to the longest call of `step`."""

    begin: float
    end: float
    extra: float

    def overlaps(self, other: Window) -> bool:
        return self.begin <= other.end and other.begin <= self.end


def stalls(lives: Sequence[Life]) -> dict[str, Any]:
    """Seconds in calls of `step` that make a round, and what deaths and joins add to the longest call after them.

    A death adds to the calls of survivors until the end of each one's next round; a join to those of the others from
    the moment in which the newcomer asks to join to the end of its first round. Where these overlap, the calls are of
    both.
    """
    calls = [call for life in lives for call in life.calls]
    usual = {
        due: statistics.median([call["seconds"] for call in calls if call["due"] == due] or [0.0])
        for due in (True, False)
    }

    def extra(begin: float, until: Mapping[int, float]) -> list[float]:
        """By how much calls were longer: of each life by its number, and of those that trained before."""
        return [
            max(0.0, call["seconds"] - usual[call["due"]])
            for number, end in until.items()
            for call in lives[number].calls
            if call["at"] >= begin and call["begin"] <= end
        ]

    trained = [(number, [report["at"] for report in life.reports]) for number, life in enumerate(lives)]
    deaths, joins = list[tuple[Window, bool]](), list[Window]()
    for moment in (life.killed for life in lives if life.killed is not None):
        until = {
            number: next(at for at in rounds if at >= moment)
            for number, rounds in trained
            if rounds and rounds[0] < moment <= rounds[-1] and lives[number].killed != moment
        }
        if found := extra(moment, until):
            deaths.append((Window(moment, max(until.values()), max(found)), inside(lives, moment)))
    for life in newcomers(lives):
        for asked, first in zip(life.of("joining"), life.reports[:1], strict=False):
            begin, end = asked["at"], first["at"]
            others = {number: end for number, rounds in trained if rounds and rounds[0] < begin}
            if found := extra(begin, others):
                joins.append(Window(begin, end, max(found)))
    both = [death for death, _ in deaths if any(death.overlaps(join) for join in joins)]
    alone = [(death, within) for death, within in deaths if death not in both]
    return {
        "round_s": spread([call["seconds"] for call in calls if call["due"]]),
        "death_between_s": spread([death.extra for death, within in alone if not within]),
        "death_inside_s": spread([death.extra for death, within in alone if within]),
        "join_s": spread([join.extra for join in joins if not any(join.overlaps(death) for death, _ in deaths)]),
        "both_s": spread([death.extra for death in both]),
    }


def newcomers(lives: Iterable[Life]) -> list[Life]:
    """Those that followed a killed one."""
    seen, later = set[int](), []
    for life in sorted(lives, key=lambda life: life.started):
        later += [life] if life.replica in seen else []
        seen.add(life.replica)
    return later


def restarts(lives: Iterable[Life]) -> dict[str, Any]:
    """Seconds of newcomers from their start: until they ask to join, to their first step, and to the first round that
    has counted any of theirs."""
    asked, first_step, first_round = list[float](), list[float](), list[float]()
    for life in newcomers(lives):
        asked += [event["at"] - life.started for event in life.of("joining")[:1]]
        first_step += [event["at"] - life.started for event in life.of("ready")[:1]]
        first_round += [report["at"] - life.started for report in life.reports if report["steps"]][:1]
    return {
        "restart_asked_s": spread(asked),
        "restart_step_s": spread(first_step),
        "restart_round_s": spread(first_round),
    }


def counts(lives: Iterable[Life]) -> dict[str, int]:
    """What the replicas counted themselves, as they last said it."""
    names = ("views", "repeated_rounds", "healed_bytes", "own_steps_lost", "payload_bytes")
    last = [life.reports[-1] for life in lives if life.reports]
    return {name: sum(report[name] for report in last) for name in names if any(name in report for report in last)}


class Point(NamedTuple):
    """The held-out loss of a round's state, and the replica-steps that rounds had counted up to it."""

    round: int
    steps: int
    loss: float


def learned(lives: Iterable[Life], losses: Mapping[int, float]) -> list[Point]:
    """How the loss fell.

    Args:
        losses: of states, by their rounds.
    """
    of_round = defaultdict[int, int](int)
    for life in lives:
        for report in life.reports:
            of_round[report["round"]] += report["steps"]
    steps = accumulate(of_round[number] for number in sorted(of_round))
    return [
        Point(number, done, losses[number])
        for number, done in zip(sorted(of_round), steps, strict=True)
        if number in losses
    ]


def loss_at(curve: Iterable[Point], what: Literal["round", "steps"], value: float) -> float | None:
    """The loss after so many rounds or replica-steps, between points on a line; None outside of them."""
    for before, after in pairwise(curve):
        left, right = getattr(before, what), getattr(after, what)
        if left <= value <= right:
            return before.loss + (after.loss - before.loss) * ((value - left) / (right - left) if right > left else 0)
    return None
