"""The ranks that exchange with each other, and the collectives they use."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import struct
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .bruck_gather import Dissemination
from .linger import linger, linger_with
from .ports import Channels, Collective, Messages, PaddedGather, PersistentMessage, Traffic, VariableMessage, Work
from .rendezvous import HANDSHAKE_TIMEOUT, connect, timeout_of, unique_store

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
        self._channels = _channels.setdefault(process_group, Channels(NEVER_SENT - NAMED))
        self.traffic = _traffic.setdefault(process_group, Traffic())
        _groups.add(self)

    @property
    def is_channel(self) -> bool:
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
        with unique_store(members, rank) as store:
            return cls(connect(store, members, rank, timeout or HANDSHAKE_TIMEOUT), members)

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

    def gather_output(
        self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Memory for what an all-gather returns, which is the same on every rank."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def all_gather(self, output: Tensor, row: Tensor) -> Work:
        """Start: `output` = the ranks' rows, end to end."""
        return self.persistent_gather(output, row).start()

    def persistent_gather(self, output: Tensor, row: Tensor, ahead: int = 2) -> PersistentMessage | Collective:
        """For all-gathers of this row, into this memory. `ahead`: as of `PersistentMessage`."""
        if row.is_cuda:
            return Collective(lambda: self._group._allgather_base(output.view(-1), row))
        return PersistentMessage(self, output.view(-1).chunk(self.size), [row.view(-1)] * self.size, ahead)

    def small_all_gather(self, output: Tensor, row: Tensor) -> Work:
        """Start: as `all_gather`, for a few bytes of each rank that are on their way while the rank does other things.
        With more than `DIRECT_RANKS` a rank sends ⌈log2 size⌉ messages; each waits for another, and goes while the rank
        waits, so several under way are waited for in the order in which they were started."""
        if row.is_cuda or self.size <= DIRECT_RANKS:
            return self.all_gather(output, row)

        def start(move: Any, rows: Tensor, peer: int) -> Work:
            return Messages([(peer, self.with_peer_context(peer, move, [rows], peer, self._tag))], self, self.timeout)

        rows = output.view(self.size, row.numel())
        return Dissemination(
            rows, row.view(-1), self.rank, partial(start, self._group.send), partial(start, self._group.recv)
        )

    def small_gather_port(self, output: Tensor, row: Tensor) -> PersistentMessage | Collective:
        """For many of them, with this row, into this memory."""
        if self.size <= DIRECT_RANKS:
            return self.persistent_gather(output, row)
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
            return PaddedGather(self.all_gather(rows, padded), padded, rows, output.split(list(sizes)))
        return self.pairwise(output.split(list(sizes)), [row] * self.size)

    def all_to_all(self, output: Tensor, rows: Tensor) -> Work:
        """Start: row r of `rows` goes to rank r; row r of `output` comes from it."""
        return self.persistent_swap(output, rows).start()

    def persistent_swap(self, output: Tensor, rows: Tensor, ahead: int = 2) -> PersistentMessage | Collective:
        """For all-to-alls of these rows, into this memory. `ahead`: as of `PersistentMessage`."""
        if rows.is_cuda:
            return Collective(lambda: self._group.alltoall_base(output.view(-1), rows.view(-1), [], []))
        return PersistentMessage(self, output.view(-1).chunk(self.size), rows.view(-1).chunk(self.size), ahead)

    def all_to_all_v(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        """Start: as `all_to_all` for rows of different lengths: `sent[r]` elements go to rank r, `received[r]` come."""
        if rows.is_cuda:
            work: Work = self._group.alltoall_base(output, rows, list(received), list(sent))
            return work
        return self.pairwise(output.split(list(received)), rows.split(list(sent)))

    def variable_message(self, longest: int, ahead: int = 2) -> VariableMessage:
        """For messages from host to host that are at most so many bytes long, but seldom are."""
        return VariableMessage(self, longest, ahead)

    def pairwise(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Start: `sent[r]` goes to rank r and `received[r]` comes from it, all at once; what is empty goes nowhere, and
        what is shorter than its place fills its beginning."""
        return self.send(received, sent, self.receive(received))

    def receive(self, received: Sequence[Tensor]) -> list[tuple[int, dist.Work]]:
        works = []
        for distance in range(1, self.size):
            source = (self.rank - distance) % self.size
            if received[source].numel():
                work = self.with_peer_context(source, self._group.recv, [received[source]], source, self._tag)
                works.append((source, work))
        return works

    def send(self, received: Sequence[Tensor], sent: Sequence[Tensor], works: list[tuple[int, dist.Work]]) -> Messages:
        own = sent[self.rank]
        received[self.rank][: len(own)].copy_(own)
        for distance in range(1, self.size):
            target = (self.rank + distance) % self.size
            if sent[target].numel():
                work = self.with_peer_context(target, self._group.send, [sent[target]], target, self._tag)
                works.append((target, work))
        return Messages(works, self, self.timeout)

    def with_peer_context(self, peer: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that concerns a peer, and name its rank in errors, as Gloo names only its address."""
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.ranks[peer]} is not responding: check that rank's log. {error}") from error

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Where messages fail here, they fail on every rank: the others may wait for some that this one gave up."""
        try:
            yield
        except RuntimeError:
            self.abort()
            raise

    def hold_unfinished(self, owner: object) -> None:
        """When `owner` is collected in the middle of a step, let what it has sent arrive before connections close."""
        weakref.finalize(owner, _linger_unfinished, self.traffic, self._group).atexit = False

    def abort(self) -> None:
        """End every wait for another rank by an error, here and there, where Gloo carries the group.

        Nothing else in Gloo does that from outside of the wait: a message that does not come in time makes it close all
        connections of a group. What this rank has sent before arrives first.
        """
        linger()
        self._abort()

    def _abort(self) -> None:
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
        yield self.pairwise(parts, [mine] * self.size)

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], pieces: Tensor) -> Generator[Work, None, None]:
        """Stages: `output` = the sum over the ranks of the parts for this rank, in the ranks' order.

        Args:
            output: flat, may be this rank's part.
            parts: for each rank.
            pieces: of their dtype and `size` times as long as `output`, or longer, to work in.
        """
        rows = list(pieces[: self.size * len(output)].view(self.size, len(output)))
        spare, rows[self.rank] = rows[self.rank], parts[self.rank]
        yield self.pairwise(rows, parts)
        total, *others = rows
        for row in others[:-1]:
            total = torch.add(total, row, out=spare)
        if others:
            torch.add(total, others[-1], out=output)
        else:
            output.copy_(total)

    def all_gather_object(self, value: Any, device: torch.device | str = "cpu") -> list[Any]:
        """What each rank passes, in rank order: anything that JSON can carry. It travels on `device`.

        Ranks tell each other a digest first, and texts only where these differ, each by the first rank that has it:
        where all pass the same, that is one exchange of 24 bytes. What is equal is one object.
        """
        text = json.dumps(value).encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        said = torch.tensor([len(text), *struct.unpack("<2q", digest)], device="cpu").to(device)
        rows = self.gather_output(self.size, len(said), dtype=torch.int64, device=device)
        self.small_all_gather(rows, said).wait()
        rows_by_rank = [tuple(row) for row in rows.tolist()]
        first: dict[tuple[int, ...], int] = {}
        for rank, row in enumerate(rows_by_rank):
            first.setdefault(row, rank)
        if len(first) == 1:
            return [json.loads(text)] * self.size
        sizes = [row[0] if first[row] == rank else 0 for rank, row in enumerate(rows_by_rank)]
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: sizes[self.rank]].to(device)
        texts = self.gather_output(sum(sizes), device=device)
        self.all_gather_v(texts, mine, sizes).wait()
        parts = [json.loads(bytes(part.tolist())) if len(part) else None for part in texts.split(sizes)]
        return [parts[first[row]] for row in rows_by_rank]


def _backend_of(process_group: Any, device: torch.device) -> Any:
    """What carries its tensors of this device: a process group's backend, or a backend that is used by itself."""
    return process_group._get_backend(device) if hasattr(process_group, "_get_backend") else process_group


def _averaging(options: Any) -> Any:
    """Options of a collective that makes means."""
    options.reduceOp = dist.ReduceOp.AVG
    return options


def _linger_unfinished(traffic: Traffic, process_group: Any) -> None:
    if traffic.unfinished:
        linger_with(process_group)


def abort_all() -> None:
    """Cut all groups: for a process that ends and has a thread that waits for another rank."""
    linger()
    for group in {id(group._group): group for group in list(_groups)}.values():  # of its channels, one serves for all
        group._abort()
