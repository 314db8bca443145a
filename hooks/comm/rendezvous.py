"""The meeting of a new group's ranks, and the Gloo group that connects them.

A Gloo group holds a socket to every rank, and three threads. States of the same ranks do not share one: that would save
its sockets and some 20 ms of a further state's construction, and nothing of a step.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..timeouts import HANDSHAKE_TIMEOUT, VERDICT_TIMEOUT

#: Attempts to connect.
ATTEMPTS = 3
READY = b"ready"
#: The key that marks a place where a rank has given up waiting for the others.
LEFT = "left"


@contextlib.contextmanager
def unique_store(members: Sequence[int], rank: int) -> Iterator[dist.Store]:
    """A store in which these ranks meet for the first time. Each rank counts its meetings by itself. If one fails, its
    place is marked as left, for late ranks too, or the ranks' counts would differ for good."""
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
    """A Gloo group. On busy machines a rank may lose a connection while the group is made, which the others do not
    notice. So each rank reports whether it is ready, and all try again if one is not.

    Raises:
        RuntimeError: a rank did not arrive, or every attempt failed.
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
            raise error or missing from None
        verdicts = place.multi_get(keys)
        if group is not None and all(verdict == READY for verdict in verdicts):
            return group
    failures = {members[i]: verdict.decode() for i, verdict in enumerate(verdicts) if verdict != READY}
    raise RuntimeError(f"ranks {list(members)} could not connect in {ATTEMPTS} attempts: {failures}")


def _connected(place: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(place, rank, size, timeout)


def timeout_of(process_group: Any) -> timedelta | None:
    """The timeout of a group's collectives; None: its backend does not tell."""
    try:
        timeout: timedelta = process_group._get_backend(process_group._device_types[0]).options._timeout
    except (RuntimeError, AttributeError, IndexError):
        return None
    return timeout


def meeting_timeout(process_group: Any) -> timedelta:
    """The time that ranks wait for each other when a state is made: the group's timeout, if the user has set it and it
    is longer than `HANDSHAKE_TIMEOUT`; else that. PyTorch's default of half an hour is too long to wait for a
    rank that never comes."""
    timeout = timeout_of(process_group)
    defaults = (getattr(dist.constants, name, None) for name in ("default_pg_timeout", "default_pg_nccl_timeout"))
    return HANDSHAKE_TIMEOUT if timeout is None or timeout in defaults else max(timeout, HANDSHAKE_TIMEOUT)
