"""Events that a replica hears of the meeting point."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Welcome:
    """This replica is a member, by this number. It changes only if the meeting point gave the old one to another."""

    member: int


@dataclass(frozen=True)
class Proposed:
    """The members of a view, in order, shall connect to each other; the view in use goes on."""

    number: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """All members of a view have connected: it takes the place of the one in use."""

    number: int


@dataclass(frozen=True)
class Void:
    """A view, proposed or in use, is broken."""

    number: int
    why: str


@dataclass(frozen=True)
class Refused:
    """This replica may not take part. Nothing follows."""

    why: str


@dataclass(frozen=True)
class Waiting:
    """The meeting point waits, as the text says."""

    text: str


@dataclass(frozen=True)
class Lost:
    """The meeting point has been out of reach for longer than `patience`; the search goes on."""

    seconds: float


Event = Welcome | Proposed | Whole | Void | Refused | Waiting | Lost
