"""Measuring on links: the document, the processes on the links, arms that take turns, and what these took."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from ..common import report
from ..common.arguments import expect_counts
from ..common.arms import Installed
from . import flags, links
from .verification import sent_bytes

#: Times of one rank or of all: [rounds][steps], in seconds.
Turns = Sequence[Sequence[float]]


def document(benchmark: str, options: argparse.Namespace, *names: str, **arguments: Any) -> dict[str, Any]:
    """The document of a run on links, before it has run.

    Args:
        names: of options that are recorded, besides those of the links.
        arguments: what is recorded besides.

    Raises:
        ValueError: an option makes no sense.
    """
    expect_counts(options)
    _, distance = flags.network_of(options)
    given = {name: getattr(options, name) for name in ("rate", "rates", "world") if hasattr(options, name)}
    given |= flags.recorded(distance) | {name: getattr(options, name) for name in names} | arguments
    result = report.document(benchmark, given)
    result["environment"]["threads"] = 1  # of each rank
    return result


def measured(
    options: argparse.Namespace,
    rate: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    world: int | None = None,
    per_node: int = 1,
    **how: Any,
) -> tuple[dict[str, Any], list[Any]]:
    """Run a function on every rank, on links of `rate` that have been proven.

    Args:
        options: with those of `flags.add_links` and a timeout.
        function, arguments, how: as of `Loopback.run_proven`.
        world: ranks; None: as the options say.
        per_node: of these on each node.

    Returns:
        What is recorded of the links, and what the ranks returned.
    """
    rates, distance = flags.network_of(options)
    with links.open_links(world or options.world, rates[rate], distance, per_node) as connection:
        proof, ranks = connection.run_proven(function, arguments, options.timeout, **how)
    return {"rate": rate, "bits_per_s": rates[rate], "links": str(connection), "proof": proof}, ranks


class Runner:
    """An arm's timed steps on this rank.

    Args:
        step: takes one, and returns its seconds.
        arm: whose statistics are read, if it has any.
        opening: untimed steps of each round: connections and memory were idle while the others had their turn.
        share: of what a step takes, how much counts.
    """

    def __init__(
        self, step: Callable[[], float], arm: Installed | None = None, opening: int = 1, share: float = 1.0
    ) -> None:
        self.step, self.arm, self.opening, self.share = step, arm, opening, share
        self.times: list[list[float]] = []
        self.counts: list[dict[str, float]] = []
        self.sent = 0

    def settle(self, steps: int) -> None:
        """Untimed steps, so many at least, until the arm has decided what to do."""
        for _ in range(steps):
            self.step()
        while self.arm is not None and self.arm.deciding:
            self.step()

    def round(self, steps: int) -> None:
        for _ in range(self.opening):
            self.step()
        sent, times = sent_bytes(), []
        for _ in range(steps):
            before = self.counted()
            times.append(self.step())
            self.counts.append({name: (now - before[name]) * self.share for name, now in self.counted().items()})
        self.times.append(times)
        self.sent += sent_bytes() - sent

    def counted(self) -> dict[str, float]:
        """gradwire's counts so far; nothing for other arms."""
        statistics = None if self.arm is None else self.arm.statistics()
        if statistics is None:
            return {}
        seconds = {f"{phase}_s": spent for phase, spent in statistics.seconds.items()}
        return {"payload_bytes": statistics.bytes_sent, **seconds}

    def result(self) -> dict[str, Any]:
        """Of all rounds: times, bytes sent a step as the kernel counts them, and medians of what gradwire counted."""
        counted = {name: report.median([count[name] for count in self.counts]) for name in self.counts[0]}
        return {"times": self.times, "sent_bytes": self.sent * self.share / len(self.counts), "counted": counted}


def in_turns(turns: Mapping[str, Callable[[], None]], rounds: int) -> None:
    """Give every arm its turn in every round, in another order each: nobody always follows the one that heats most."""
    names = list(turns)
    for round_ in range(rounds):
        for place in range(len(names)):
            turns[names[(place + round_) % len(names)]]()


def take_turns(runners: Mapping[str, Runner], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Rounds of so many timed steps of every arm. Returns their results."""
    in_turns({name: partial(runner.round, steps) for name, runner in runners.items()}, rounds)
    return {name: runner.result() for name, runner in runners.items()}


def average(ranks: Sequence[Turns]) -> list[list[float]]:
    """Times of which each is the mean of the ranks'."""
    return [[fmean(step) for step in zip(*turns, strict=True)] for turns in zip(*ranks, strict=True)]


def slowest(ranks: Sequence[Turns]) -> list[list[float]]:
    """Times of which each lasts until its slowest rank is done."""
    return [[max(step) for step in zip(*turns, strict=True)] for turns in zip(*ranks, strict=True)]


@dataclass(frozen=True)
class Timed:
    """An arm's steps on all ranks.

    Attributes:
        sent_bytes: in a step by the rank that sent most; None where the kernel's count is not one rank's alone.
    """

    turns: list[list[float]]
    sent_bytes: float | None

    @property
    def steps(self) -> list[float]:
        return [step for turn in self.turns for step in turn]

    @property
    def seconds(self) -> float:
        return report.median(self.steps)

    @property
    def quartiles(self) -> tuple[float, float]:
        return report.quartiles(self.steps)


def timed(
    ranks: Sequence[Mapping[str, Any]], shaped: bool, together: Callable[[Sequence[Turns]], list[list[float]]] = slowest
) -> dict[str, Timed]:
    """Every arm's steps, of each rank's results."""
    return {
        name: Timed(
            together([rank[name]["times"] for rank in ranks]),
            max(rank[name]["sent_bytes"] for rank in ranks) if shaped else None,
        )
        for name in ranks[0]
    }


def span(quartiles: Sequence[float], digits: int = 1) -> str:
    """Milliseconds, in a cell."""
    return " to ".join(f"{second * 1e3:.{digits}f}" for second in quartiles)


def megabytes(sent: float | None) -> str:
    return "" if sent is None else f"{sent / 1e6:.2f}"
