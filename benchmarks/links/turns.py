"""Arms that take turns on the same links, and how their steps are compared.

All arms live in the same processes, each with models of its own, and take their turns in an order that is drawn again
in every round: what the machine does meanwhile hits a round's arms alike, so they are compared round by round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from ..common import report
from ..common.arms import Arm
from ..common.launch import synchronize
from ..common.models import Built
from .verification import sent_bytes

#: Untimed steps of a turn: connections, memory and caches were others' before. Far away, TCP's windows open again too.
OPENING, FAR_OPENING = 1, 3
#: Times of one rank, or of all: [turns][steps], in seconds.
Turns = Sequence[Sequence[float]]
#: The reference's second turn in a round.
AGAIN = "again"
KINDS = ("wall", "cpu")


class Trainee:
    """A model in an arm's hands, and its steps.

    Args:
        installed: whose statistics are read; None: nobody's.
        step: takes one; it is timed.
        prepare: what goes before each step, untimed.
    """

    def __init__(
        self, installed: Any, step: Callable[[], object], prepare: Callable[[], object] = lambda: None
    ) -> None:
        self.installed, self.step, self.prepare = installed, step, prepare
        #: Steps from one exchange to the next.
        self.every: int = max(1, installed.arm.every) if installed else 1

    def settle(self, steps: int) -> None:
        """Untimed steps, so many at least, until one exchange has been made and nothing is tried any more."""
        for _ in range(max(steps, self.every)):
            self.untimed()
        while self.installed and self.installed.deciding:
            self.untimed()

    def untimed(self) -> None:
        self.prepare()
        self.step()

    def counted(self) -> dict[str, float]:
        """gradwire's counts so far; nothing for other arms. Waits for what is under way."""
        done = self.installed.statistics() if self.installed else None
        if done is None:
            return {}
        return {"payload_bytes": done.bytes_sent, **{f"{phase}_s": spent for phase, spent in done.seconds.items()}}


def on_one_batch(
    arm: Arm, built: Built, bucket_mb: float | None, lr: float, momentum: float = 0.0, exchange: str = "auto"
) -> Trainee:
    """Steps under SGD, always with the same batch."""
    model, loss = built
    installed = arm.install(model, bucket_mb, exchange=exchange)
    optimizer = installed.optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum))

    def step() -> None:
        optimizer.zero_grad()
        loss(installed.model).backward()
        optimizer.step()

    return Trainee(installed, step)


@dataclass
class Turn:
    """One turn: wall and process seconds of each step, of which so many share an exchange, and what a step has sent and
    counted."""

    every: int
    wall: list[float]
    cpu: list[float]
    sent: float
    counted: dict[str, float]


def taken(trainee: Trainee, steps: int, begin: str, opening: int) -> Turn:
    """A turn of so many exchanges, of `trainee.every` steps each; if it begins but once, of so many steps.

    Args:
        begin: when ranks wait for each other: before each exchange's first "step", once a "turn", or never ("apart").
        opening: untimed steps.
    """
    for _ in range(max(opening, trainee.every)):
        trainee.untimed()
    every = 1 if begin == "turn" else trainee.every
    sent, before, wall, cpu = sent_bytes(), trainee.counted(), list[float](), list[float]()
    for step in range(steps * every):
        trainee.prepare()
        if (begin == "turn" and not step) or (begin == "step" and not step % every):
            dist.barrier()
        synchronize()
        at, spent = time.perf_counter(), time.process_time()
        trainee.step()
        synchronize()
        cpu.append(time.process_time() - spent)
        wall.append(time.perf_counter() - at)
    counted = {name: (now - before[name]) / len(wall) for name, now in trainee.counted().items()}
    return Turn(every, wall, cpu, (sent_bytes() - sent) / len(wall), counted)


def take_turns(
    trainees: Mapping[str, Sequence[Trainee]],
    rounds: int,
    steps: int,
    begin: str = "step",
    opening: int = OPENING,
    after: Callable[[str], object] = lambda name: None,
    until: float = float("inf"),
) -> dict[str, list[Turn]]:
    """Rounds in which every arm has a turn, by a drawn one of its trainees. The same on all ranks.

    Args:
        begin, opening: as of `taken`.
        after: called after each turn, with the arm's name.
        until: no round but the first begins later, by `time.time` of the first rank.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in trainees}
    order, drawn = list(trainees), random.Random(0)
    for count in range(rounds):
        if count and until < float("inf") and not told(time.time() < until):
            break
        drawn.shuffle(order)
        for name in order:
            turns[name].append(taken(drawn.choice(trainees[name]), steps, begin, opening))
            after(name)
    return turns


def told(value: Any) -> Any:
    """The first rank's, on every rank."""
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


