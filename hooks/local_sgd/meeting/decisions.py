"""Decisions of the meeting point, without sockets and without a clock.

A *view* is a number and the members, in order. It is *proposed*, *whole* once all its members have connected to each
other, in *use* from then on, and *void* once one of them is lost or cannot use it. At most one view is in use, and at
most one more is proposed. Only the members know what a meeting point decided before it was started again; until they
are back, or `dead_after` seconds have passed, it decides nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ...comm.handshake import difference
from ...timeouts import DEAD_SECONDS, MESH_SECONDS
from .replica import Replica, View, parse, take

#: Seconds from a failure to the next proposal, as the news of a death may be just behind it; doubled by each failure
#: in a row.
FAILURE_GRACE, LONGEST_GRACE = 0.1, 3.2
#: Failures in a row after which a newcomer is refused.
STRIKES = 3
#: Numbers left out after a restart: the meeting point before may have given some that nobody who is back has heard of.
GAP = 1000


class Membership:
    """Members and views.

    Args:
        now: time in seconds, of any clock, as in all methods.
        dead_after: seconds of silence after which a replica is lost.
        grace: seconds from a newcomer to a proposal, for others that come at the same time.
        connect_seconds: time for the members of a proposal to connect.

    Attributes:
        outbox: messages to send; None ends the connection.
        news: a line for each decision.
        used, pending: the view in use, and the one proposed.
    """

    def __init__(
        self, now: float, dead_after: float = DEAD_SECONDS, grace: float = 0.2, connect_seconds: float = MESH_SECONDS
    ) -> None:
        self.dead_after, self.grace, self.connect_seconds = dead_after, grace, connect_seconds
        self.outbox: list[tuple[Hashable, dict[str, Any] | None]] = []
        self.news: list[str] = []
        self.used: View | None = None
        self.pending: View | None = None
        self._replicas: dict[Hashable, Replica] = {}
        self._next = self._last = 0  # member not used yet; largest number of a view
        self._behind = False  # the members know of larger numbers
        self._wanted: float | None = None  # time of the next proposal
        self._recovering: float | None = now + dead_after
        self._spoiled: set[int] = set()  # views that failed before they could be taken up again
        self._forget()

    def _forget(self) -> None:
        """Begin anew with whoever comes next. Numbers go on."""
        self._reference: dict[str, Any] | None = None
        self._order: tuple[int, ...] = ()  # of the view that was last in use
        self._met = False  # some view of this group has been in use
        self._failures = 0  # in a row
        self._one_by_one = False  # several newcomers failed together: which one?
        self._strikes: dict[int, int] = {}
        self._whys: list[str] = []
        self._wanted = None

    @property
    def living(self) -> list[Replica]:
        """Members that have a number, in the order of a proposal."""
        place = {member: i for i, member in enumerate(self._order)}
        numbered = [replica for replica in self._replicas.values() if replica.member >= 0]
        return sorted(numbered, key=lambda replica: (place.get(replica.member, len(place)), replica.member))

    def knows(self, peer: Hashable) -> bool:
        """True for a living replica's peer."""
        return peer in self._replicas

    def said(self, peer: Hashable, message: dict[str, Any], now: float) -> None:
        """Take a message.

        Raises:
            ValueError: it is none that a replica sends; nothing has changed.
        """
        replica = self._replicas.get(peer)
        if "join" in message:
            if replica is not None:
                raise ValueError("a replica that joins twice")
            self._join(parse(peer, message, now), now)
        elif replica is None:
            return  # of one that was lost or refused
        elif "connected" in message:
            self._connected(replica, take(message, "connected", int), now)
        elif "failed" in message:
            self._failed(replica, take(message, "failed", int), take(message, "why", str), now)
        elif "post" in message:
            self._post(replica, message)
        elif "leave" in message:
            self._lose(replica, "has left", now)
        elif "beat" in message:
            self.outbox.append((peer, {"beat": True}))
        elif "entered" not in message:  # which a `Relay` takes
            raise ValueError(f"a message of {sorted(message)}")
        if replica is not None:
            replica.heard = now
        self._decide(now)

    def closed(self, peer: Hashable, now: float, why: str = "its connection ended") -> None:
        """Count a peer as lost, as its connection has ended."""
        if peer in self._replicas:
            self._lose(self._replicas[peer], why, now)
            self._decide(now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for replica in list(self._replicas.values()):
            if now >= replica.heard + self.dead_after:
                self._lose(replica, f"silent for {self.dead_after:g} s", now)
        if self.pending is not None and now >= self.pending.proposed + self.connect_seconds:
            missing = [member for member in self.pending.members if member not in self.pending.connected]
            self._fail(self.pending, f"members {missing} did not connect within {self.connect_seconds:g} s", now)
        self._decide(now)

    def deadline(self, now: float) -> float | None:
        """Time at which `tick` is due; None: not before somebody says something."""
        due = [replica.heard + self.dead_after for replica in self._replicas.values()]
        if self._recovering is not None:
            due.append(self._recovering)
        elif self.pending is not None:
            due.append(self.pending.proposed + self.connect_seconds)
        elif self._wanted is not None and len(self._replicas) >= self._needed():
            due.append(self._wanted)
        return max(now, min(due)) if due else None

    def _join(self, new: Replica, now: float) -> None:
        if self._recovering is None and not self._agrees(new):
            return
        self._behind |= new.seen > self._last or new.following > self._next
        self._last, self._next = max(self._last, new.seen), max(self._next, new.following)
        self._met |= new.met
        if new.member >= 0:
            self._replace(new, now)
        self._replicas[new.peer] = new
        if new.member >= 0:
            self._welcome(new, "is back")
        if self._recovering is not None:
            if new.member < 0:
                self._tell(new, "the meeting point was just started: it waits for the members of an earlier group")
            return
        if new.member < 0:
            self._number(new)
        if new.view and not self._uses(new):
            self._send(new, {"void": new.view, "why": f"member {new.member} was cut off from the meeting point"})
        if self.used is None or new.member not in self.used.members:
            self._want(now + self.grace)

    def _uses(self, replica: Replica) -> bool:
        """True if the view that a replica was in is the one in use."""
        return self.used is not None and self.used.number == replica.view and replica.member in self.used.members

    def _replace(self, new: Replica, now: float) -> None:
        """Look whether a newcomer's number is taken: by its own connection of before, or by another replica."""
        old = next((r for r in self._replicas.values() if r.member == new.member), None)
        if old is None:
            return
        if old.token != new.token:  # a meeting point that knew nothing has given it again
            new.member = -1
            return
        del self._replicas[old.peer]
        self.outbox.append((old.peer, None))
        for view in (self.used, self.pending):
            if view is not None and new.member in view.members and view.number != new.view:
                self._void(view, f"member {new.member} was cut off from the meeting point")
                self._wanted = now

    def _agrees(self, new: Replica) -> bool:
        """Compare a replica's description with the group's; refuse another one."""
        if self._reference is None:
            self._reference = new.description
        found = difference(self._reference, new.description)
        if found is None:
            return True
        key, ours, theirs = found
        text = f"replicas disagree on {key}: the group has {ours}, this replica has {theirs}. Start all with the same"
        self._refuse(new, f"{text} version, options and model.")
        return False

    def _refuse(self, replica: Replica, text: str) -> None:
        self._send(replica, {"refused": text})
        self.outbox.append((replica.peer, None))
        self.news.append(f"refused {replica.peer}: {text}")

    def _number(self, replica: Replica) -> None:
        """Give a newcomer a number that nobody has had."""
        self._catch_up()
        replica.member, self._next = self._next, self._next + 1
        self._welcome(replica, "has joined")

    def _catch_up(self) -> None:
        if self._behind:
            self._behind, self._next, self._last = False, self._next + GAP, self._last + GAP

    def _welcome(self, replica: Replica, how: str) -> None:
        self._send(replica, {"welcome": replica.member, "next": self._next})
        self.news.append(f"member {replica.member} {how}, from {replica.peer}")

    def _connected(self, replica: Replica, number: int, now: float) -> None:
        view = self.pending
        if view is None or view.number != number or replica.member not in view.members:
            return
        view.connected.add(replica.member)
        if len(view.connected) < len(view.members):
            return
        self.used, self.pending, self._order, self._met = view, None, view.members, True
        self._failures, self._strikes, self._whys = 0, {}, []
        self._send_all(view, {"go": number})
        self.news.append(f"view {number} of {len(view.members)} replicas is in use: members {list(view.members)}")
        if len(view.members) < len(self.living):
            self._want(now)
        else:
            self._one_by_one = False

    def _failed(self, replica: Replica, number: int, why: str, now: float) -> None:
        if self._recovering is not None:
            self._spoiled.add(number)
        for view in (self.used, self.pending):
            if view is not None and view.number == number and replica.member in view.members:
                self._fail(view, f"member {replica.member}: {why}", now)

    def _fail(self, view: View, why: str, now: float) -> None:
        """Void a view that somebody could not use, and try again."""
        proposed = view is self.pending
        self._void(view, why)
        self._wanted = now + min(FAILURE_GRACE * 2.0**self._failures, LONGEST_GRACE)
        if not proposed:
            return
        self._failures += 1
        newcomers = [member for member in view.members if self.used and member not in self.used.members]
        self._whys = [*self._whys, why][-STRIKES:] if newcomers else []
        for member in newcomers:
            self._strikes[member] = self._strikes.get(member, 0) + 1
        if not newcomers or max(self._strikes[member] for member in newcomers) < STRIKES:
            return
        if len(newcomers) > 1:
            self._one_by_one, self._strikes = True, {}
            return
        (member,) = newcomers
        replica = next(replica for replica in self._replicas.values() if replica.member == member)
        text = f"member {member} could not be connected with the others, {STRIKES} times: {'; '.join(self._whys)}."
        self._refuse(replica, f"{text} Replicas need direct connections to each other: set GLOO_SOCKET_IFNAME to the "
                              "interface that joins the hosts, or join them by a VPN.")  # fmt: skip
        self._lose(replica, "was refused", now)
        self._failures, self._strikes, self._whys = 0, {}, []

    def _post(self, replica: Replica, message: dict[str, Any]) -> None:
        number, key, value = (take(message, "post", int), take(message, "key", str), take(message, "value", str))
        for view in (self.used, self.pending):
            if view is not None and view.number == number and replica.member in view.members:
                self._send_all(view, {"post": number, "key": key, "value": value, "from": replica.member})

    def _lose(self, replica: Replica, why: str, now: float) -> None:
        del self._replicas[replica.peer]
        self.outbox.append((replica.peer, None))
        if replica.member >= 0:
            self.news.append(f"member {replica.member} is lost: {why}")
        self._strikes.pop(replica.member, None)
        for view in (self.used, self.pending):
            if view is not None and replica.member in view.members:
                self._void(view, f"member {replica.member} is lost: {why}")
                self._wanted = now
        if not self._replicas:
            self._forget()

    def _void(self, view: View, why: str) -> None:
        if view is self.used:
            self.used = None
        else:
            self.pending = None
        self._send_all(view, {"void": view.number, "why": why})
        self.news.append(f"view {view.number} is void: {why}")

    def _want(self, at: float) -> None:
        self._wanted = at if self._wanted is None else min(self._wanted, at)

    def _needed(self) -> int:
        keys = ("min_replicas",) if self._met else ("min_replicas", "wait_for")
        return max((r.description[key] for r in self._replicas.values() for key in keys), default=1)

    def _decide(self, now: float) -> None:
        """Propose a view, if it is time."""
        if self._recovering is not None and not self._recover(now):
            return
        if self.pending is not None or self._wanted is None or now < self._wanted:
            return
        members = tuple(replica.member for replica in self.living)
        if self.used is not None and set(members) == set(self.used.members):
            self._wanted = None
            return
        needed = self._needed()
        if len(members) < needed:
            for replica in self.living:
                self._tell(replica, f"{len(members)} of at least {needed} replicas are here")
            return
        base = [member for member in members if member in (self.used.members if self.used else self._order)]
        newcomers = sorted(set(members) - set(base))
        if self.used is None and self._failures and len(base) >= needed:
            members = tuple(base)  # they may owe the failure to a newcomer, and have nothing to go on with
        elif self.used is not None and self._one_by_one:
            members = tuple(member for member in members if member in base or member == newcomers[0])
        self._catch_up()
        self._last += 1
        self._wanted = None
        self.pending = View(self._last, members, now)
        self._send_all(self.pending, {"view": self._last, "members": list(members), "next": self._next})
        self.news.append(f"view {self._last} of {len(members)} replicas is proposed: members {list(members)}")
        for replica in self._replicas.values():
            replica.told = ""

    def _recover(self, now: float) -> bool:
        """Take up the view in use before a restart, once all its members are back or nobody else is waited for."""
        latest = max(self.living, key=lambda replica: replica.view, default=None)
        number, members = (latest.view, latest.members) if latest is not None else (0, ())
        back = number > 0 and set(members) <= {replica.member for replica in self.living}
        if self._recovering is not None and now < self._recovering and not back:
            return False
        self._recovering, self._order = None, members
        for replica in [*self.living, *(r for r in self._replicas.values() if r.member < 0)]:
            if not self._agrees(replica):
                del self._replicas[replica.peer]
        there = {replica.member: replica.view for replica in self._replicas.values()}
        if number and number not in self._spoiled and all(there.get(member) == number for member in members):
            self.used = View(number, members, now)
            self.news.append(f"view {number} of {len(members)} replicas is in use still: members {list(members)}")
        missing = [member for member in members if member not in there]
        why = f"members {missing} did not come back" if missing else "its members are not all in it"
        for replica in list(self._replicas.values()):
            if replica.member < 0:
                self._number(replica)
            if replica.view and not self._uses(replica):
                self._send(replica, {"void": replica.view, "why": f"{why} when the meeting point was started again"})
        if self._replicas:
            self._want(now)
        return True

    def _tell(self, replica: Replica, text: str) -> None:
        """Say once for what a replica waits."""
        if replica.told != text:
            replica.told = text
            self._send(replica, {"waiting": text})

    def _send(self, replica: Replica, message: dict[str, Any]) -> None:
        self.outbox.append((replica.peer, message))

    def _send_all(self, view: View, message: dict[str, Any]) -> None:
        """Send to all living members of a view."""
        for replica in self.living:
            if replica.member in view.members:
                self._send(replica, message)
