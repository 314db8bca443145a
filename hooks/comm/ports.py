"""Messages in flight, persistent messages whose memory is reused, and the tags that tell channels apart."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .send_queue import SendQueue

#: Channels have the tags from here on; other messages are counted below.
NAMED = 1 << 30


class Work(Protocol):
    """An operation in flight, such as `dist.Work`."""

    def wait(self) -> Any: ...


class Port(Protocol):
    """Messages of one stage of an exchange, step after step. Wait for what `start` returns before starting again."""

    @property
    def saved(self) -> tuple[int, int]:
        """Bytes that an entropy coder has saved, of those that the last start sent and received."""

    def start(self) -> Work: ...

    def post_receives(self) -> None: ...


def saved_by(ports: Iterable[Port]) -> tuple[int, int]:
    """Bytes that entropy coders have saved in the last step of these, of those sent and received."""
    sent = received = 0
    for port in ports:
        less_sent, less_received = port.saved
        sent, received = sent + less_sent, received + less_received
    return sent, received


#: The stages of a task: they yield messages in flight, and are resumed when these have arrived.
Stages = Generator[Work, None, Any]


def drive(stages: Stages) -> Any:
    """Run stages to their end on this thread, waiting for each; returns their result."""
    try:
        while True:
            next(stages).wait()
    except StopIteration as end:
        return end.value


class PointToPoint:
    """Messages between the ranks of a group."""

    #: The process group that sends and receives.
    _group: Any
    rank: int
    size: int
    traffic: Traffic
    #: Where messages may have to wait for more urgent ones.
    sends: SendQueue | None = None
    #: Of single messages, where it is not what the group was made with.
    timeout: timedelta | None
    _ranks: Sequence[int] | None
    _tag: int

    @property
    def is_channel(self) -> bool:
        """True for a channel."""
        return self._tag >= NAMED

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks."""
        return tuple(dist.get_process_group_ranks(self._group) if self._ranks is None else self._ranks)

    def pairwise(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Start: `sent[r]` goes to rank r and `received[r]` comes from it, all at once. Empty ones are not sent; a
        message shorter than its place fills the beginning."""
        return self.send(received, sent, self.receive(received))

    def receive(self, received: Sequence[Tensor]) -> list[tuple[int, dist.Work]]:
        works = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            if received[source].numel():
                work = self.with_peer_context(source, self._group.recv, [received[source]], source, self._tag)
                works.append((source, work))
        return works

    def send(
        self,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        works: list[tuple[int, dist.Work]],
        waits: bool = False,
    ) -> Messages:
        """Start to send, after `receive` has returned `works`; `waits`: messages may wait for more urgent ones."""
        own = sent[self.rank]
        received[self.rank][: len(own)].copy_(own)
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        targets = [target for target in others if sent[target].numel()]
        sends = [partial(self.with_peer_context, to, self._group.send, [sent[to]], to, self._tag) for to in targets]
        queue = self.sends if waits else None
        started = [send() for send in sends] if queue is None or not queue.ordered else queue.send(sends)
        return Messages([*works, *zip(targets, started, strict=True)], self, self.timeout)

    def with_peer_context(self, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that concerns a peer, and name its rank in errors, as Gloo names only its address."""
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.ranks[peer]} is not responding: check that rank's log. {error}") from error


class Messages:
    """Messages between this rank and the others, in flight together and waited for together.

    If all ranks send and receive at once, each link carries both directions at its full rate. Gloo's own all-to-all and
    all-gather reach that in at most every other call, and else take up to twice as long.
    """

    def __init__(self, works: Iterable[tuple[int, dist.Work]], group: PointToPoint, timeout: timedelta | None) -> None:
        self._works, self._group, self._timeout = deque(works), group, timeout

    def wait(self) -> None:
        """May be called again, also after an exception of a signal's handler."""
        while self._works:
            peer, work = self._works[0]
            if not work.is_completed():  # Gloo's is completed once somebody has waited for it
                self._group.with_peer_context(peer, work.wait, *(() if self._timeout is None else (self._timeout,)))
            elif not work.is_success():
                raise RuntimeError(f"a message with rank {self._group.ranks[peer]} has failed before")
            self._works.popleft()


