"""A model of replicas that come and go, by events and without processes, for spans that nobody waits for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Measured medians, in seconds: of a round; added to the round after a death, or by a join; and of a restart until
    the newcomer asks to join."""

    round: float
    death: float
    join: float
    restart: float


def costs(figures: Mapping[str, object]) -> Costs:
    """Of `accounting.summary`, deaths of both kinds together; what never happened costs nothing."""

    def median(*names: str) -> float:
        found = [spread for name in names if isinstance(spread := figures[name], Mapping)]
        number = sum(spread["count"] for spread in found)
        return sum(spread["median"] * spread["count"] for spread in found) / number if number else 0.0

    return Costs(
        median("round_s"),
        median("death_between_s", "death_inside_s", "both_s"),
        median("join_s"),
        median("restart_asked_s"),
    )


def goodput(of: Costs, replicas: int, round_s: float, kill_every: float, kills: int = 2000, seed: int = 0) -> float:
    """The share of steps that rounds count, if one replica is killed at a drawn moment of each `kill_every` seconds.

    A round is `round_s` of steps and the exchange. A death ends what its replica did since the last round, and delays
    the others' next one. The newcomer starts at once, asks to join after a restart, and is taken in between two rounds.

    Args:
        kills: so many are simulated.
    """
    draw = random.Random(seed)
    moments = [(piece + draw.random()) * kill_every for piece in range(kills)][::-1]
    present, back = set(range(replicas)), dict[int, float]()
    now = counted = 0.0
    while moments:
        joined = {replica for replica, when in back.items() if when <= now}
        if joined:
            present |= joined
            back = {replica: when for replica, when in back.items() if replica not in joined}
            now += of.join
        if not present:
            now = min(back.values())
            continue
        end, died = now + round_s + of.round, False
        while moments and moments[-1] < end:
            moment, replica = moments.pop(), draw.randrange(replicas)
            died = died or replica in present
            present.discard(replica)
            back[replica] = moment + of.restart
        counted += len(present) * round_s
        now = end + (of.death if died else 0.0)
    return counted / (replicas * now)
