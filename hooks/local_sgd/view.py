"""A view of replicas that train together, as one member sees it, and what a change of view brings."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm.group import Group
from ..core.reducer import Reducer
from ..core.statistics import Statistics
from .healing import Healed, Progress
from .meeting.client import Board
from .verdict import Ending


@dataclass
class ReplicaStatistics(Statistics):
    """Counts of a replica; `steps` are rounds.

    Attributes:
        views: views that it has been in.
        repeated_rounds: rounds that failed here, and were repeated.
        healed_bytes: bytes of the states that it has taken over.
        own_steps_lost: steps of its own optimizer that no round has counted and that it has given up.
        seconds: "meeting" is the time that `step` and its like have waited for a view.
    """

    views: int = 0
    repeated_rounds: int = 0
    healed_bytes: int = 0
    own_steps_lost: int = 0


@dataclass(eq=False)
class View:
    """A view, as one member sees it."""

    number: int
    members: tuple[int, ...]
    rank: int
    board: Board
    group: Group | None = None
    #: All members have connected.
    whole: bool = False
    #: This member's report is on the board.
    reported: bool = False
    #: Why it has ended, if it has.
    broken: str | None = None
    reducer: Reducer | None = None
    #: The rank that tells those that are healed how far the others are, and what the next round sends.
    teller: int = -1
    #: Number of those healed that this replica has told; None: it does not tell.
    told: int | None = None

    def cut(self) -> None:
        """End every wait for its other members."""
        if self.reducer is not None:
            self.reducer.session.pipeline.fail(RuntimeError(self.broken or "another view has taken its place"))
        if self.group is not None:
            self.group.cut()
        self.board.wake()


@dataclass
class Arrival:
    """The outcome of a change of view for this replica."""

    view: View
    born: int
    name: tuple[int, int]
    ending: Ending
    healed: Healed | None
    progress: Progress | None