class WaitAll:
    """Several works, waited for as one."""

    def __init__(self, works: Iterable[Work]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Traffic:
    """The messages in flight to this rank on one set of connections, and the receives to post once they have arrived.

    A rank may close its connections once it has its own means, while its last messages are in flight. Anything that
    another rank writes to it after that makes TCP reset the connection and drop them. Posting a receive writes to the
    sender, and nobody waits for it: so it must not happen before all messages of the step have arrived.
    """

    def __init__(self) -> None:
        #: A step has begun and not ended.
        self.unfinished = False
        #: Guards posted receives: they may be posted by another thread than the one that uses the message.
        self.lock = threading.RLock()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._due: weakref.WeakSet[PersistentMessage] = weakref.WeakSet()

    def begin(self, owner: Any) -> None:
        """A step's messages are in flight from now on, until `end`, or until the owner is collected."""
        with self.lock:
            self._open.add(owner)
            self.unfinished = True

    def end(self, owner: Any) -> None:
        """All messages of the owner's step have arrived."""
        with self.lock:
            self._open.discard(owner)
            self.unfinished = bool(self._open)
            self._announce()

    def post_receives(self, port: PersistentMessage) -> None:
        """Post the port's next receives, now or when everything in flight has arrived."""
        with self.lock:
            self._due.add(port)
            self._announce()

    def _announce(self) -> None:
        if not self._open:
            while self._due:
                self._due.pop().announce()


class _Uncoded:
    """Messages that no entropy coder shortens."""

    saved = (0, 0)


class PersistentMessage(_Uncoded):
    """Messages of fixed sizes between all ranks, step after step: one stage of an exchange. MPI's term.

    Gloo sends a message once its receiver has posted the receive. `post_receives` posts it ahead, so that the message
    takes one latency instead of two. Receives are posted two steps ahead, because one posted at the end of a step that
    is shorter than a latency comes too late for the next step.

    Args:
        group: a channel, or else receives are posted only when messages are sent.
        received, sent: from each rank and for each rank; empty ones are not sent. `received` is valid after waiting.
        ahead: receives to post ahead. With one, messages arrive in `received` itself, between `post_receives` and the
            end of waiting; else in memory of their own.
    """

    def __init__(self, group: PointToPoint, received: Sequence[Tensor], sent: Sequence[Tensor], ahead: int = 2) -> None:
        self._group, self._received, self._sent = group, received, sent
        apart = ahead > 1 and group.is_channel
        self._free: list[Sequence[Tensor]]
        self._free = [[torch.empty_like(part) for part in received] if apart else received for _ in range(ahead)]
        self._posted: deque[tuple[Sequence[Tensor], list[tuple[int, dist.Work]]]] = deque()

    def post_receives(self) -> None:
        """Post the next receives, once nothing is in flight on these connections. With one ahead, nobody may read
        `received` any more."""
        if self._group.is_channel:
            self._group.traffic.post_receives(self)

    def announce(self) -> None:
        """Post the next receives now. `Traffic` calls it."""
        with contextlib.suppress(RuntimeError):  # a rank has gone, which `start` reports if it matters
            while self._free:
                self._post()

    def _post(self) -> None:
        self._posted.append((self._free[-1], self._group.receive(self._free[-1])))
        self._free.pop()

    def start(self) -> Work:
        """Send, and receive the others' messages of as many starts. Wait before starting again."""
        if not self._group.is_channel:
            return self._group.pairwise(self._received, self._sent)
        with self._group.traffic.lock:
            ahead = bool(self._posted)  # so have the others, also where they never come to this message
            if not ahead:
                self._post()
            place, works = self._posted.popleft()
        return _Arriving(self, place, self._group.send(self._own_place(place), self._sent, works, waits=ahead))

    def _own_place(self, place: Sequence[Tensor]) -> Sequence[Tensor]:
        """Memory for this rank's message to itself, if the others' arrive at `place`."""
        return self._received

    def arrived(self, place: Sequence[Tensor]) -> None:
        """Move messages that have arrived at `place` to `received`."""
        if place is not self._received:
            for source, (part, target) in enumerate(zip(place, self._received, strict=True)):
                if source != self._group.rank:
                    target.copy_(part)
        with self._group.traffic.lock:
            if not any(free is place for free in self._free):
                self._free.append(place)


class VariableMessage(PersistentMessage):
    """A `PersistentMessage` whose length only the sender knows, with room for the longest. Messages stay in place until
    the next ones have been waited for and `post_receives` is called.

    Args:
        longest: bytes.
    """

    def __init__(self, group: PointToPoint, longest: int) -> None:
        # Pages that no message reaches are never touched, and take no memory.
        pool: Any = torch.empty(group.size, longest, dtype=torch.uint8, device="cpu")
        super().__init__(group, pool, pool)
        places: list[Any] = [pool if free is pool else torch.empty_like(pool) for free in self._free]
        self._free = places
        self._any_byte = torch.zeros(1, dtype=torch.uint8, device="cpu")

    @property
    def received(self) -> Tensor:
        """The message of each rank, this one included: a row each, undefined behind its end."""
        received: Any = self._received
        return received

    def send(self, messages: Sequence[Tensor]) -> Work:
        """Start: message r goes to rank r, which may be empty. Leave them unchanged until after waiting."""
        # One of no bytes would not be sent, and be waited for.
        self._sent = [message if message.numel() else self._any_byte for message in messages]
        return self.start()

    def _own_place(self, place: Sequence[Tensor]) -> Sequence[Tensor]:
        return place

    def arrived(self, place: Sequence[Tensor]) -> None:
        with self._group.traffic.lock:
            if place is not self._received:
                if not any(free is self._received for free in self._free):
                    self._free.append(self._received)
                self._received = place


class _Arriving:
    """The messages of one start."""

    def __init__(self, port: PersistentMessage, place: Sequence[Tensor], messages: Work) -> None:
        self._port, self._messages = port, messages
        self._place: Sequence[Tensor] | None = place

    def wait(self) -> None:
        self._messages.wait()
        if self._place is not None:
            self._port.arrived(self._place)
            self._place = None


class Collective(_Uncoded):
    """A collective with the interface of a `PersistentMessage`; it needs no receives."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self.start = start

    def post_receives(self) -> None:
        """Does nothing."""


class PaddedGather:
    """An all-gather of padded rows.

    Args:
        work: the all-gather of `row` into `rows`.
        parts: memory for the rows without padding.
    """

    def __init__(self, work: Work, row: Tensor, rows: Tensor, parts: Sequence[Tensor]) -> None:
        self._work, self._row, self._rows, self._parts = work, row, rows, parts

    def wait(self) -> None:
        """The current stream waits, and copies the rows without padding."""
        self._work.wait()
        # It may differ from the stream that made them, whose allocator would reuse their memory too early.
        for memory in (self._row, self._rows):
            memory.record_stream(torch.cuda.current_stream(memory.device))
        used = [(part, row) for part, row in zip(self._parts, self._rows, strict=True) if part.numel()]
        torch._foreach_copy_([part for part, _ in used], [row[: part.numel()] for part, row in used])


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
