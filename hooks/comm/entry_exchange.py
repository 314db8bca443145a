"""Exchange of entries, the indices and values of sparse gradients: indices travel first, then values.

`EntryExchanger` packs, sends and merges lists of entries. `hooks.sparse` (the public all-reduce) and `hooks.exchanges`
(a model's gradients) build their algorithms on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...compress.backends import entries_for
from ...compress.backends.sparse import Pieces
from ...compress.formats.entries import index_bytes, value_bytes
from .group import Group
from .ports import Stages, WaitAll, Work

#: Samples of all ranks' index lists, which balance owners' ranges.
RANGE_SAMPLES = 1024


def range_samples(indices: Tensor, numel: int, rank: int, world_size: int) -> Tensor:
    """A rank's list as its length and evenly spaced samples, a histogram of equal parts: int32, of one length on all
    ranks."""
    samples = max(4, RANGE_SAMPLES // world_size)
    # The ranks' samples interlock, so that equal lists are cut as finely as all samples together allow.
    place = (torch.arange(samples, device=indices.device).double() + (rank + 0.5) / world_size) / samples
    if len(indices):
        mine = indices[(place * len(indices)).long().clamp_(max=len(indices) - 1)].int()
    else:
        mine = (place * numel).int()
    return torch.cat([mine.new_tensor([len(indices)]), mine])


def bounds_of(samples: Tensor, numel: int) -> list[int]:
    """Owners' ranges, from `range_samples` of all ranks: int32 [P, …]."""
    ranks, each = len(samples), samples.shape[1] - 1
    ordered, order = samples[:, 1:].reshape(-1).sort()
    weights = samples[:, :1].clamp(min=1).long().expand(-1, each).reshape(-1)[order].cumsum(0)
    targets = weights[-1] * torch.arange(1, ranks, device=samples.device) // ranks
    return [0, *ordered[torch.searchsorted(weights, targets)].tolist(), numel]


@dataclass
class Entries:
    """int32 indices, ascending, and float32 values of the same length: a number for each index, or a row of numbers."""

    indices: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, part: slice | Tensor) -> Entries:
        return Entries(self.indices[part], self.values[part])


#: A message in flight: its memory, and its work.
InFlight = tuple[Tensor, Work]


