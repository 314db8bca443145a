"""Replicas that come and go, and the change from one view to the next.

A *view* is a number and its members in order, as the meeting point proposes it. While the members train, a thread
connects the next view's mesh beside the one in use. Then it changes views, when no round is under way here: members
tell each other the names of their states (`verdict`), those that lack the newest get it from those that have it
(`healing`), and the next round runs in the new view. A round that is under way when its view breaks fails here, and is
repeated in the next view, unless others have completed it.

The thread that trains comes by before a round, after it, and when it has failed.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..comm.group import Group
from ..comm.threads import start_thread
from ..core.reducer import Reducer
from ..timeouts import MESH_SECONDS, SILENT_SECONDS
from .healing import CommonState, DueRound, Healed, Progress
from .meeting.client import Client
from .meeting.events import Proposed, Refused, Void, Waiting, Whole
from .meeting.options import Meeting, MeetingLost
from .meeting.relay import COMMON, meet_inside
from .verdict import Report, Verdict, decide
from .view import Arrival, NextRound, ReplicaStatistics, View, wait_aside

log = logging.getLogger("gradwire.meeting")

#: Seconds of a wait for a view after which the log says what it waits for.
REPORT_AFTER = 5.0
#: Seconds between looks of a user's thread that waits, at what may end the wait.
LOOK_SECONDS = 0.25
#: A round that has failed here so often in a row, with nobody lost, fails for a reason of its own.
ATTEMPTS = 4
#: A member's words on a view's board: its report, that it is healed, and the first donor's progress.
REPORT, HEALED, PROGRESS = COMMON + "report of {}", "healed {}", COMMON + "progress"


class Replicas:
    """One replica's tie to the others: calls of the thread that trains, and a thread that changes views.

    A replica of several ranks calls all of this on each of them. What changes their shards of the state is done by all
    of them or by none: before it they tell each other a number (`_alike`).

    Args:
        meeting: where they meet.
        description: options and model, which must be equal for all.
        state: the state in common.
        open_view: makes the reducer of a view, over its group. A collective of the members.
        statistics: the counts to add to.
        inside: the ranks of this replica, if it has several: each exchanges its shards with the ranks of the other
            replicas that hold the same ones.

    Attributes:
        view: the view in use; None: none yet.
    """

    def __init__(
        self,
        meeting: Meeting,
        description: dict[str, Any],
        state: CommonState,
        open_view: Callable[[Group], Reducer],
        statistics: ReplicaStatistics,
        inside: Group | None = None,
    ) -> None:
        self._meeting, self.state, self._open_view, self.statistics = meeting, state, open_view, statistics
        self._inside = inside
        self.view: View | None = None
        statistics.seconds["meeting"] = 0.0
        #: Guards all that the threads share.
        self._changed = threading.Condition()
        #: The state's name, the view in which its training began, and the last one whose members have agreed on it.
        self._name, self._born, self._agreed = (0, 0), 0, 0
        #: The number of the round under way here, and the view in which the next round was sent.
        self._under_way: int | None = None
        self._sent_in = 0
        #: True if this replica has received its state, and made no round since.
        self._fresh = False
        #: True while the user's thread follows a change: the state is not to be read.
        self._following = False
        #: True from the wish to change views to the end of the change: no round may begin.
        self._changing = False
        #: The change that the user's thread has not followed yet.
        self._arrival: Arrival | None = None
        self._next: View | None = None
        self._problem: Exception | None = None
        self._waiting_for = "no word from the meeting point yet"
        #: Failures of one round in a row that began here.
        self._failures = 0
        self._works = list[Any]()  # of healing: they hold memory
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._relay, address = meet_inside(inside, meeting, description)
        self.client = Client(
            address,
            description | ({} if inside is None else {"shard": inside.rank}),
            secret=meeting.key,
            patience=meeting.patience,
            events=self._heard,
            # A relay ends with its replica's process; a busy one is not to be left.
            silent=SILENT_SECONDS if inside is None else meeting.patience,
        )
        start_thread("gradwire-replicas", self._run, self._inbox)

    # -- the thread that trains --------------------------------------------------------------------------------------

    def join(self) -> Arrival:
        """Wait for the first view."""
        return self._await_arrival()

    def enter(self, number: int) -> Arrival | None:
        """Before round `number`: wait for a view to make it in. Returns a change that must be followed first; the round
        has begun if there is none."""
        least = 0
        while True:
            with self._changed:
                self._wait(partial(self._stands, least))
                assert self.view is not None
                least, sent_in = self.view.number, self._sent_in
            least = max(self._alike(least))
            with self._changed:
                ready, pending = self._stands(least) and self.view.number == least, self._arrival is not None
                if ready and not pending:
                    self._under_way, self._sent_in = number, least
            states = self._alike(ready + 2 * pending)
            if all(state == 1 for state in states):
                return None
            with self._changed:
                self._sent_in = sent_in
                self._stopped()
            if all(state & 1 for state in states):
                return self._await_arrival()

    def others_round(self) -> DueRound | None:
        """The round that has begun, in the words of the teller, for a replica that has been healed and may have counted
        otherwise; None: this replica knows by itself.

        Raises:
            RuntimeError: the view has ended first.
        """
        if not self._fresh:
            return None
        view, problem = self.view, ""
        assert view is not None
        assert view.next_round is not None
        word = view.next_round
        try:
            view.board.wait_for(lambda: word.known or word.heard or view.broken is not None, self._meeting.patience)
        except RuntimeError as error:
            problem = str(error)
        if not all(self._alike(word.known)):
            raise RuntimeError(view.broken or problem or f"no word of what the next round sends: {word.heard}")
        self._fresh = False
        return None if word.tells else word.due()

    @property
    def awaited(self) -> bool:
        """True if others wait in a round for this replica, which has been healed and has not counted to it."""
        word = None if self.view is None else self.view.next_round
        return self._fresh and self._inside is None and word is not None and word.known and not word.tells

    def completed(self, here: bool) -> bool:
        """True if the round under way has been completed on all ranks of this replica."""
        return all(self._alike(here))

    def applied(self, number: int) -> None:
        """The round under way has been applied: the state after it has the name (view, `number`)."""
        with self._changed:
            assert self.view is not None
            self._name, self._agreed, self._sent_in = (self.view.number, number), self.view.number, 0
            self._failures = 0
            self._stopped()

    def failed(self, failure: Exception) -> Arrival:
        """The round under way has failed, and nothing runs of it here any more. Wait for the next view.

        Raises:
            the failure: it comes again and again, and begins here.
        """
        with self._changed:
            view = self.view
            assert view is not None
            if view.broken is None:
                self._failures += 1
                if self._failures >= ATTEMPTS:
                    raise failure
                view.broken = str(failure)
                self.client.failed(view.number, f"member {self.client.member}: {failure}")
            self._inbox.put("look")
            self._stopped()
        return self._await_arrival()

    def loaded(self, rounds: int) -> None:
        """A checkpoint of so many rounds has been loaded."""
        with self._changed:
            self._name = self._agreed, rounds

    def followed(self, arrival: Arrival) -> None:
        """The user's thread has followed a change: this replica's state is the one agreed on."""
        with self._changed:
            if arrival.healed is None:
                self.statistics.repeated_rounds += bool(self._sent_in)
            self._born, self._name, self._agreed, self._sent_in = arrival.born, arrival.name, arrival.view.number, 0
            self._fresh |= arrival.healed is not None
            self._following = False
            self._stopped()

    def arrival(self) -> Arrival | None:
        """A change that waits to be followed, while no round is under way; else None. A replica of several ranks
        follows changes before rounds alone, where its ranks wait for each other."""
        if self._arrival is None or self._changing or self._under_way is not None or self._inside is not None:
            return None
        return self._await_arrival()

    @property
    def interrupted(self) -> bool:
        """True if the round under way cannot be completed in this view."""
        view = self.view
        return self._inside is None and self._under_way is not None and view is not None and view.broken is not None

    def tell(self, progress: Progress, due: DueRound | None = None) -> None:
        """Tell those that were healed how far this replica is, if it is the one to tell: when one asks, or a round is
        due, and then what that sends."""
        view = self.view
        if view is None:
            return
        if due is not None and view.next_round is not None:
            with contextlib.suppress(RuntimeError):  # the view has broken
                view.next_round.tell(due)
        if view.told is None:
            return
        asking = sum(key.startswith("healed") for key in list(view.board.values))
        if due or asking > view.told:
            view.told = None if due else asking
            with contextlib.suppress(RuntimeError):  # void by now
                view.board.post(PROGRESS, f"{progress.steps} {progress.count}".encode())

    def close(self) -> None:
        """Leave: the others go on without this replica."""
        self.client.leave()
        if self._relay is not None:
            self._relay.close()
        self._inbox.put(None)
        with self._changed:
            self._problem = self._problem or RuntimeError("this replica has left")
            for view in (self.view, self._next):
                if view is not None:
                    view.broken = "this replica has left"
                    view.cut()
                    view.group = view.reducer = None
            self._stopped()

    def _await_arrival(self) -> Arrival:
        least = 0
        while True:
            with self._changed:
                self._wait(partial(self._has_arrived, least))
                assert self._arrival is not None
                least = self._arrival.view.number
            least = max(self._alike(least))
            with self._changed:
                there = self._has_arrived(least)
                found = self._arrival if there and self._arrival.view.number == least else None
                self._following = found is not None
            if all(self._alike(found is not None)):
                assert found is not None
                with self._changed:
                    self._arrival = None
                if found.progress is not None:  # that of the first rank, as the others may have heard later words
                    found.progress = Progress(
                        *(self._alike(n)[0] for n in (found.progress.steps, found.progress.count))
                    )
                return found
            with self._changed:
                self._following = False
                self._stopped()

    def _has_arrived(self, least: int) -> bool:
        return not self._changing and self._arrival is not None and self._arrival.view.number >= least

    def _stands(self, least: int) -> bool:
        """True if there is a view to make a round in, and no change under way."""
        view = self.view
        return not self._changing and view is not None and view.broken is None and view.number >= least

    def _alike(self, number: int) -> list[int]:
        """A number of each rank of this replica."""
        inside = self._inside
        if inside is None:
            return [number]
        rows = inside.gather_output(inside.size, dtype=torch.int64)
        inside.all_gather(rows, torch.tensor([number], device="cpu")).wait()
        return [int(row) for row in rows]

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, under the lock, until `ready`."""
        began, reported = time.monotonic(), False
        try:
            while not ready():
                if self._problem is not None:
                    raise copy.copy(self._problem) from self._problem  # itself it would hold the caller's frames
                waited = time.monotonic() - began
                if waited > self._meeting.patience:
                    raise self._impatient()
                if waited > REPORT_AFTER and not reported:
                    reported = True
                    log.warning(
                        "gradwire: no round yet: %s. Waiting for up to %g s", self._obstacle(), self._meeting.patience
                    )
                self._changed.wait(LOOK_SECONDS)
        finally:
            self.statistics.seconds["meeting"] += time.monotonic() - began

    def _obstacle(self) -> str:
        """The reason why there is no view yet."""
        away = self.client.lost_for
        if not away:
            return self._waiting_for
        why = f" ({self.client.why})" if self.client.why else ""
        return f"the meeting point {self._meeting.address} has not been reached for {away:.0f} s{why}"

    def _impatient(self) -> RuntimeError:
        if self.client.lost_for:
            return MeetingLost(
                f"gradwire: {self._obstacle()}, and the next round needs it: start gradwire-meet there again, or wait "
                "longer by Meeting(patience=…)"
            )
        return RuntimeError(
            f"gradwire: no round was possible for {self._meeting.patience:.0f} s: {self._waiting_for}. Start more "
            "replicas, or change Meeting(min_replicas=…, patience=…)"
        )

    # -- both threads ------------------------------------------------------------------------------------------------

    def _stopped(self) -> None:
        """No round is under way here any more, or no change is being followed."""
        self._under_way = None
        self._changed.notify_all()
        if self._next is not None:
            self._next.board.wake()

    # -- the client's thread -----------------------------------------------------------------------------------------

    def _heard(self, event: Any) -> None:
        """Take an event of the client. Waits that it ends are ended at once."""
        with self._changed:
            if isinstance(event, Void):
                for view in (self.view, self._next):
                    if view is not None and view.number == event.number:
                        view.broken = view.broken or event.why
                        if view is self._next or self._under_way is not None:  # else others may still be reading
                            view.cut()
            elif isinstance(event, Refused):
                self._problem = ValueError(f"gradwire: {event.why}")
            elif isinstance(event, Waiting):
                self._waiting_for = event.text
            elif isinstance(event, Proposed):
                self._waiting_for = f"members {list(event.members)} connect to each other"
            self._changed.notify_all()
        self._inbox.put(event)

    # -- the thread that changes views -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (event := self._inbox.get()) is not None:
                self._handle(event)
                self._look()
        except Exception as error:
            with self._changed:
                self._problem = error
                self._changed.notify_all()

    def _handle(self, event: Any) -> None:
        view = self._next
        if isinstance(event, Proposed):
            with contextlib.suppress(RuntimeError):  # void already
                self._propose(event)
        elif isinstance(event, Whole) and view is not None and view.number == event.number:
            view.whole = True
        elif isinstance(event, tuple):  # of the thread that connects
            number, group, why = event
            with self._changed:
                wanted = view is not None and view.number == number and view.broken is None
                if view is not None and wanted:
                    view.group = group
            if not wanted:
                if group is not None:
                    group.cut()
            elif group is None:
                self.client.failed(number, why)
            else:
                self.client.connected(number)

    def _propose(self, event: Proposed) -> None:
        if self._problem is not None:  # it has left, or cannot go on
            return
        members = tuple(event.members)
        view = View(event.number, members, members.index(self.client.member), self.client.board(event.number))
        with self._changed:
            former, self._next = self._next, view
        if former is not None:
            former.cut()
        start_thread(f"gradwire-view-{view.number}", partial(self._connect, view), None)
        with self._changed:  # where no round can begin, the report goes out while connections are made
            stands = self.view is not None and self.view.broken is None
            still = not stands and not self._busy and self._arrival is None
            self._changing |= still
        if still:
            self._report(view)

    def _connect(self, view: View) -> None:
        """Connect a view's mesh. Gloo cannot be interrupted in this."""
        group, why = None, ""
        try:
            timeout = timedelta(seconds=MESH_SECONDS)
            made = dist.ProcessGroupGloo(view.board, view.rank, len(view.members), timeout)
            group = Group(made, view.members)
            group.wait_at_most(timedelta(seconds=self._meeting.patience))
        except RuntimeError as error:
            why = f"member {self.client.member}: {error}"
        self._inbox.put((view.number, group, why))

    def _look(self) -> None:
        """Change to the next view if it is time."""
        view = self._next
        if view is None or (group := view.group) is None or view.broken is not None:
            return
        if view.whole or self.view is None or self.view.broken is not None:
            try:
                self._change(view, group)
            except RuntimeError as error:
                if view.broken is None:  # a message has failed, of which the meeting point does not know
                    view.broken = str(error)
                    self.client.failed(view.number, f"member {self.client.member}: {error}")
                view.cut()
                view.reducer = None
                with self._changed:  # rounds go on in the view in use, if it stands
                    self._changing = False
                    self._changed.notify_all()

    def _change(self, view: View, group: Group) -> None:
        """Change to a view that is connected by this group. Raises RuntimeError if it breaks meanwhile."""
        with self._changed:
            self._changing = True
        self._await_round(view)
        if not view.reported:
            self._report(view)
        keys = [REPORT.format(rank) for rank in range(len(view.members))]
        self._await_word(view, lambda: all(key in view.board.values for key in keys))
        verdict = decide(view.number, [Report.from_bytes(view.board.values[key]) for key in keys])
        self._warn_of_diverged(view, verdict)
        view.told = 0 if verdict.needy and view.rank == verdict.donors[0] and self._speaks else None
        view.reducer = self._open_view(group)
        healed, progress = self._heal(view, group, verdict)
        view.next_round = NextRound(group, verdict, view.board)
        ending = verdict.endings[view.rank]
        with self._changed:
            if view.group is not group:
                raise RuntimeError(view.broken)  # this replica has left
            left, self.view, self._next = self.view, view, None
            if left is not None and set(left.members) - set(view.members):
                self._failures = 0  # they may have been the reason
            self.statistics.views += 1
            if healed is not None:
                self.statistics.healed_bytes += healed.nbytes
                if self._arrival is not None and self._arrival.healed is not None:
                    ending = self._arrival.ending
            self._arrival = Arrival(view, verdict.born, verdict.name, ending, healed, progress)
            self._changing = False
            self._changed.notify_all()
        self.client.entered(view.number, view.members, verdict.name)
        if left is not None:
            left.cut()

    def _report(self, view: View) -> None:
        """Tell the members of a view of this replica's state, while no round is under way."""
        view.reported = True
        if self._speaks:
            digests = self.state.digests()
            state = self._born, self._agreed, *self._name, self._sent_in, self.state.has_means
            report = Report(*state, *digests, self._fresh)
            view.board.post(REPORT.format(view.rank), report.to_bytes())

    @property
    def _speaks(self) -> bool:
        """True for the first rank of a replica, which speaks for all of them."""
        return self._inside is None or self._inside.rank == 0

    @property
    def _busy(self) -> bool:
        return self._under_way is not None or self._following

    def _await_round(self, view: View) -> None:
        """Wait until no round is under way here, and no change is followed. A round that a member of the view in use
        has left behind is cut off; so is one of a member that is lost, as the meeting point may not know that view."""
        own = self.view
        missing = own is not None and not set(own.members) <= set(view.members)

        def left_behind() -> bool:
            """A member has changed to the next view without this round."""
            if own is None or self._under_way is None:
                return False
            both = (rank for rank, member in enumerate(view.members) if member in own.members)
            words = filter(None, (view.board.values.get(REPORT.format(rank)) for rank in both))
            return any(Report.from_bytes(word).name != (own.number, self._under_way) for word in words)

        self._await_word(view, lambda: not self._busy or (missing and self._under_way is not None) or left_behind())
        if self._busy:
            assert own is not None
            with self._changed:
                own.broken = own.broken or "a member has changed to the next view before this round"
            own.cut()
            self._await_word(view, lambda: not self._busy)

    def _await_word(self, view: View, ready: Callable[[], bool]) -> None:
        view.board.wait_for(ready, self._meeting.patience)

    def _heal(self, view: View, group: Group, verdict: Verdict) -> tuple[Healed | None, Progress | None]:
        """Send this replica's share of the state to those that need it, or receive it."""
        works, healed = self.state.start(group, verdict)
        if healed is None:
            # They are sent when the next round ends, in which those that are healed take part.
            self._works = works
            return None, None
        received = list[Exception | None]()
        start_thread(f"gradwire-healing-{view.number}", partial(wait_aside, works, received, view.board), None)
        self._await_word(view, lambda: bool(received))
        if received[0] is not None:
            raise received[0]
        view.board.post(HEALED.format(view.rank), b"")
        self._await_word(view, lambda: PROGRESS in view.board.values)
        return healed, Progress(*map(int, view.board.values[PROGRESS].split()))

    @staticmethod
    def _warn_of_diverged(view: View, verdict: Verdict) -> None:
        if verdict.diverged:
            members = ", ".join(str(view.members[rank]) for rank in verdict.diverged)
            warnings.warn(
                f"gradwire: replicas {members} had other bits than replica {view.members[verdict.donors[0]]} after "
                f"round {verdict.name[1]}, and take its state: look for faulty memory, or for something else than this "
                "LocalUpdates that writes to the global parameters",
                stacklevel=1,
            )
