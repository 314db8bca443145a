"""Where ranks meet, how Gloo connects them, and connections that several states share.

A Gloo group holds a socket to every other rank, and some threads. What ranks only tell each other are short messages
with tags; so states whose gradients take another group share one, each with a range of tags of its own. Gloo finds the
receiver of a message by its tag, and takes messages of several threads at once, so those of two states never meet.

What they do not have is independence in failure: a message that does not come in time makes Gloo close the whole group.
Ranks that have lost each other in one state have done so in all that share it. So nothing but words is shared: a group
that carries gradients, or collectives (which Gloo counts instead of tagging), belongs to one state.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: How often ranks try to connect, and how long one that has failed waits to hear whether the others are there.
ATTEMPTS, VERDICT_TIMEOUT = 3, timedelta(seconds=10)
READY = b"ready"
#: What a place has where a rank has given up to wait for the others.
LEFT = "left"


#: Tags of one state; the last range, which has tags for special purposes (`group.NEVER_SENT`), belongs to none.
TAGS = 1 << 24
STATES = (1 << 31) // TAGS - 1

#: What ranks can decide: to take the connections that all of them have, to make some, or a group that nobody shares.
REUSE, MAKE, SEPARATE = "reuse", "make", "apart"


@contextlib.contextmanager
def unique_store(members: Sequence[int], rank: int) -> Iterator[dist.Store]:
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
    failures = {members[i]: verdict.decode() for i, verdict in enumerate(verdicts) if verdict != READY}
    raise RuntimeError(f"ranks {list(members)} could not connect in {ATTEMPTS} attempts: {failures}")


def _connected(place: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(place, rank, size, timeout)


class SharedGloo:
    """The connections, for as long as a state uses them.

    Attributes:
        users: states that have a range of tags, those that are gone included: the same on every rank.
        broken: a message has failed here.
    """

    def __init__(self, gloo: Any) -> None:
        self.gloo = gloo
        self.users = 0
        self.broken = False
        #: Messages that nobody has waited for. A message for memory that is gone would stop those behind it.
        self.in_flight: set[Any] = set()

    def usable(self) -> bool:
        return not self.broken and self.users < STATES

    def range(self) -> TagRange:
        self.users += 1
        return TagRange(self, (self.users - 1) * TAGS)


class TagRange:
    """What `Group` needs of a process group for single messages, with the tags from `first` on."""

    #: How many: channels get tags below this, plus `group.NAMED`, a multiple of it.
    tags = TAGS

    def __init__(self, shared: SharedGloo, first: int) -> None:
        self._shared, self._first = shared, first

    @property
    def connections(self) -> SharedGloo:
        """What is common to all ranges."""
        return self._shared

    def rank(self) -> int:
        return int(self._shared.gloo.rank())

    def size(self) -> int:
        return int(self._shared.gloo.size())

    def send(self, tensors: Any, peer: int, tag: int) -> _Message:
        return self._start(self._shared.gloo.send, tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> _Message:
        return self._start(self._shared.gloo.recv, tensors, peer, tag)

    def _start(self, start: Callable[..., Any], tensors: Any, peer: int, tag: int) -> _Message:
        try:
            return _Message(self._shared, start(tensors, peer, self._first + tag % TAGS))
        except RuntimeError:
            self._shared.broken = True
            raise

    def _get_backend(self, device: object) -> Any:
        return self._shared.gloo

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Each message is waited for with a timeout of its own."""


class _Message:
    def __init__(self, shared: SharedGloo, work: Any) -> None:
        self._shared, self._work = shared, work
        shared.in_flight.add(work)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def wait(self, *timeout: timedelta) -> None:
        try:
            self._work.wait(*timeout)
        except RuntimeError:
            self._shared.broken = True
            raise
        finally:
            self._shared.in_flight.discard(self._work)


#: By the global ranks, for as long as these numbers mean the same processes.
_shared_by_members: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[tuple[int, ...], SharedGloo]] = (
    weakref.WeakKeyDictionary()
)


def process_group(
    generation: Any,
    members: Sequence[int],
    rank: int,
    store: dist.Store,
    timeout: timedelta,
    control_only: bool,
    make: Callable[[], Any],
) -> Any:
    """A process group of `members`, or a range of the tags of one. A collective; all ranks get the same kind.

    Which it is, the ranks vote on through `store`: connections may have been lost, or given back, on one of them alone,
    and one of them may have been given other arguments.

    Args:
        generation: what the ranks' numbers refer to.
        members: global ranks.
        rank: this one's place among them.
        store: for this meeting alone.
        timeout: how long ranks wait for each other.
        words_only: whether nothing but words will go there.
        make: a new process group of the members.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    meshes = _shared_by_members.setdefault(generation, weakref.WeakValueDictionary())
    shared = meshes.get(tuple(members))  # held from here on, so that it cannot go after the vote
    verdict = _vote(store, len(members), timeout, control_only, shared is not None and shared.usable())
    if verdict == SEPARATE:
        return make()
    if verdict == MAKE:
        shared = meshes[tuple(members)] = SharedGloo(make())
    assert shared is not None
    return shared.range()


def _vote(store: dist.Store, size: int, timeout: timedelta, control_only: bool, usable: bool) -> str:
    """The ranks' verdict. One counter holds, as digits, how many have come, and who wants what; the last one reads it
    for all."""
    base = size + 1
    vote = base**2 if not control_only else base if not usable else 0
    total = store.add("votes", 1 + vote)
    if total % base == size:
        verdict = SEPARATE if total >= base**2 else MAKE if total >= base else REUSE
        store.set("verdict", verdict)
        return verdict
    store.wait(["verdict"], timeout)
    return store.get("verdict").decode()
