"""The ranks that exchange with each other, and the collectives they use."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import struct
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import shared_gloo as shared
from .bruck_gather import Dissemination
from .channels import Channels
from .linger import linger, linger_with
from .rendezvous import connect, meeting_place

#: How long ranks wait for each other when a state is made, unless the user has given their group longer.
HANDSHAKE_TIMEOUT = timedelta(seconds=60)

#: The most ranks that send a few bytes to each other directly: with more, sending takes longer than some latencies.
DIRECT_RANKS = 16

#: Messages without a name count below this; channels have the tags from here on.
NAMED = 1 << 30
#: A tag that no message has.
NEVER_SENT = 0x7FFFFFFF

_groups: weakref.WeakSet[Group] = weakref.WeakSet()
#: The channels that a process group has had.
_channels: weakref.WeakKeyDictionary[Any, Channels] = weakref.WeakKeyDictionary()
#: What is in flight on the connections of a process group.
_traffic: weakref.WeakKeyDictionary[Any, Traffic] = weakref.WeakKeyDictionary()


class Work(Protocol):
    """Something under way, as `dist.Work` is."""

    def wait(self) -> Any: ...


class Messages:
    """Messages between this rank and the others: under way together, and waited for together.

    Where all ranks send and receive at once, each link carries both ways at its full rate; Gloo's own all-to-all and
    all-gather reach that on no more than every other call, and else take up to twice as long.
    """

    def __init__(self, works: Iterable[tuple[int, dist.Work]], group: Group, timeout: timedelta | None) -> None:
        self._works, self._group, self._timeout = deque(works), group, timeout

    def wait(self) -> None:
        """May be called again, also where a signal's handler has raised in between."""
        while self._works:
            peer, work = self._works[0]
            if not work.is_completed():  # which says whether somebody has waited for it
                self._group.reaching(peer, work.wait, *(() if self._timeout is None else (self._timeout,)))
            elif not work.is_success():
                raise RuntimeError(f"a message with rank {self._group.ranks[peer]} has failed before")
            self._works.popleft()