def results(trainees: Mapping[str, Sequence[Trainee]], turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Of each arm: seconds of a step by turns and exchanges, bytes that a step sends as the kernel counts them, medians
    of what gradwire counted, and what its models send. Closes them."""
    found = {}
    for name, mine in turns.items():
        installed = [one.installed for one in trainees[name] if one.installed]
        found[name] = {
            "wall_s": [means(turn.wall, turn.every) for turn in mine],
            "cpu_s": [means(turn.cpu, turn.every) for turn in mine],
            "sent_bytes": fmean(turn.sent for turn in mine),
            "counted": {what: report.median([turn.counted[what] for turn in mine]) for what in mine[0].counted},
            "sends": [one.sends() for one in installed],
        }
        for one in installed:
            one.close()
    return found


def means(values: Sequence[float], every: int) -> list[float]:
    """Of each `every` values."""
    return [fmean(values[at : at + every]) for at in range(0, len(values), every)]


# -- all ranks' turns -------------------------------------------------------------------------------------------------


def average(ranks: Sequence[Turns]) -> list[list[float]]:
    """Times of which each is the mean of the ranks'."""
    return [[fmean(step) for step in zip(*turns, strict=True)] for turns in zip(*ranks, strict=True)]


def slowest(ranks: Sequence[Turns]) -> list[list[float]]:
    """Times of which each lasts until its slowest rank is done."""
    return [[max(step) for step in zip(*turns, strict=True)] for turns in zip(*ranks, strict=True)]


def joined(
    ranks: Sequence[Mapping[str, Any]], shaped: bool, together: Callable[[Sequence[Turns]], list[list[float]]] = slowest
) -> list[dict[str, Any]]:
    """One row for each arm: its steps' times on all ranks, the bytes that a step sends by the rank that sends most, and
    what else the first rank says of it.

    Args:
        ranks: each one's `results`.
        shaped: whether the kernel's count of bytes is one rank's alone.
    """
    rows = []
    for name, first in ranks[0].items():
        sent = max(rank[name]["sent_bytes"] for rank in ranks) if shaped else None
        times = together([rank[name]["wall_s"] for rank in ranks])
        others = {what: value for what, value in first.items() if what not in ("wall_s", "cpu_s")}
        rows.append({"arm": name, **others, "sent_bytes": sent, "times_s": times})
    return rows


def medians(row: Mapping[str, Any]) -> list[float]:
    """Of a row's steps: of all, then of each turn's."""
    return [report.median([time for turn in row["times_s"] for time in turn]), *map(report.median, row["times_s"])]


def quartiles(row: Mapping[str, Any]) -> tuple[float, float]:
    return report.quartiles([time for turn in row["times_s"] for time in turn])


def ratios(those: Iterable[float], to: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(those, to, strict=True)]


def compared(ranks: Sequence[Mapping[str, Any]], references: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each arm, in the order in which they are given: its median seconds, and its ratios, by round, to one
    turn of the fastest reference and then to the other. The reference's own turns have one each, to the other.

    The reference takes part twice, under a name with `AGAIN`, and a turn is compared with each of the two, not with
    their mean: turns are late now and then and never early, so a mean of two is late more often than one, and every
    other arm would look faster than it is.

    Args:
        ranks: each one's `results`.
    """
    seconds = {
        name: {kind: [fmean(turn) for turn in average([rank[name][f"{kind}_s"] for rank in ranks])] for kind in KINDS}
        for name in ranks[0]
    }
    reference = min(references, key=lambda name: report.median(seconds[name]["wall"]))
    twice = (reference, f"{reference} {AGAIN}")
    rows: list[dict[str, Any]] = []
    for name, mine in seconds.items():
        row: dict[str, Any] = {"arm": name, "reference": reference, "sends": ranks[0][name]["sends"]}
        for kind in KINDS:
            found = [ratio for to in twice if to != name for ratio in ratios(mine[kind], seconds[to][kind])]
            row[f"{kind}_s"] = report.median(mine[kind])
            row[f"{kind}_ratio"] = report.median_interval(found, independent=len(mine[kind]))
            row[f"{kind}_ratios"] = found
        rows.append(row)
    return rows


# -- cells of tables --------------------------------------------------------------------------------------------------


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.{digits}f}"


def between(values: Sequence[float], digits: int = 3) -> str:
    """The least and the most."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def megabytes(sent: float | None) -> str:
    return "" if sent is None else f"{sent / 1e6:.2f}"


def limits(ratio: Mapping[str, float]) -> str:
    """A median, and its interval."""
    return f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
