"""The tags by which messages of one channel are told from those of another."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from itertools import count


class Channels:
    """The tags of a process group's channels, each given once: messages for a channel that is gone may be left, such as
    receives that were announced ahead, which Gloo cannot take back.

    A tag follows from the channel's name and from how many of this name there have been, so the order in which ranks
    make channels of other names does not matter. Where that tag is taken (about n/2^30 of the time, with n of them),
    the next attempt's follows in the same way: alike on all ranks, unless they make just these two in another order,
    which only threads in one step can. An attempt takes the same time however many there have been.

    Args:
        tags: how many there are, from 1 on.
    """

    def __init__(self, tags: int) -> None:
        self._tags = tags
        self._made: Counter[str] = Counter()
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    def tag(self, name: str) -> int:
        """The tag of the next channel of this name."""
        with self._lock:
            self._made[name] += 1
            for attempt in count():
                text = f"{name}/{self._made[name]}/{attempt}"
                digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
                tag = 1 + digest % (self._tags - 1)
                if tag not in self._taken:
                    break
            self._taken.add(tag)
            return tag
