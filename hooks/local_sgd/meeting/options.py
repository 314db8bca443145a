"""The meeting point's address, and how long to wait for it and for others."""

from __future__ import annotations

import os
from dataclasses import dataclass


class MeetingLost(RuntimeError):
    """The meeting point was out of reach for `patience` seconds while it was needed."""


@dataclass(frozen=True)
class Meeting:
    """The meeting point that replicas use, and what they ask of it.

    Args:
        address: host and port of `gradwire-meet`: "head:29400" or "[fd00::2]:29400".
        min_replicas: replicas without which no round takes place.
        wait_for: replicas that the first round waits for; at least `min_replicas`, its default.
        patience: seconds to wait for the meeting point, or for enough replicas, before giving up.
        secret: that `gradwire-meet` was given; by default the environment's GRADWIRE_MEETING_SECRET.
    """

    address: str
    min_replicas: int = 1
    wait_for: int | None = None
    patience: float = 600.0
    secret: str | None = None

    @staticmethod
    def of(meeting: Meeting | str | None) -> Meeting | None:
        """Options from an address, or from the environment's GRADWIRE_MEETING; None if there is neither.

        Raises:
            TypeError, ValueError: as `check`.
        """
        if meeting is None:
            meeting = os.environ.get("GRADWIRE_MEETING") or None
        if isinstance(meeting, str):
            meeting = Meeting(meeting)
        if meeting is None:
            return None
        if not isinstance(meeting, Meeting):
            raise TypeError(f'meeting={meeting!r}: pass an address such as "head:29400", or a Meeting')
        meeting.check()
        return meeting

    def check(self) -> None:
        """Check the values.

        Raises:
            TypeError, ValueError: one of them is none that can be used; the text names it and a remedy.
        """
        place(self.address)
        for name, number in (("min_replicas", self.min_replicas), ("wait_for", self.first)):
            if type(number) is not int:
                raise TypeError(f"{name}={number!r}: pass a number of replicas, an int")
            if number < 1:
                raise ValueError(f"{name}={number}: pass at least 1")
        if self.first < self.min_replicas:
            raise ValueError(f"wait_for={self.wait_for} is less than min_replicas={self.min_replicas}: raise it")
        if not isinstance(self.patience, int | float):
            raise TypeError(f"patience={self.patience!r}: pass seconds")
        if not self.patience > 0:
            raise ValueError(f"patience={self.patience}: pass seconds, more than 0")
        if not isinstance(self.secret, str | None):
            raise TypeError(f"secret is a {type(self.secret).__name__}: pass a str")

    def describe(self) -> dict[str, int]:
        """Values that must be equal for all replicas."""
        return {"min_replicas": self.min_replicas, "wait_for": self.first}

    @property
    def first(self) -> int:
        """Replicas that the first round waits for."""
        return self.min_replicas if self.wait_for is None else self.wait_for

    @property
    def key(self) -> str:
        """The secret, from the environment if it was not passed."""
        return os.environ.get("GRADWIRE_MEETING_SECRET", "") if self.secret is None else self.secret


def place(address: str) -> tuple[str, int]:
    """Host and port of an address.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(address, str):
        raise TypeError(f'address={address!r}: pass the host and port of gradwire-meet, such as "head:29400"')
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f'address={address!r}: pass the host and port of gradwire-meet, such as "head:29400"')
    return host.removeprefix("[").removesuffix("]"), int(port)