class Together:
    """Several things under way, waited for as one."""

    def __init__(self, works: Iterable[Work]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Traffic:
    """Messages that others still owe this rank on one set of connections, and the ports to announce once these have
    arrived.

    A rank may close its connections as soon as it has its own means, while its last messages are on their way. Whatever
    another rank writes to it after that makes TCP reset the connection and drop them. Nobody waits for an announcement,
    so the closing rank has not seen that it is still to come: it must not go out before everything has arrived.
    """

    def __init__(self) -> None:
        #: Whether a step has begun and not ended.
        self.unfinished = False
        #: Held where a port's announcements change: the thread that announces need not be the one that uses the port.
        self.lock = threading.RLock()
        self._open: weakref.WeakSet[Any] = weakref.WeakSet()
        self._due: weakref.WeakSet[Port] = weakref.WeakSet()

    def begin(self, owner: Any) -> None:
        """From now on messages of a step are in flight, until its owner says `end`, or is collected."""
        with self.lock:
            self._open.add(owner)
            self.unfinished = True

    def end(self, owner: Any) -> None:
        """All messages of the owner's step have arrived."""
        with self.lock:
            self._open.discard(owner)
            self.unfinished = bool(self._open)
            self._announce()

    def post(self, port: Port) -> None:
        """Announce the port's next messages, now or when everything in flight has arrived."""
        with self.lock:
            self._due.add(port)
            self._announce()

    def _announce(self) -> None:
        if not self._open:
            while self._due:
                self._due.pop().announce()


class Port:
    """Messages between all ranks whose sizes never change, time after time: one stage of an exchange.

    Gloo lets a message go only once its receiver has announced itself. `post` does so ahead, so that the message takes
    one latency and not two: twice ahead, as what is announced at the end of a step that is shorter than a latency comes
    too late for the next one.

    Args:
        group: a channel, or else messages are received only when they are sent.
        received, sent: of each rank and for each rank; what is empty goes nowhere. What arrives is there once it has
            been waited for.
        ahead: how many times to announce ahead. With one, messages arrive in `received` itself, between `post` and the
            end of waiting; else in memory of their own.
    """

    def __init__(self, group: Group, received: Sequence[Tensor], sent: Sequence[Tensor], ahead: int = 2) -> None:
        self._group, self._received, self._sent = group, received, sent
        apart = ahead > 1 and group.named
        self._free: list[Sequence[Tensor]]
        self._free = [[torch.empty_like(part) for part in received] if apart else received for _ in range(ahead)]
        self._posted: deque[tuple[Sequence[Tensor], list[tuple[int, dist.Work]]]] = deque()

    def post(self) -> None:
        """Announce the next messages, once nothing is in flight on these connections. With one ahead, nothing may read
        what the last ones brought any more."""
        if self._group.named:
            self._group.traffic.post(self)

    def announce(self) -> None:
        """Announce the next messages now; `Traffic` calls it."""
        with contextlib.suppress(RuntimeError):  # a rank that has gone, maybe as all is done; `start` would say so
            while self._free:
                self._post()

    def _post(self) -> None:
        self._posted.append((self._free[-1], self._group._receive(self._free[-1])))
        self._free.pop()

    def start(self) -> Work:
        """Send; the messages of the other ranks, of as many starts, arrive meanwhile. Wait for them before the next."""
        if not self._group.named:
            return self._group._pairwise(self._received, self._sent)
        with self._group.traffic.lock:
            if not self._posted:
                self._post()
            place, works = self._posted.popleft()
        return _Arriving(self, place, self._group._send(self._own_place(place), self._sent, works))

    def _own_place(self, place: Sequence[Tensor]) -> Sequence[Tensor]:
        """Where this rank's message to itself goes, if the others' arrive at a place."""
        return self._received

    def arrived(self, place: Sequence[Tensor]) -> None:
        """Messages have arrived at a place, and are moved to where they are wanted."""
        if place is not self._received:
            for source, (part, target) in enumerate(zip(place, self._received, strict=True)):
                if source != self._group.rank:
                    target.copy_(part)
        with self._group.traffic.lock:
            if not any(free is place for free in self._free):
                self._free.append(place)


class LetterPort(Port):
    """Messages between all ranks of which only the sender knows the length: as a `Port`, with room for the longest.
    They lie where they arrive until others have been waited for and `post` is called.

    Args:
        group: as of a port.
        longest: bytes.
    """

    def __init__(self, group: Group, longest: int, ahead: int = 2) -> None:
        # What no message reaches of it is never touched, and so takes no memory.
        room: Any = torch.empty(group.size, longest, dtype=torch.uint8, device="cpu")
        super().__init__(group, room, room, ahead)
        places: list[Any] = [room if free is room else torch.empty_like(room) for free in self._free]
        self._free = places

    @property
    def received(self) -> Tensor:
        """What the ranks have sent, this one too, a row each, with anything behind it."""
        received: Any = self._received
        return received

    def send(self, letters: Sequence[Tensor]) -> Work:
        """Start: letter r goes to rank r. They must be left alone until that has been waited for."""
        self._sent = letters
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
    """Messages that a port receives."""

    def __init__(self, port: Port, place: Sequence[Tensor], messages: Work) -> None:
        self._port, self._messages = port, messages
        self._place: Sequence[Tensor] | None = place

    def wait(self) -> None:
        self._messages.wait()
        if self._place is not None:
            self._port.arrived(self._place)
            self._place = None


class Collective:
    """What a `Port` is, of a collective that needs no announcing."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self.start = start

    def post(self) -> None:
        """Nothing."""


class Padded:
    """An all-gather of rows of which only the beginnings count.

    Args:
        work: it, of `row`, into `rows`.
        parts: where the beginnings are wanted.
    """

    def __init__(self, work: Work, row: Tensor, rows: Tensor, parts: Sequence[Tensor]) -> None:
        self._work, self._row, self._rows, self._parts = work, row, rows, parts

    def wait(self) -> None:
        """The current stream waits, and copies what counts to where it is wanted."""
        self._work.wait()
        # That may be another stream than the one that they were made on, which would use their memory again too early.
        for memory in (self._row, self._rows):
            memory.record_stream(torch.cuda.current_stream(memory.device))
        used = [(part, row) for part, row in zip(self._parts, self._rows, strict=True) if part.numel()]
        torch._foreach_copy_([part for part, _ in used], [row[: part.numel()] for part, row in used])


class Group:
    """The collectives of one process group, for one thread at a time.

    Args:
        process_group: what carries them. Its own methods are called, so that neither torch's renaming of functions nor
            its registry of groups matters here.
        ranks: the global ranks, where that registry does not know the group.

    `Work.wait` blocks the thread on Gloo; on NCCL it only makes the current stream wait.
    """

    #: Whether another than its owner may have collectives of the process group under way, so that it may not.
    shared = False

    def __init__(self, process_group: Any, ranks: Sequence[int] | None = None) -> None:
        self._group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._ranks = ranks
        #: Of single messages, where it is not what the group was made with.
        self.timeout: timedelta | None = None
        self._tag = 0
        self._averages: bool | None = None
        tags = getattr(process_group, "tags", NEVER_SENT - NAMED)
        self._channels = _channels.setdefault(process_group, Channels(tags))
        self.traffic = _traffic.setdefault(getattr(process_group, "connections", process_group), Traffic())
        _groups.add(self)

    @property
    def named(self) -> bool:
        """Whether it is a channel."""
        return self._tag >= NAMED

    def channel(self, name: str) -> Group:
        """The same ranks and connections, for messages that no others are mistaken for: what one rank sends here
        arrives, in this order, at the ranks that have made a channel of this name equally often.

        Of its collectives those of CPU tensors may run beside others, in any order, `all_reduce` excepted.
        """
        twin = copy.copy(self)
        twin._tag = NAMED + self._channels.tag(f"{self._tag}/{name}")
        _groups.add(twin)  # it may outlive the one that it was made of
        return twin

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks."""
        return tuple(dist.get_process_group_ranks(self._group) if self._ranks is None else self._ranks)

    @property
    def generation(self) -> Any:
        """What the ranks' numbers refer to, for as long as they do: the default group, or where there is none the
        process group itself. Whatever is remembered by rank is remembered for this object, weakly."""
        default = dist.group.WORLD
        return self._group if default is None else default

    @classmethod
    def of_ranks(cls, ranks: list[int], timeout: timedelta | None = None) -> Group:
        """A new Gloo group of these global ranks. A collective; ranks wait `timeout` for each other, or
        `HANDSHAKE_TIMEOUT`.

        `dist.new_group(use_local_synchronization=True)` would derive its name from the number of groups a rank is in:
        it differs between ranks that are in different groups, and comes again when a group is destroyed. Here the
        name counts the groups that have been made of the same ranks. The store counts, for each rank: a process that
        outlives its default group then counts from the start with the new ones it meets, and where the store outlives
        the process, the next one goes on where it stopped.
        """
        members, rank = tuple(ranks), dist.get_rank()
        with meeting_place(members, rank) as store:
            return cls(connect(store, members, rank, timeout or HANDSHAKE_TIMEOUT), members)

    @classmethod
    def of_words(cls, ranks: list[int], words_only: bool, timeout: timedelta | None = None) -> Group:
        """As `of_ranks`, for what ranks tell each other. Where on every rank that is short messages and nothing else
        (`words_only`), groups of the same ranks share their connections (`shared`).
        """
        members, rank = tuple(ranks), dist.get_rank()
        world = dist.group.WORLD
        place, timeout = members.index(rank), timeout or HANDSHAKE_TIMEOUT
        with meeting_place(members, rank) as store:
            make = partial(connect, store, members, rank, timeout)
            return cls(shared.carrier(world, members, place, store, timeout, words_only, make), members)

    @staticmethod
    def blocks(process_group: Any, device: torch.device) -> bool:
        """Whether collectives on tensors of `device` keep the calling thread waiting. Those of a backend that launches
        several at once are ordered by streams: NCCL's, by whatever name. Warns of others, Gloo excepted."""
        if device.type != "cuda":
            return True
        backend = _backend_of(process_group, device)
        # Where torch does not tell, it has one of the kind, by one name.
        launches = getattr(backend, "supports_coalescing", None)
        ordered: bool = backend.name() == "nccl" if launches is None else launches
        if not ordered and backend.name() != "gloo":
            warnings.warn(
                f"the backend {backend.name()!r} does not tell (by Backend.supports_coalescing) that streams order its "
                "collectives of CUDA tensors: gradwire waits for them on the host, or sends over Gloo through host "
                'memory, which is slow: make the process group with backend="nccl"',
                stacklevel=3,
            )
        return not ordered

    def follow_timeout(self, other: dist.ProcessGroup) -> None:
        """From now on let collectives take as long as those of `other` may."""
        timeout = timeout_of(other)
        if timeout is not None:
            with contextlib.suppress(RuntimeError, AttributeError):
                self._group._set_default_timeout(timeout)
                self.timeout = timeout  # that of single messages is fixed when a group is made

    def gathered(self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu") -> Tensor:
        """Memory for what an all-gather returns, which is the same on every rank."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def all_gather(self, output: Tensor, row: Tensor) -> Work:
        """Start: `output` = the ranks' rows, end to end."""
        return self.gather_port(output, row).start()

    def gather_port(self, output: Tensor, row: Tensor, ahead: int = 2) -> Port | Collective:
        """For all-gathers of this row, into this memory. `ahead`: as of `Port`."""
        if row.is_cuda:
            return Collective(lambda: self._group._allgather_base(output.view(-1), row))
        return Port(self, output.view(-1).chunk(self.size), [row.view(-1)] * self.size, ahead)

    def small_all_gather(self, output: Tensor, row: Tensor) -> Work:
        """Start: as `all_gather`, for a few bytes of each rank that are on their way while the rank does other things.
        With more than `DIRECT_RANKS` a rank sends ⌈log2 size⌉ messages; each waits for another, and goes while the rank
        waits, so several under way are waited for in the order in which they were started."""
        if row.is_cuda or self.size <= DIRECT_RANKS:
            return self.all_gather(output, row)

        def start(move: Any, rows: Tensor, peer: int) -> Work:
            return Messages([(peer, self.reaching(peer, move, [rows], peer, self._tag))], self, self.timeout)

        rows = output.view(self.size, row.numel())
        return Dissemination(
            rows, row.view(-1), self.rank, partial(start, self._group.send), partial(start, self._group.recv)
        )

    def small_gather_port(self, output: Tensor, row: Tensor) -> Port | Collective:
        """For many of them, with this row, into this memory."""
        if self.size <= DIRECT_RANKS:
            return self.gather_port(output, row)
        return Collective(lambda: self.small_all_gather(output, row))

    def all_gather_v(self, output: Tensor, row: Tensor, sizes: Sequence[int]) -> Work:
        """Start: `output` = the ranks' rows, end to end, `sizes[r]` elements from rank r.

        NCCL has none such: there all rows travel as long as the longest, so that each still enters a node once.
        """
        if row.is_cuda:
            longest = max(sizes)
            if min(sizes) == longest:
                return self.all_gather(output, row)
            rows = row.new_empty(self.size, longest)
            padded = row if row.numel() == longest else torch.nn.functional.pad(row, (0, longest - row.numel()))
            return Padded(self.all_gather(rows, padded), padded, rows, output.split(list(sizes)))
        return self._pairwise(output.split(list(sizes)), [row] * self.size)

    def all_to_all(self, output: Tensor, rows: Tensor) -> Work:
        """Start: row r of `rows` goes to rank r; row r of `output` comes from it."""
        return self.swap_port(output, rows).start()

    def swap_port(self, output: Tensor, rows: Tensor, ahead: int = 2) -> Port | Collective:
        """For all-to-alls of these rows, into this memory. `ahead`: as of `Port`."""
        if rows.is_cuda:
            return Collective(lambda: self._group.alltoall_base(output.view(-1), rows.view(-1), [], []))
        return Port(self, output.view(-1).chunk(self.size), rows.view(-1).chunk(self.size), ahead)

    def all_to_all_v(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        """Start: as `all_to_all` for rows of different lengths: `sent[r]` elements go to rank r, `received[r]` come."""
        if rows.is_cuda:
            work: Work = self._group.alltoall_base(output, rows, list(received), list(sent))
            return work
        return self._pairwise(output.split(list(received)), rows.split(list(sent)))

    def letter_port(self, longest: int, ahead: int = 2) -> LetterPort:
        """For messages from host to host that are at most so many bytes long, but seldom are."""
        return LetterPort(self, longest, ahead)

    def _pairwise(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Start: `sent[r]` goes to rank r and `received[r]` comes from it, all at once; what is empty goes nowhere, and
        what is shorter than its place fills its beginning."""
        return self._send(received, sent, self._receive(received))

    def _receive(self, received: Sequence[Tensor]) -> list[tuple[int, dist.Work]]:
        works = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            if received[source].numel():
                work = self.reaching(source, self._group.recv, [received[source]], source, self._tag)
                works.append((source, work))
        return works

    def _send(self, received: Sequence[Tensor], sent: Sequence[Tensor], works: list[tuple[int, dist.Work]]) -> Messages:
        own = sent[self.rank]
        received[self.rank][: len(own)].copy_(own)
        for distance in range(1, self.size):
            target = (self.rank + distance) % self.size
            if sent[target].numel():
                work = self.reaching(target, self._group.send, [sent[target]], target, self._tag)
                works.append((target, work))
        return Messages(works, self, self.timeout)

    def reaching(self, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call what concerns a peer: what goes wrong says which rank that is; Gloo has nothing but its address."""
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.ranks[peer]} does not answer; what it said last may say why. {error}"
            ) from error

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Where messages fail here, they fail on every rank: the others may wait for some that this one gave up."""
        try:
            yield
        except RuntimeError:
            self.cut()
            raise

    def hold_unfinished(self, owner: object) -> None:
        """When `owner` is collected in the middle of a step, let what it has sent arrive before connections close."""
        weakref.finalize(owner, _linger_unfinished, self.traffic, self._group).atexit = False

    def cut(self) -> None:
        """End every wait for another rank by an error, here and there, where Gloo carries the group.

        Nothing else in Gloo does that from outside of the wait: a message that does not come in time makes it close all
        connections of a group. What this rank has sent before arrives first.
        """
        linger()
        self._cut()

    def _cut(self) -> None:
        gloo = self._group
        with contextlib.suppress(RuntimeError, AttributeError):
            gloo = gloo if isinstance(gloo, dist.ProcessGroupGloo) else gloo._get_backend(torch.device("cpu"))
        known = isinstance(gloo, dist.ProcessGroupGloo)
        for peer in range(self.size if known else 0):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    never = torch.zeros(1, dtype=torch.uint8, device="cpu")
                    gloo.recv([never], peer, NEVER_SENT).wait(timedelta(milliseconds=1))

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start: `tensor` = sum over the ranks, in the backend's order."""
        work: dist.Work = self._group.allreduce([tensor])
        return work

    def averages(self, device: torch.device) -> bool:
        """Whether the backend divides by itself, as those do that are ordered by streams: what a rank gives is
        multiplied by 1/size as it is read."""
        if device.type != "cuda":
            return False
        if self._averages is None:
            self._averages = not self.blocks(self._group, device)
        return self._averages

    def mean(self, tensor: Tensor) -> dist.Work:
        """Start: `tensor`, of floats, = mean over the ranks: multiplied by 1/size, and then the sum in the backend's
        order, as DDP has it."""
        start, share = self.means(tensor.device)
        return start([tensor if share is None else tensor.mul_(share)])

    def means(self, device: torch.device) -> tuple[Callable[[list[Tensor]], dist.Work], float | None]:
        """What starts `mean` of a tensor of this device, without torch's way from a group to its backend, and by what
        the tensor is to be multiplied before, if by anything."""
        backend = _backend_of(self._group, device)
        if self.averages(device):
            options = _averaging(dist.AllreduceOptions())
            return lambda tensors: backend.allreduce(tensors, options), None
        return backend.allreduce, 1.0 / self.size

    def mean_of_rows(self, output: Tensor, rows: Tensor) -> Work:
        """Start: `output` = mean over the ranks of row `rank` of `rows`, where the backend `averages`."""
        work: Work = self._group._reduce_scatter_base(output, rows, _averaging(dist.ReduceScatterOptions()))
        return work

    def sum(self, tensor: Tensor, pieces: Tensor) -> Generator[Work, None, None]:
        """Stages: `tensor` = sum over the ranks, in their order, by messages alone (a reduce-scatter and an
        all-gather).

        Args:
            tensor: flat.
            pieces: of its dtype and `size` elements longer, or more, to work in.
        """
        if tensor.is_cuda:
            yield self.all_reduce(tensor)
            return
        parts = tensor.tensor_split(self.size)
        mine = parts[self.rank]
        yield from self.reduce_scatter(mine, parts, pieces)
        yield self._pairwise(parts, [mine] * self.size)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], pieces: Tensor) -> Generator[Work, None, None]:
        """Stages: `output` = the sum over the ranks of the parts for this rank, in the ranks' order.

        Args:
            output: flat, may be this rank's part.
            parts: for each rank.
            pieces: of their dtype and `size` times as long as `output`, or longer, to work in.
        """
        rows = list(pieces[: self.size * len(output)].view(self.size, len(output)))
        spare, rows[self.rank] = rows[self.rank], parts[self.rank]
        yield self._pairwise(rows, parts)
        total, *others = rows
        for row in others[:-1]:
            total = torch.add(total, row, out=spare)
        if others:
            torch.add(total, others[-1], out=output)
        else:
            output.copy_(total)

    def objects(self, value: Any, device: torch.device | str = "cpu") -> list[Any]:
        """What each rank passes, in rank order: anything that JSON can carry. It travels on `device`.

        Ranks tell each other a digest first, and texts only where these differ, each by the first rank that has it:
        where all pass the same, that is one exchange of 24 bytes. What is equal is one object.
        """
        text = json.dumps(value).encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        said = torch.tensor([len(text), *struct.unpack("<2q", digest)], device="cpu").to(device)
        rows = self.gathered(self.size, len(said), dtype=torch.int64, device=device)
        self.small_all_gather(rows, said).wait()
        told = [tuple(row) for row in rows.tolist()]
        first: dict[tuple[int, ...], int] = {}
        for rank, row in enumerate(told):
            first.setdefault(row, rank)
        if len(first) == 1:
            return [json.loads(text)] * self.size
        sizes = [row[0] if first[row] == rank else 0 for rank, row in enumerate(told)]
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: sizes[self.rank]].to(device)
        texts = self.gathered(sum(sizes), device=device)
        self.all_gather_v(texts, mine, sizes).wait()
        parts = [json.loads(bytes(part.tolist())) if len(part) else None for part in texts.split(sizes)]
        return [parts[first[row]] for row in told]