class BufferPool:
    """Buffers by name, kept between uses; they grow, and are never freed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, Tensor] = {}

    def __call__(self, name: str, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            with torch.inference_mode(False):  # memory made in inference mode cannot be written to outside of it
                memory = self._memory[name] = torch.zeros(size + size // 8, dtype=dtype, device=self.device)
        return memory[:size]

    def entries(self, name: str, size: int, row: tuple[int, ...] = ()) -> Entries:
        values = self(f"{name}: values", size * math.prod(row), torch.float32)
        return Entries(self(f"{name}: indices", size, torch.int32), values.view(size, *row))


class EntryExchanger:
    """Moves entries of gradients of `numel` elements between the ranks of a group, in stages (`comm.pipeline`). Results
    lie in buffers that the next call may reuse.

    Args:
        numel: of the gradient, below 2^31.
        dtype: of values on the wire: float32, bfloat16 or int8 (`compress.formats.entries`).
        device: of entries.
        group: the ranks.
        pool: buffers to work in; by default its own.
        row: shape at an index: () for an element, (n,) for a row of n.

    Attributes:
        skipped: invalid entries from other ranks, left out so far.
        received: bytes received from other ranks so far.
        sent: bytes handed to collectives for other ranks so far, each once.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        pool: BufferPool | None = None,
        row: tuple[int, ...] = (),
    ) -> None:
        self.numel, self.dtype, self.device, self.group = numel, dtype, device, group
        self.row, self.width = row, math.prod(row)
        self.rank, self.world_size = group.rank, group.size
        self.kernels = entries_for(device)
        self.pool = pool or BufferPool(device)
        self.skipped = self.received = self.sent = 0

    def merge(self, lists: Entries, offsets: Sequence[int], start: int, stop: int) -> Entries:
        """The sum of the lists in their order, of indices from `start` up to `stop`."""
        if lists.values.dim() > 1:
            return self._merge_rows(lists, offsets, start, stop)
        pool = self.pool.entries("merged", len(lists))
        where = lists.indices, lists.values, offsets, start, stop
        found, skipped = self.kernels.merge(*where, pool.indices, pool.values)
        self.skipped += skipped
        return pool[:found]

    def _merge_rows(self, lists: Entries, offsets: Sequence[int], start: int, stop: int) -> Entries:
        inside = (lists.indices >= start) & (lists.indices < stop)
        union = lists.indices[inside].unique()
        total = self.pool.entries("merged", len(union), self.row)
        total.indices.copy_(union)
        total.values.zero_()
        for a, b in pairwise(offsets):  # within a list no index comes twice, so that nothing depends on an order
            part, used = lists[a:b], inside[a:b]
            if not used.all():  # padding, or invalid indices
                part = part[used]
            at = torch.searchsorted(union, part.indices)
            total.values[at] += part.values  # index_add_'s atomics on a GPU take subnormal numbers for zeros
        self.skipped += len(lists) - int(inside.sum())
        return total

    # -- every rank's entries to every rank ------------------------------------------------------------------------

    def gather(self, entries: Entries, k: int, with_values: bool = True) -> Stages:
        """The sum of all ranks' entries, in rank order, on every rank, as Entries.

        Args:
            k: at least the entries of any rank, the same on all ranks. Shorter lists are padded.
            with_values: False: only indices travel, and the result's values are undefined.
        """
        in_flight = self.start_gather(entries, k, with_values)
        yield WaitAll([work for _, work in in_flight])
        return self.finish_gather(in_flight, k)

    def start_gather(self, entries: Entries, k: int, with_values: bool = True) -> list[InFlight]:
        """Pack a list, and start the all-gathers of its parts."""
        padded = self.pool.entries("padded", k, self.row)
        padded.indices[: len(entries)] = entries.indices
        padded.values[: len(entries)] = entries.values
        padded.values[len(entries) :] = 0
        index_row = self.pool("index row", index_bytes(self.numel, k))
        count = torch.tensor([len(entries)], dtype=torch.int32, device="cpu").to(self.device)
        self.kernels.pack_indices(padded.indices, count, 0, self.numel, index_row)
        in_flight = [self.all_gather(index_row)]
        if with_values:
            value_row = self.pool("value row", value_bytes(k * self.width, self.dtype))
            self.kernels.pack_values(padded.values.view(-1), self.dtype, value_row)
            in_flight.append(self.all_gather(value_row))
        return in_flight

    def finish_gather(self, in_flight: list[InFlight], k: int) -> Entries:
        """Unpack the lists that have arrived, and sum them."""
        ranks, (index_rows, _), *values = self.world_size, *in_flight
        row = self.row if values else ()
        lists, used = self.pool.entries("lists", k * ranks, row), self.pool("used", ranks, torch.int32)
        self.kernels.unpack_indices(index_rows, 0, self.numel, used, lists.indices.view(ranks, k))
        for value_rows, _ in values:
            self.kernels.unpack_values(value_rows, self.dtype, lists.values.view(ranks, k * self.width))
        merged = self.merge(lists, range(0, k * ranks + 1, k), 0, self.numel)
        self.skipped -= k * ranks - int(used.clamp(max=k).sum())  # padding is out of range
        return merged

    def all_gather(self, row: Tensor) -> InFlight:
        """Every rank's row to all."""
        rows = self.group.gather_output(self.world_size, *row.shape, dtype=row.dtype, device=self.device)
        self.count(sent=row.nbytes, received=(self.world_size - 1) * row.nbytes)
        return rows, self.group.all_gather(rows, row)

    def count(self, sent: int, received: int) -> None:
        """Count bytes handed to collectives for other ranks, and received."""
        self.sent += sent if self.world_size > 1 else 0
        self.received += received

    # -- every entry to the owner of its range, and the owners' entries to all ---------------------------------------

    def balanced_bounds(self, indices: Tensor) -> Stages:
        """Stages: bounds of owners' ranges with about equally many entries; owner o has bounds[o] up to bounds[o + 1].
        list[int]."""
        samples = range_samples(indices, self.numel, self.rank, self.world_size)
        if samples.is_cuda:
            # NCCL holds its input only until it is waited for, maybe on another stream.
            samples = self.pool("samples", len(samples), samples.dtype).copy_(samples)
        every, work = self.all_gather(samples)
        yield work
        return bounds_of(every, self.numel)

    def to_owners(self, entries: Entries, bounds: Sequence[int]) -> Stages:
        """Every entry to the owner of its range, who sums them in rank order: the sums of the own range, as Entries.
        Two host reads: how many entries go where, and how many the union has."""
        ranges = [b - a for a, b in pairwise(bounds)]
        start, span = bounds[self.rank], ranges[self.rank]
        edges = torch.tensor(bounds[1:-1], dtype=torch.int32, device="cpu").to(self.device)
        cuts = [0, *torch.searchsorted(entries.indices, edges).tolist(), len(entries)]
        sent = Pieces([b - a for a, b in pairwise(cuts)], bounds[:-1], ranges)
        counts = yield from self._exchange_counts(sent.counts)
        arriving = Pieces(counts, [start] * len(counts), [span] * len(counts))
        lists = self.pool.entries("owned lists", sum(counts), self.row)

        sizes = sent.index_sizes()
        wire = self.pool("index pieces", sum(sizes))
        self.kernels.pack_index_pieces(entries.indices, sent, wire)
        indices, index_work = self._all_to_all("index wire", wire, sizes, arriving.index_sizes())
        sizes = self.value_sizes(sent)
        wire = self.pool("value pieces", sum(sizes))
        self.pack_values(entries, sent, wire)
        arrive = self.value_sizes(arriving)
        values, value_work = self._all_to_all("value wire", wire, sizes, arrive)
        yield WaitAll([index_work, value_work])
        self.kernels.unpack_index_pieces(indices, arriving, lists.indices)
        self.unpack_values(values, arriving, lists)
        return self.merge(lists, list(accumulate(counts, initial=0)), start, start + span)

    def from_owners(self, owned: Entries, counts: Sequence[int], bounds: Sequence[int]) -> Stages:
        """Every owner's entries, end to end, on every rank, as Entries.

        Args:
            counts: of each owner's entries, known to all ranks.
        """
        in_flight = self.start_sharing(owned, counts, bounds)
        yield WaitAll([work for _, work in in_flight])
        return self.finish_sharing(in_flight, counts, bounds)

    def start_sharing(self, owned: Entries, counts: Sequence[int], bounds: Sequence[int]) -> tuple[InFlight, InFlight]:
        """Pack this rank's sums, and start the all-gathers of their parts."""
        rank, every = self.rank, _owners(counts, bounds)
        mine = Pieces(counts[rank : rank + 1], bounds[rank : rank + 1], every.ranges[rank : rank + 1])
        sizes = every.index_sizes()
        piece = self.pool("owned index piece", sizes[rank])
        self.kernels.pack_index_pieces(owned.indices, mine, piece)
        indices = self._all_gather_v(piece, sizes)
        sizes = self.value_sizes(every)
        piece = self.pool("owned value piece", sizes[rank])
        self.pack_values(owned, mine, piece)
        return indices, self._all_gather_v(piece, sizes)

    def finish_sharing(
        self, in_flight: tuple[InFlight, InFlight], counts: Sequence[int], bounds: Sequence[int]
    ) -> Entries:
        """Unpack what has arrived."""
        (indices, _), (values, _) = in_flight
        every, result = _owners(counts, bounds), self.pool.entries("result", sum(counts), self.row)
        self.kernels.unpack_index_pieces(indices, every, result.indices)
        self.unpack_values(values, every, result)
        return result

    def _numbers(self, pieces: Pieces) -> Pieces:
        """The pieces with each row counted as its numbers, as values are packed."""
        return replace(pieces, counts=[count * self.width for count in pieces.counts]) if self.row else pieces

    def value_sizes(self, pieces: Pieces) -> list[int]:
        """Bytes of each piece's values."""
        return self._numbers(pieces).value_sizes(self.dtype)

    def pack_values(self, entries: Entries, pieces: Pieces, wire: Tensor, begins: Sequence[int] | None = None) -> None:
        self.kernels.pack_value_pieces(entries.values.view(-1), self._numbers(pieces), self.dtype, wire, begins)

    def unpack_values(self, wire: Tensor, pieces: Pieces, into: Entries, begins: Sequence[int] | None = None) -> None:
        self.kernels.unpack_value_pieces(wire, self._numbers(pieces), self.dtype, into.values.view(-1), begins)

    # -- whole algorithms ----------------------------------------------------------------------------------------------

    def union(self, entries: Entries, k: int) -> Stages:
        """The sum, as Entries: an all-reduce at the union of all ranks' indices. `k` as in `gather`."""
        union = (yield from self.gather(entries, k, with_values=False)).indices
        total = self.on_union(entries, union)
        yield from self.all_reduce(total.view(-1))
        return Entries(union, total)

    def split(self, entries: Entries, bounds: Sequence[int], scale: float = 1.0) -> Stages:
        """The sum times `scale`, as Entries, by owners of ranges, in rank order."""
        owned = yield from self.to_owners(entries, bounds)
        owned.values.mul_(scale)
        counts = yield from self.all_counts(len(owned))
        return (yield from self.from_owners(owned, counts, bounds))

    def dense(self, entries: Entries) -> Stages:
        """The sum as a vector of all elements: float32 [numel, …]; -0.0 exactly where no rank has an entry, as only the
        sum of -0.0 alone is -0.0."""
        flat = self.pool("dense", self.numel * self.width, torch.float32).fill_(-0.0)
        every = flat.view(self.numel, *self.row)
        every[entries.indices.long()] = entries.values + 0.0
        if self.group.is_channel:  # collectives have no channels and need an order
            yield from self.all_reduce(flat)
        else:
            yield self.group.all_reduce(flat)
            self.count_all_reduce(flat)
        return every

    def all_counts(self, count: int) -> Stages:
        """Stages: every rank's count, in rank order: list[int]."""
        rows, work = self.all_gather(torch.tensor([count], dtype=torch.int32, device="cpu").to(self.device))
        yield work
        counts: list[int] = rows.view(-1).tolist()
        return counts

    def on_union(self, entries: Entries, union: Tensor) -> Tensor:
        """The entries' values at the union's indices; 0 without an entry."""
        n, u = len(entries), len(union)
        if self.row:
            rows = self.pool.entries("on union", u, self.row).values.zero_()
            return rows.index_copy_(0, torch.searchsorted(union, entries.indices), entries.values)
        lists = self.pool.entries("union and own", u + n)
        lists.indices[:u], lists.indices[u:] = union, entries.indices
        lists.values[:u] = 0
        lists.values[u:] = entries.values
        where = lists.indices, lists.values, (0, u, u + n), 0, self.numel
        pool = self.pool.entries("on union", u + n)
        found, _ = self.kernels.merge(*where, pool.indices, pool.values)
        return pool.values[:found]

    def _exchange_counts(self, counts: Sequence[int]) -> Stages:
        mine = torch.tensor(counts, dtype=torch.int32, device="cpu").to(self.device)
        theirs = torch.empty_like(mine)
        yield self.group.all_to_all(theirs, mine)
        others = 4 * (self.world_size - 1)
        self.count(others, others)
        arriving: list[int] = theirs.tolist()
        return arriving

    def _all_to_all(self, name: str, wire: Tensor, sent: list[int], received: list[int]) -> InFlight:
        into = self.pool(name, sum(received))
        work = self.group.all_to_all_v(into, wire, received, sent)
        self.count(sum(sent) - sent[self.rank], sum(received) - received[self.rank])
        return into, work

    def _all_gather_v(self, piece: Tensor, sizes: list[int]) -> InFlight:
        wire = self.group.gather_output(sum(sizes), device=self.device)
        work = self.group.all_gather_v(wire, piece, sizes)
        self.count(sizes[self.rank], sum(sizes) - sizes[self.rank])
        return wire, work

    def all_reduce(self, tensor: Tensor) -> Stages:
        """Stages: `tensor`, flat, = its sum over the ranks, in their order; over NCCL in the backend's."""
        pieces = self.pool(f"pieces {tensor.dtype}", tensor.numel() + self.world_size, tensor.dtype)
        yield from self.group.sum(tensor, pieces)
        self.count_all_reduce(tensor)

    def count_all_reduce(self, tensor: Tensor) -> None:
        """Count an all-reduce of this tensor."""
        self.count(tensor.nbytes, 2 * tensor.nbytes * (self.world_size - 1) // self.world_size)


def used(every: Tensor) -> Entries:
    """The entries that some rank has, zeros included, of a result of `EntryExchanger.dense`."""
    some = ~(every.signbit() & (every == 0))
    place = (some.any(1) if some.dim() > 1 else some).nonzero().view(-1)
    return Entries(place.int(), every[place])


def fill(out: Tensor, result: Entries) -> Tensor:
    """Write entries to a dense vector, zero elsewhere."""
    out.zero_()
    out[result.indices.to(out.device).long()] = result.values.to(out.device, out.dtype)
    return out


def _owners(counts: Sequence[int], bounds: Sequence[int]) -> Pieces:
    return Pieces(counts, bounds[:-1], [b - a for a, b in pairwise(bounds)])
