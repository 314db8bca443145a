"""Views, and replicas as they join: the data of the meeting point's decisions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class View:
    """A view that is not void."""

    number: int
    members: tuple[int, ...]
    proposed: float
    connected: set[int] = field(default_factory=set)


@dataclass
class Replica:
    """A living replica, as it joined.

    Attributes:
        token: drawn by its process, as another replica may come with the same number.
        description: options that must be equal.
        heard: time of its last message.
        member: -1 for a newcomer that has no number yet.
        view, members: the view that it was in; 0: none.
        met: it has been in some view.
        seen, following: the largest number of a view, and the smallest unused one of a member, that it knows of.
        told: for what it waits.
    """

    peer: Hashable
    token: str
    description: dict[str, Any]
    heard: float
    member: int
    view: int
    members: tuple[int, ...]
    met: bool
    seen: int
    following: int
    told: str = ""


def parse(peer: Hashable, message: dict[str, Any], now: float) -> Replica:
    """The replica that says this.

    Raises:
        ValueError: no replica says it.
    """
    description, view = take(message, "join", dict), take(message, "view", int)
    for key in ("min_replicas", "wait_for"):
        take(description, key, int)
    member = -1 if message.get("member") is None else take(message, "member", int)
    members, name = tuple(take(message, "members", list)), take(message, "name", list)
    if not all(type(n) is int and n >= 0 for n in (*members, *name)) or len(name) != 2:
        raise ValueError(f"a join with members {members} and name {name}")
    if view and (member not in members or len(set(members)) < len(members)):
        raise ValueError(f"a join of member {member} in view {view} of {members}")
    seen = max(take(message, "seen", int), view)
    following = max(take(message, "next", int), *(number + 1 for number in (member, *members)))
    met = view > 0 or name[0] > 0
    return Replica(peer, take(message, "token", str), description, now, member, view, members, met, seen, following)


def take(message: dict[str, Any], key: str, kind: type[T]) -> T:
    """A value of a message, of its type; numbers are not negative.

    Raises:
        ValueError: it is none.
    """
    value = message.get(key)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{key}={str(value)[:80]}, not a {kind.__name__}")
    return value
