"""Message tags, one for each channel."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from itertools import count


class Channels:
    """The tags of a process group's channels. Each tag is given once, as receives that were posted ahead outlive their
    channel: Gloo cannot cancel them.

    A tag is a hash of the channel's name and of the number of channels that have had this name, so ranks may make
    channels of different names in different orders. If the tag is taken (probability n/2^30 with n channels), another
    attempt is hashed. That stays alike on all ranks unless they make just these two in another order, which only
    threads within one step can do.

    Args:
        tags: valid tags are 1 up to `tags` - 1.
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
