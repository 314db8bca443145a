"""Where ranks meet, and how Gloo connects them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

#: How often ranks try to connect, and how long one that has failed waits to hear whether the others are there.
ATTEMPTS, VERDICT_TIMEOUT = 3, timedelta(seconds=10)
READY = b"ready"
#: What a place has where a rank has given up to wait for the others.
LEFT = "left"


@contextlib.contextmanager
def meeting_place(members: Sequence[int], rank: int) -> Iterator[dist.Store]:
    """Where these ranks meet, and never met before. Ranks count their meetings by themselves: where they do not come
    together the place is left, for those who come late too, or their numbers would differ for good."""
    name = hashlib.blake2b("-".join(map(str, members)).encode(), digest_size=16).hexdigest()
    store = dist.PrefixStore(f"gradwire/{name}", dist.distributed_c10d._get_default_store())
    place = None
    while place is None or place.check([LEFT]):
        place = dist.PrefixStore(str(store.add(f"made by {rank}", 1)), store)
    try:
        yield place
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # the store may be what has failed
            place.set(LEFT, LEFT)
        raise


def connect(store: dist.Store, members: Sequence[int], rank: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A Gloo group. Now and then a rank loses a connection while the group is made, mostly on busy machines, and the
    others do not notice: so each tells whether it is ready, and where one is not they all try again.

    Raises:
        RuntimeError: a rank did not arrive, or they failed again and again.
    """
    own = members.index(rank)
    keys, verdicts = [f"verdict of {i}" for i in range(len(members))], list[bytes]()
    for attempt in range(ATTEMPTS):
        place, group, error = dist.PrefixStore(f"attempt {attempt}", store), None, None
        try:
            group = _connected(place, own, len(members), timeout)
        except RuntimeError as failed:
            error = failed
        place.set(keys[own], READY.decode() if error is None else str(error)[:400])
        try:
            place.wait(keys, timeout if error is None else VERDICT_TIMEOUT)
        except RuntimeError as missing:  # a rank has not arrived
            raise error or missing from missing
        verdicts = place.multi_get(keys)
        if group is not None and all(verdict == READY for verdict in verdicts):
            return group
    told = {members[i]: verdict.decode() for i, verdict in enumerate(verdicts) if verdict != READY}
    raise RuntimeError(f"ranks {list(members)} could not connect in {ATTEMPTS} attempts: {told}")


def _connected(place: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(place, rank, size, timeout)
