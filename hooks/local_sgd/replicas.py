"""Replicas that come and go, for the thread that trains: before a round, after it, and when it has failed."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from .healing import DueRound, Progress
from .meeting.options import MeetingLost
from .view import Arrival
from .view_changer import PROGRESS, ViewChanger

log = logging.getLogger("gradwire.meeting")

#: Seconds of a wait for a view after which the log says what it waits for.
REPORT_AFTER = 5.0
#: Seconds between looks of a user's thread that waits, at what may end the wait.
LOOK_SECONDS = 0.25
#: A round that has failed here so often in a row, with nobody lost, fails for a reason of its own.
ATTEMPTS = 4


class Replicas(ViewChanger):
    """One replica's tie to the others.

    A replica of several ranks calls all of this on each of them. What changes their shards of the state is done by all
    of them or by none: before it they tell each other a number (`_alike`).
    """

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
