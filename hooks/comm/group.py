"""A group of ranks, and its collectives."""

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

from ...compress.backends import ScratchPool
from .bruck_gather import Dissemination
from .coded_message import CodedMessage
from .linger import linger, linger_with
from .ports import (
    NAMED,
    Channels,
    Collective,
    Messages,
    PaddedGather,
    PersistentMessage,
    PointToPoint,
    Port,
    Traffic,
    VariableMessage,
    Work,
)
from .rendezvous import HANDSHAKE_TIMEOUT, connect, timeout_of, unique_store

#: The most ranks that send a few bytes to each other directly. With more, Bruck's all-gather takes less processor time:
#: with an all-gather of 4 KB, 2.1 ms a rank instead of 2.7 among 24 ranks, 2.6 instead of 3.7 among 32, and 0.9 either
#: way among 8 (`small_gather_port` with this limit and with 1000, in turns; Gloo, forked ranks on two cores).
DIRECT_RANKS = 16

#: A tag that no message has.
NEVER_SENT = 0x7FFFFFFF

_groups: weakref.WeakSet[Group] = weakref.WeakSet()
#: The channels of each process group.
_channels: weakref.WeakKeyDictionary[Any, Channels] = weakref.WeakKeyDictionary()
#: The traffic on the connections of each process group.
_traffic: weakref.WeakKeyDictionary[Any, Traffic] = weakref.WeakKeyDictionary()