def _backend_of(process_group: Any, device: torch.device) -> Any:
    """What carries its tensors of this device: a process group's backend, or a backend that is used by itself."""
    return process_group._get_backend(device) if hasattr(process_group, "_get_backend") else process_group


def timeout_of(process_group: Any) -> timedelta | None:
    """How long a group's collectives may take, where its backend tells."""
    try:
        timeout: timedelta = process_group._get_backend(process_group._device_types[0]).options._timeout
    except (RuntimeError, AttributeError, IndexError):
        return None
    return timeout


def meeting_timeout(process_group: Any) -> timedelta:
    """How long ranks of a group wait for each other when a state is made: as long as the group allows, where the user
    has set that and it is longer than usual. PyTorch's own default is half an hour, which nobody should wait for a rank
    that never comes."""
    timeout = timeout_of(process_group)
    defaults = (getattr(dist.constants, name, None) for name in ("default_pg_timeout", "default_pg_nccl_timeout"))
    return HANDSHAKE_TIMEOUT if timeout is None or timeout in defaults else max(timeout, HANDSHAKE_TIMEOUT)


def _averaging(options: Any) -> Any:
    """Options of a collective that makes means."""
    options.reduceOp = dist.ReduceOp.AVG
    return options


def _linger_unfinished(traffic: Traffic, process_group: Any) -> None:
    if traffic.unfinished:
        linger_with(process_group)


def cut_all() -> None:
    """Cut all groups: for a process that ends and has a thread that waits for another rank."""
    linger()
    for group in {id(group._group): group for group in list(_groups)}.values():  # of its channels, one serves for all
        group._cut()
