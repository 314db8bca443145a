"""A view of replicas that train together, as one member sees it, and what a change of view brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..comm.group import Group
from ..comm.ports import Work
from ..comm.threads import start_thread
from ..core.reducer import Reducer
from ..core.statistics import Statistics
from .healing import DueRound, Healed, Progress
from .meeting.client import Board
from .verdict import Ending, Verdict


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


class NextRound:
    """The word of a view's teller to those that have been healed: what its next round sends.

    It travels over the mesh, as rounds do not need the meeting point.

    Args:
        group: the view's.
        verdict: of its members.
        board: to wake when the word has come.
    """

    def __init__(self, group: Group, verdict: Verdict, board: Board) -> None:
        self._channel, self._fresh, self._teller = group.channel("next round"), verdict.fresh, verdict.teller
        self._word = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._work: Work | None = None
        #: None, or an error, once the word has come.
        self.heard = list[Exception | None]()
        if group.rank in verdict.fresh:
            works = [self._move([self._teller], [])]
            start_thread("gradwire-next-round", partial(wait_aside, works, self.heard, board), None)

    @property
    def tells(self) -> bool:
        """True if this rank knows by itself."""
        return self._channel.rank not in self._fresh

    @property
    def known(self) -> bool:
        return self.tells or self.heard == [None]

    def tell(self, due: DueRound) -> None:
        """Tell the others, if this rank is the one to do that, and has not."""
        if self._channel.rank == self._teller and self._work is None:
            self._word.copy_(torch.tensor(due.to_numbers(), dtype=torch.int64, device="cpu"))
            self._work = self._move([], self._fresh)

    def due(self) -> DueRound:
        """The word that has come."""
        return DueRound.from_numbers(self._word.tolist())

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> Work:
        nothing, ranks = self._word[:0], range(self._channel.size)
        received = [self._word if rank in sources else nothing for rank in ranks]
        return self._channel.pairwise(received, [self._word if rank in targets else nothing for rank in ranks])


def wait_aside(works: Sequence[Work], ended: list[Exception | None], board: Board) -> None:
    """Wait for messages; then note their error, or None. For a thread, as a peer that dies within a message leaves its
    receiver waiting."""
    try:
        for work in works:
            work.wait()
        ended.append(None)
    except RuntimeError as error:
        ended.append(error)
    board.wake()


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
    #: Number of those healed that this replica has told how far it is; None: it does not tell.
    told: int | None = None
    next_round: NextRound | None = None

    def cut(self) -> None:
        """End every wait for its other members."""
        group, reducer = self.group, self.reducer  # a replica that leaves lets them go meanwhile
        if reducer is not None:
            reducer.session.pipeline.fail(RuntimeError(self.broken or "another view has taken its place"))
        if group is not None:
            group.cut()
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
