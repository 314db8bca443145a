"""The ranks that exchange with each other, and the collectives they use."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

#: How long ranks wait for each other when a state is made.
HANDSHAKE_TIMEOUT = timedelta(seconds=60)

#: Bytes that an all-gather may return and still be sent all at once, from each rank to each.
SMALL_GATHER = 1 << 20


#: A tag that no message has before two thousand million others.
NEVER_SENT = 0x7FFFFFFF

_groups: weakref.WeakSet[Group] = weakref.WeakSet()


class Work(Protocol):
    """Something under way, as `dist.Work` is."""

    def wait(self) -> Any: ...


class Messages:
    """Messages between this rank and the others: under way together, and waited for together.

    Where all ranks send and receive at once, each link carries both ways at its full rate; Gloo's own all-to-all and
    all-gather reach that on no more than every other call, and else take up to twice as long.
    """

    def __init__(self, works: Iterable[tuple[int, dist.Work]], group: Group, timeout: timedelta | None) -> None:
        self._works, self._group, self._timeout = list(works), group, timeout

    def wait(self) -> None:
        for peer, work in self._works:
            with self._group.naming(peer):
                work.wait() if self._timeout is None else work.wait(self._timeout)


class Group:
    """The collectives of one process group, for one thread at a time.

    Args:
        process_group: what carries them. Its own methods are called, so that neither torch's renaming of functions nor
            its registry of groups matters here.
        ranks: the global ranks, where that registry does not know the group.

    `Work.wait` blocks the thread on Gloo; on NCCL it only makes the current stream wait.
    """

    def __init__(self, process_group: Any, ranks: Sequence[int] | None = None) -> None:
        self._group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self._ranks = ranks
        #: Of single messages, where it is not what the group was made with.
        self.timeout: timedelta | None = None
        self._messages = 0
        _groups.add(self)

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
    def of_ranks(cls, ranks: list[int]) -> Group:
        """A new Gloo group of these global ranks. A collective; ranks wait `HANDSHAKE_TIMEOUT` for each other.

        `dist.new_group(use_local_synchronization=True)` would derive its name from the number of groups a rank is in:
        it differs between ranks that are in different groups, and comes again when a group is destroyed. Here the
        name counts the groups that have been made of the same ranks. The store counts, for each rank: a process that
        outlives its default group then counts from the start with the new ones it meets, and where the store outlives
        the process, the next one goes on where it stopped.
        """
        members, rank = tuple(ranks), dist.get_rank()
        store = dist.PrefixStore(f"gradwire/{'-'.join(map(str, members))}", dist.distributed_c10d._get_default_store())
        store = dist.PrefixStore(str(store.add(f"made by {rank}", 1)), store)
        return cls(dist.ProcessGroupGloo(store, members.index(rank), len(members), HANDSHAKE_TIMEOUT), members)

    @staticmethod
    def blocks(process_group: Any, device: torch.device) -> bool:
        """Whether collectives on tensors of `device` keep the calling thread waiting, as all but NCCL's do."""
        return device.type != "cuda" or process_group._get_backend(device).name() != "nccl"

    def follow_timeout(self, other: dist.ProcessGroup) -> None:
        """From now on let collectives take as long as those of `other` may."""
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend that does not tell
            timeout = other._get_backend(other._device_types[0]).options._timeout
            self._group._set_default_timeout(timeout)
            self.timeout = timeout  # that of single messages is fixed when a group is made

    def gathered(self, *shape: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu") -> Tensor:
        """Memory for what an all-gather returns, which is the same on every rank."""
        return torch.zeros(*shape, dtype=dtype, device=device)

    def all_gather(self, output: Tensor, row: Tensor) -> Work:
        """Start: `output` = the ranks' rows, end to end."""
        if row.is_cuda or row.numel() * row.element_size() * self.size > SMALL_GATHER:
            return self.large_all_gather(output, row)
        return self._direct_all_gather(output, row)

    def large_all_gather(self, output: Tensor, row: Tensor) -> Work:
        """Start: as `all_gather` does it for large rows, whatever the size: round the backend's ring, which takes
        size - 1 latencies, and of which one link alone leaves each node."""
        if self.size == 2 and not row.is_cuda:
            return self._direct_all_gather(output, row)
        work: Work = self._group._allgather_base(output.view(-1), row)
        return work

    def _direct_all_gather(self, output: Tensor, row: Tensor) -> Work:
        return self._pairwise(output.view(-1).chunk(self.size), [row.view(-1)] * self.size)

    def all_gather_v(self, output: Tensor, row: Tensor, sizes: Sequence[int]) -> Work:
        """Start: `output` = the ranks' rows, end to end, `sizes[r]` elements from rank r."""
        if row.is_cuda:
            return self.all_to_all_v(output, row.repeat(self.size), sizes, [row.numel()] * self.size)
        return self._pairwise(output.split(list(sizes)), [row] * self.size)

    def all_to_all(self, output: Tensor, rows: Tensor) -> Work:
        """Start: row r of `rows` goes to rank r; row r of `output` comes from it."""
        if rows.is_cuda:
            work: Work = self._group.alltoall_base(output.view(-1), rows.view(-1), [], [])
            return work
        return self._pairwise(output.view(-1).chunk(self.size), rows.view(-1).chunk(self.size))

    def all_to_all_v(self, output: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]) -> Work:
        """Start: as `all_to_all` for rows of different lengths: `sent[r]` elements go to rank r, `received[r]` come."""
        if rows.is_cuda:
            work: Work = self._group.alltoall_base(output, rows, list(received), list(sent))
            return work
        return self._pairwise(output.split(list(received)), rows.split(list(sent)))

    def _pairwise(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Start: `sent[r]` goes to rank r and `received[r]` comes from it, all at once; what is empty goes nowhere."""
        self._messages += 1  # alike on all ranks, which call the same collectives in the same order
        tag = self._messages & 0x7FFFFFFF
        received[self.rank].copy_(sent[self.rank])
        works = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            if received[source].numel():
                with self.naming(source):
                    works.append((source, self._group.recv([received[source]], source, tag)))
            if sent[target].numel():
                with self.naming(target):
                    works.append((target, self._group.send([sent[target]], target, tag)))
        return Messages(works, self, self.timeout)

    @contextlib.contextmanager
    def naming(self, peer: int) -> Iterator[None]:
        """What goes wrong between this rank and a peer says which that is; Gloo has nothing but its address."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.ranks[peer]} does not answer; what it said last may say why. {error}"
            ) from error

    def cut(self) -> None:
        """End every wait for another rank by an error, here and there, where Gloo carries the group.

        Nothing else in Gloo does that from outside of the wait: a message that does not come in time makes it close all
        connections of a group.
        """
        gloo = self._group
        with contextlib.suppress(RuntimeError, AttributeError):
            gloo = gloo if isinstance(gloo, dist.ProcessGroupGloo) else gloo._get_backend(torch.device("cpu"))
        known = isinstance(gloo, dist.ProcessGroupGloo)
        for peer in range(self.size if known else 0):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    gloo.recv([torch.zeros(1)], peer, NEVER_SENT).wait(timedelta(milliseconds=1))

    def all_reduce(self, tensor: Tensor) -> Work:
        """Start: `tensor` = sum over the ranks, in the backend's order."""
        work: Work = self._group.allreduce([tensor])
        return work

    def objects(self, value: Any, device: torch.device | str = "cpu") -> list[Any]:
        """What each rank passes, in rank order: anything that JSON can carry. It travels on `device`."""
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8).to(device)
        lengths = self.gathered(self.size, dtype=torch.int64, device=device)
        self.all_gather(lengths, torch.tensor([data.numel()]).to(device)).wait()
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: data.numel()] = data
        rows = self.gathered(self.size, longest, device=device)
        self.all_gather(rows, padded).wait()
        return [json.loads(bytes(row[:n])) for row, n in zip(rows.tolist(), lengths.tolist(), strict=True)]


def cut_all() -> None:
    """Cut all groups: for a process that ends and has a thread that waits for another rank."""
    for group in list(_groups):
        group.cut()
