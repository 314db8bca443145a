"""Announcements: a few words of each rank to all others in every step, from host to host."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from ..comm.group import Group
from ..comm.ports import Work


class Announcement:
    """Words that ranks announce once a step. No GPU is waited for.

    Args:
        channel: a channel of the ranks, for these alone.
        width: number of words, of 64 bits each.

    Attributes:
        in_flight: the other ranks' words, after `start`, to be waited for; None before the first one.
    """

    def __init__(self, channel: Group, width: int) -> None:
        self._channel = channel
        mine = torch.zeros(width, dtype=torch.int64, device="cpu")
        self._every = torch.zeros(channel.size, width, dtype=torch.int64, device="cpu")
        self._mine = mine.numpy()  # the same memory: writing to it is faster than through torch
        self._port = channel.small_gather_port(self._every, mine)
        self.in_flight: Work | None = None

    def start(self, *words: int) -> None:
        """Announce words; the remaining ones are 0."""
        self._mine[: len(words)], self._mine[len(words) :] = words, 0
        self.in_flight = self._port.start()

    @property
    def words(self) -> list[list[int]]:
        """All ranks' words, as of the last wait."""
        words: list[list[int]] = self._every.tolist()
        return words

    def post_receives(self) -> None:
        """Post the receives of the next announcement, between two steps."""
        self._port.post_receives()

    @contextmanager
    def within(self, patience: timedelta | None) -> Iterator[None]:
        """Wait for other ranks no longer than `patience`; None: the group's timeout."""
        usual, self._channel.timeout = self._channel.timeout, patience or self._channel.timeout
        try:
            yield
        finally:
            self._channel.timeout = usual


def digest(text: str) -> int:
    """A text as a word; equal texts have equal ones."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
