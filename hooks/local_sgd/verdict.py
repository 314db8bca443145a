"""The decision at a change of view: whose state goes on, and what becomes of the others' rounds.

A state's *name* is (view in which it was made, number of rounds): equal names mean equal bits. At every change the
members of the new view agree on one state, which thereby wins over all that earlier views have made meanwhile: members
that were cut off may have completed a round that the others have then repeated without them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

#: The end of a round that was under way when its view broke: nobody has completed it, so that it is repeated; others
#: have, with this member's message; or they have gone on without it.
Ending = Literal["repeated", "counted", "lost"]


@dataclass(frozen=True)
class Report:
    """A member's words at a change of view.

    Attributes:
        born: the view in which somebody's parameters became its first state; 0: it has none yet.
        agreed: the last view whose members have agreed on its state.
        view, rounds: the state's name.
        sent_in: the view in which it has sent its next round; 0: it has not.
        has_mean: it has the mean of the round that made the state, and others may need it.
        digest: of the state's bits.
        frozen: of the tensors that no round changes.
        fresh: it has received its state, and made no round since.
    """

    born: int
    agreed: int
    view: int
    rounds: int
    sent_in: int
    has_mean: bool
    digest: int
    frozen: int
    fresh: bool

    @property
    def name(self) -> tuple[int, int]:
        return self.view, self.rounds

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Verdict:
    """The decision, the same at all members of a view.

    Attributes:
        born, name: of the state that goes on.
        donors: ranks that have it.
        needy: ranks that have not, and get it from the donors.
        diverged: those of `needy` that had other bits under this name.
        frozen: those of `needy` whose tensors that no round changes differ from the first donor's.
        endings: by rank.
        mean: the donor that tells the last round's mean to those whose messages it has counted; None: nobody has it.
        teller: the donor that tells those of `fresh` what the next round sends.
        fresh: ranks that have received their state and made no round since.
    """

    born: int
    name: tuple[int, int]
    donors: tuple[int, ...]
    needy: tuple[int, ...]
    diverged: tuple[int, ...]
    frozen: tuple[int, ...]
    endings: tuple[Ending, ...]
    mean: int | None
    teller: int
    fresh: tuple[int, ...]


def decide(view: int, reports: Sequence[Report]) -> Verdict:
    """The decision of a view's members, from their reports in rank order. If nobody has a state, the first member's
    parameters become that of (view, 0)."""
    # The older training wins: one that was cut off as a whole may find a newcomer that has begun anew meanwhile.
    best = max(reports, key=lambda report: (-report.born if report.born else -math.inf, report.agreed, report.name))
    if best.born:
        born, name = best.born, best.name
        same = [rank for rank, report in enumerate(reports) if (report.born, report.name) == (born, name)]
    else:
        born, name, same = view, (view, 0), [0]
    first = reports[same[0]]
    donors = tuple(rank for rank in same if reports[rank].digest == first.digest)
    needy = tuple(rank for rank in range(len(reports)) if rank not in donors)
    teller = next((rank for rank in donors if not reports[rank].fresh), donors[0])
    return Verdict(
        born,
        name,
        donors,
        needy,
        diverged=tuple(rank for rank in same if rank not in donors),
        frozen=tuple(rank for rank in needy if reports[rank].frozen != first.frozen),
        endings=tuple(_ending(report, born, name) for report in reports),
        mean=next((rank for rank in donors if reports[rank].has_mean), None),
        teller=teller,
        fresh=tuple(rank for rank, one in enumerate(reports) if rank != teller and (rank in needy or one.fresh)),
    )


def _ending(report: Report, born: int, name: tuple[int, int]) -> Ending:
    if report.born != born:
        return "lost"
    if report.name == name:
        return "repeated"
    return "counted" if report.sent_in and name == (report.sent_in, report.rounds + 1) else "lost"