class Group(PointToPoint):
    """The collectives of one process group, for one thread at a time.

    Args:
        process_group: carries them. Its own methods are called, so that neither torch's renaming of functions nor its
            registry of groups matters here.
        ranks: the global ranks, if that registry does not know the group.

    `Work.wait` blocks the thread on Gloo; on NCCL it only makes the current stream wait.
    """

    #: Others than its owner may have collectives of the process group in flight, so its owner must not start any.
    shared = False
    #: Exchanges between hosts code their messages by zstandard.
    entropy_coding = False

    def __init__(self, process_group: Any, ranks: Sequence[int] | None = None) -> None:
        self._group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._ranks = ranks
        #: Of point-to-point messages; None: the process group's.
        self.timeout: timedelta | None = None
        self._tag = 0
        self._launches: bool | None = None
        #: Memory that exchanges of several buckets share.
        self.scratch = ScratchPool()
        self._channels = _channels.setdefault(process_group, Channels(NEVER_SENT - NAMED))
        self.traffic = _traffic.setdefault(process_group, Traffic())
        _groups.add(self)

    def channel(self, name: str) -> Group:
        """The same ranks and connections, with tags of its own. Messages arrive in order at ranks that have made a
        channel of this name equally often.

        Its collectives of CPU tensors may overlap with others in any order, except `all_reduce`.
        """
        twin = copy.copy(self)
        twin._tag = NAMED + self._channels.tag(f"{self._tag}/{name}")
        _groups.add(twin)  # it may outlive the one that it was made of
        return twin

    @property
    def generation(self) -> Any:
        """The object whose life is the validity of rank numbers: the default group, or without one the process group.
        Caches by rank refer to it weakly."""
        default = dist.group.WORLD
        return self._group if default is None else default

    @classmethod
    def of_ranks(cls, ranks: list[int], timeout: timedelta | None = None) -> Group:
        """A new Gloo group of these global ranks. A collective; ranks wait `timeout` for each other, or
        `HANDSHAKE_TIMEOUT`.

        `dist.new_group(use_local_synchronization=True)` derives its name from the number of groups a rank is in, which
        differs between ranks of different groups, and repeats when a group is destroyed. Here the name counts the
        groups made of the same ranks, in the store and for each rank: a process that outlives its default group starts
        again with the next one's store, and a process that its store outlives is continued by the next one.
        """
        members, rank = tuple(ranks), dist.get_rank()
        with unique_store(members, rank) as store:
            return cls(connect(store, members, rank, timeout or HANDSHAKE_TIMEOUT), members)

    @staticmethod
    def blocks(process_group: Any, device: torch.device) -> bool:
        """True if collectives on tensors of `device` block the calling thread. Backends that launch several at once
        order them by streams, as NCCL under any name. Warns of others except Gloo."""
        if device.type != "cuda":
            return True
        backend = _backend_of(process_group, device)
        # A torch that does not tell has one such backend, by one name.
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

    def launches(self, device: torch.device) -> bool:
        """True if collectives on tensors of `device` are launched, as NCCL's, and the thread goes on. Such backends
        compute means, too: they multiply by 1/size on reading."""
        if device.type != "cuda":
            return False
        if self._launches is None:
            self._launches = not self.blocks(self._group, device)
        return self._launches

    def follow_timeout(self, other: dist.ProcessGroup) -> None:
        """Take over the timeout of `other`."""
        timeout = timeout_of(other)
        if timeout is not None:
            with contextlib.suppress(RuntimeError, AttributeError):
                self.wait_at_most(timeout)

    def wait_at_most(self, timeout: timedelta) -> None:
        """Wait no longer than `timeout` for other ranks, in groups made of this one later on, too."""
        self._group._set_default_timeout(timeout)
        self.timeout = timeout  # that of single messages is fixed when a group is made

    def gather_output(
        self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Memory for the result of an all-gather, which is the same on every rank."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def all_gather(self, output: Tensor, row: Tensor) -> Work:
        """Start: `output` = the ranks' rows, end to end."""
        return self.persistent_gather(output, row).start()

    def persistent_gather(self, output: Tensor, row: Tensor, ahead: int = 2, coded: bool = False) -> Port:
        """An all-gather of this row into this memory, for many starts.

        Args:
            ahead: as for `PersistentMessage`.
            coded: messages of bytes between hosts go through an entropy coder.
        """
        if row.is_cuda:
            return Collective(lambda: self._group._allgather_base(output.view(-1), row))
        return self._message(output.view(-1).chunk(self.size), [row.view(-1)] * self.size, ahead, coded)

    def small_all_gather(self, output: Tensor, row: Tensor) -> Work:
        """Start: as `all_gather`, for a few bytes. With more than `DIRECT_RANKS` a rank sends ⌈log2 size⌉ messages,
        most of them while it waits: wait for several in the order in which they were started."""
        if row.is_cuda or self.size <= DIRECT_RANKS:
            return self.all_gather(output, row)

        def start(move: Any, rows: Tensor, peer: int) -> Work:
            return Messages([(peer, self.with_peer_context(peer, move, [rows], peer, self._tag))], self, self.timeout)

        rows = output.view(self.size, row.numel())
        return Dissemination(
            rows, row.view(-1), self.rank, partial(start, self._group.send), partial(start, self._group.recv)
        )

    def small_gather_port(self, output: Tensor, row: Tensor) -> Port:
        """A `small_all_gather` of this row into this memory, for many starts."""
        if self.size <= DIRECT_RANKS:
            return self.persistent_gather(output, row)
        return Collective(lambda: self.small_all_gather(output, row))

    def all_gather_v(self, output: Tensor, row: Tensor, sizes: Sequence[int]) -> Work:
        """Start: `output` = the ranks' rows, end to end, `sizes[r]` elements from rank r.

        NCCL lacks it: there all rows are padded to the longest, so that each still enters a node once.
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

    def persistent_swap(self, output: Tensor, rows: Tensor, ahead: int = 2, coded: bool = False) -> Port:
        """An all-to-all of these rows into this memory, for many starts. Arguments as for `persistent_gather`."""
        if rows.is_cuda:
            return Collective(lambda: self._group.alltoall_base(output.view(-1), rows.view(-1), [], []))
        return self._message(output.view(-1).chunk(self.size), rows.view(-1).chunk(self.size), ahead, coded)

    def _message(self, received: Sequence[Tensor], sent: Sequence[Tensor], ahead: int, coded: bool) -> Port:
        if coded and self.size > 1:
            return CodedMessage(self, received, sent)
        return PersistentMessage(self, received, sent, ahead)

    def all_to_all_v(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        """Start: as `all_to_all` for rows of different lengths: `sent[r]` elements go to rank r, `received[r]` come."""
        if rows.is_cuda:
            work: Work = self._group.alltoall_base(output, rows, list(received), list(sent))
            return work
        return self.pairwise(output.split(list(received)), rows.split(list(sent)))

    def variable_message(self, longest: int) -> VariableMessage:
        """Messages between hosts of at most `longest` bytes, mostly fewer."""
        return VariableMessage(self, longest)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """On an error, abort the group on every rank, as the others may wait for messages that this one gave up."""
        try:
            yield
        except RuntimeError:
            self.abort()
            raise

    def hold_unfinished(self, owner: object) -> None:
        """When `owner` is collected in the middle of a step, let its sent data arrive before connections close."""
        weakref.finalize(owner, _linger_unfinished, self.traffic, self._group).atexit = False

    def abort(self) -> None:
        """End every wait for another rank by an error, on all ranks, if Gloo carries the group.

        Gloo has no other way from outside of the wait: a receive that times out makes it close all connections of the
        group. Data that this rank has sent before arrives first.
        """
        linger()
        self.cut()

    def cut(self) -> None:
        """`abort` at once: data that this rank has sent before may not arrive."""
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

    def mean(self, tensor: Tensor) -> dist.Work:
        """Start: `tensor` = mean over the ranks, multiplied by 1/size and then summed in the backend's order."""
        start, share = self.means(tensor.device)
        return start([tensor if share is None else tensor.mul_(share)])

    def means(self, device: torch.device) -> tuple[Callable[[list[Tensor]], dist.Work], float | None]:
        """A function that starts the mean of tensors of this device, without torch's path from group to backend, and
        the factor to multiply them by beforehand, if any."""
        backend = _backend_of(self._group, device)
        if self.launches(device):
            options = _averaging(dist.AllreduceOptions())
            return lambda tensors: backend.allreduce(tensors, options), None
        return backend.allreduce, 1.0 / self.size

    def mean_of_rows(self, output: Tensor, rows: Tensor) -> Work:
        """Start: `output` = mean over the ranks of row `rank` of `rows`, where the backend `launches`."""
        work: Work = self._group._reduce_scatter_base(output, rows, _averaging(dist.ReduceScatterOptions()))
        return work

    def sum(self, tensor: Tensor, pieces: Tensor) -> Generator[Work, None, None]:
        """Stages: `tensor` = sum over the ranks, in their order, by messages alone (a reduce-scatter and an
        all-gather).

        Args:
            tensor: flat.
            pieces: scratch memory of its dtype, at least `size` elements longer.
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
            pieces: scratch memory of their dtype, at least `size` times as long as `output`.
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
        """Each rank's value, in rank order: anything that JSON can carry. It travels on `device`.

        Ranks exchange digests first. If these differ, the first rank with each text sends it. Equal values cost 24
        bytes a rank, and become one object.
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
    """The backend for tensors of this device: a process group's, or one that is used by itself."""
    return process_group._get_backend(device) if hasattr(process_group, "_get_backend") else process_group


def _averaging(options: Any) -> Any:
    """Set a collective's options to means."""
    options.reduceOp = dist.ReduceOp.AVG
    return options


def _linger_unfinished(traffic: Traffic, process_group: Any) -> None:
    if traffic.unfinished:
        linger_with(process_group)


def abort_all() -> None:
    """Abort all groups, in a process that ends while a thread waits for another rank."""
    linger()
    for group in {id(group._group): group for group in list(_groups)}.values():  # of its channels, one serves for all
        group.cut()
