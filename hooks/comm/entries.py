"""Entries, the indices and values of sparse gradients, on their way between ranks: indices first, then values.

`Carrier` packs, sends and merges lists of entries. The algorithms made of it are in `hooks.sparse` (the public
all-reduce) and `hooks.exchanges` (a model's gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...compress.backends import entries_for
from ...compress.backends.sparse import Pieces
from ...compress.entries import index_bytes, value_bytes
from .group import Group, Together, Work
from .pipeline import Stages

#: Samples of the index lists that balance owners' ranges, over all ranks.
RANGE_SAMPLES = 1024
#: Of a magnitude's 31 bits the cut looks at the highest 21: 11 at first, then 10 more.
KEY_BITS, KEPT_BITS, COARSE_BITS = 31, 21, 11
BINS = 1 << COARSE_BITS
#: What an owner tells the others of its sums: how many lie below a window, in each bin, and above.
CENSUS_BYTES = 4 * (BINS + 2)
#: How much of that may arrive from all owners together.
SHARED_CENSUS_BYTES = 1 << 20


def census_is_shared(k: int, world_size: int) -> bool:
    """Whether every owner hears each other's census, in one round, rather than their sum, in two: where that is little
    beside the entries themselves."""
    return CENSUS_BYTES * world_size <= min(SHARED_CENSUS_BYTES, 4 * k)


def range_samples(indices: Tensor, numel: int, rank: int, world_size: int) -> Tensor:
    """How long a rank's list is, and evenly spaced samples of it: a histogram of equal parts. int32, as long on all
    ranks."""
    samples = max(4, RANGE_SAMPLES // world_size)
    # The ranks' samples interlock, so that lists that are alike are cut as finely as all samples together.
    place = (torch.arange(samples, device=indices.device).double() + (rank + 0.5) / world_size) / samples
    if len(indices):
        mine = indices[(place * len(indices)).long().clamp_(max=len(indices) - 1)].int()
    else:
        mine = (place * numel).int()
    return torch.cat([mine.new_tensor([len(indices)]), mine])


def bounds_of(samples: Tensor, numel: int) -> list[int]:
    """Owners' ranges, from what `range_samples` gives on each rank: int32 [P, …]."""
    ranks, each = len(samples), samples.shape[1] - 1
    ordered, order = samples[:, 1:].reshape(-1).sort()
    weights = samples[:, :1].clamp(min=1).long().expand(-1, each).reshape(-1)[order].cumsum(0)
    targets = weights[-1] * torch.arange(1, ranks, device=samples.device) // ranks
    return [0, *ordered[torch.searchsorted(weights, targets)].tolist(), numel]


@dataclass
class Entries:
    """int32 indices, ascending, and float32 values of the same length."""

    indices: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, part: slice | Tensor) -> Entries:
        return Entries(self.indices[part], self.values[part])


#: What is on its way: where it arrives, and what to wait for.
Moving = tuple[Tensor, Work]


class Room:
    """Memory by name, kept from one use to the next; it grows, and is never given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, Tensor] = {}

    def __call__(self, name: str, size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            with torch.inference_mode(False):  # what is made in inference mode cannot be written to outside
                memory = self._memory[name] = torch.zeros(size + size // 8, dtype=dtype, device=self.device)
        return memory[:size]

    def entries(self, name: str, size: int) -> Entries:
        return Entries(self(f"{name}: indices", size, torch.int32), self(f"{name}: values", size, torch.float32))


class Carrier:
    """Moves entries of gradients of `numel` elements between the ranks of a group, in stages: generators that yield
    what is under way (`comm.pipeline`). What they return lies in memory that the next one may use again.

    Args:
        numel: of the gradient, below 2^31.
        dtype: how values travel: float32, bfloat16 or int8 (`compress.entries`).
        device: where entries are.
        group: the ranks.
        room: memory to work in, by default its own.

    Attributes:
        skipped: entries that came from other ranks and cannot be right, left out so far.
        received: bytes that collectives have brought from other ranks so far.
        sent: bytes handed to collectives for other ranks so far, each once.
        union_size: entries in the union that `cut` saw last.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, group: Group, room: Room | None = None
    ) -> None:
        self.numel, self.dtype, self.device, self.group = numel, dtype, device, group
        self.rank, self.world_size = group.rank, group.size
        self.kernels = entries_for(device)
        self.room = room or Room(device)
        self.skipped = self.received = self.sent = self.union_size = 0

    def merge(self, lists: Entries, offsets: Sequence[int], start: int, stop: int) -> Entries:
        """The sum of the lists, in their order, where an index lies from `start` up to `stop`."""
        room = self.room.entries("merged", len(lists))
        where = lists.indices, lists.values, offsets, start, stop
        found, skipped = self.kernels.merge(*where, room.indices, room.values)
        self.skipped += skipped
        return room[:found]

    # -- every rank's entries to every rank ------------------------------------------------------------------------

    def gather(self, entries: Entries, k: int, with_values: bool = True) -> Stages:
        """The sum of all ranks' entries, in rank order, on every rank, as Entries.

        Args:
            k: at least as many entries as any rank has, the same on all ranks. Shorter lists are padded.
            with_values: else only indices travel, and what is returned has no values that mean anything.
        """
        moving = self.start_gather(entries, k, with_values)
        yield Together([work for _, work in moving])
        return self.finish_gather(moving, k)

    def start_gather(self, entries: Entries, k: int, with_values: bool = True) -> list[Moving]:
        """Pack a list, and start the all-gathers of its parts."""
        padded = self.room.entries("padded", k)
        padded.indices[: len(entries)] = entries.indices
        padded.values[: len(entries)] = entries.values
        padded.values[len(entries) :] = 0
        index_row = self.room("index row", index_bytes(self.numel, k))
        count = torch.tensor([len(entries)], dtype=torch.int32).to(self.device)
        self.kernels.pack_indices(padded.indices, count, 0, self.numel, index_row)
        moving = [self._all_gather(index_row)]
        if with_values:
            value_row = self.room("value row", value_bytes(k, self.dtype))
            self.kernels.pack_values(padded.values, self.dtype, value_row)
            moving.append(self._all_gather(value_row))
        return moving

    def finish_gather(self, moving: list[Moving], k: int) -> Entries:
        """Unpack what has arrived, and sum it."""
        ranks = self.world_size
        lists, used = self.room.entries("lists", k * ranks), self.room("used", ranks, torch.int32)
        (index_rows, _), *values = moving
        self.kernels.unpack_indices(index_rows, 0, self.numel, used, lists.indices.view(ranks, k))
        for value_rows, _ in values:
            self.kernels.unpack_values(value_rows, self.dtype, lists.values.view(ranks, k))
        merged = self.merge(lists, range(0, k * ranks + 1, k), 0, self.numel)
        self.skipped -= k * ranks - int(used.clamp(max=k).sum())  # padding is out of range
        return merged

    def _all_gather(self, row: Tensor) -> Moving:
        rows = self.group.gathered(self.world_size, *row.shape, dtype=row.dtype, device=self.device)
        self._count(sent=row.nbytes, received=(self.world_size - 1) * row.nbytes)
        return rows, self.group.all_gather(rows, row)

    def _count(self, sent: int, received: int) -> None:
        self.sent += sent if self.world_size > 1 else 0
        self.received += received

    # -- every entry to the owner of its range, and the owners' entries to all ---------------------------------------

    def balanced_bounds(self, indices: Tensor) -> Stages:
        """Where owners' ranges begin and end so that each gets about as many entries: owner o has bounds[o] up to
        bounds[o + 1]. list[int]."""
        every, work = self._all_gather(range_samples(indices, self.numel, self.rank, self.world_size))
        yield work
        return bounds_of(every, self.numel)

    def to_owners(self, entries: Entries, bounds: Sequence[int], residual: Tensor | None = None) -> Stages:
        """Every entry to the owner of its range, who sums them in rank order: the sums of the own range, as Entries.

        What rounding takes from a value goes to `residual`, if given. Two host reads: how many entries go where, and
        how many the union has.
        """
        ranges = [b - a for a, b in pairwise(bounds)]
        start, span = bounds[self.rank], ranges[self.rank]
        edges = torch.tensor(bounds[1:-1], dtype=torch.int32).to(self.device)
        cuts = [0, *torch.searchsorted(entries.indices, edges).tolist(), len(entries)]
        sent = Pieces([b - a for a, b in pairwise(cuts)], bounds[:-1], ranges)
        counts = yield from self._exchange_counts(sent.counts)
        arriving = Pieces(counts, [start] * len(counts), [span] * len(counts))
        lists = self.room.entries("owned lists", sum(counts))

        sizes = sent.index_sizes()
        wire = self.room("index pieces", sum(sizes))
        self.kernels.pack_index_pieces(entries.indices, sent, wire)
        indices, index_work = self._all_to_all("index wire", wire, sizes, arriving.index_sizes())
        sizes = sent.value_sizes(self.dtype)
        wire = self.room("value pieces", sum(sizes))
        self.kernels.pack_value_pieces(entries.values, sent, self.dtype, wire, entries.indices, residual)
        values, value_work = self._all_to_all("value wire", wire, sizes, arriving.value_sizes(self.dtype))
        yield Together([index_work, value_work])
        self.kernels.unpack_index_pieces(indices, arriving, lists.indices)
        self.kernels.unpack_value_pieces(values, arriving, self.dtype, lists.values)
        return self.merge(lists, list(accumulate(counts, initial=0)), start, start + span)

    def from_owners(self, owned: Entries, counts: Sequence[int], bounds: Sequence[int]) -> Stages:
        """Every owner's entries, end to end, on every rank, as Entries.

        Args:
            counts: how many each owner has, known to all ranks.
        """
        moving = self.start_sharing(owned, counts, bounds)
        yield Together([work for _, work in moving])
        return self.finish_sharing(moving, counts, bounds)

    def start_sharing(self, owned: Entries, counts: Sequence[int], bounds: Sequence[int]) -> tuple[Moving, Moving]:
        """Pack what this rank owns, and start the all-gathers of its parts."""
        rank, every = self.rank, _owners(counts, bounds)
        mine = Pieces(counts[rank : rank + 1], bounds[rank : rank + 1], every.ranges[rank : rank + 1])
        sizes = every.index_sizes()
        piece = self.room("owned index piece", sizes[rank])
        self.kernels.pack_index_pieces(owned.indices, mine, piece)
        indices = self._all_gather_v(piece, sizes)
        sizes = every.value_sizes(self.dtype)
        piece = self.room("owned value piece", sizes[rank])
        self.kernels.pack_value_pieces(owned.values, mine, self.dtype, piece, owned.indices)
        return indices, self._all_gather_v(piece, sizes)

    def finish_sharing(self, moving: tuple[Moving, Moving], counts: Sequence[int], bounds: Sequence[int]) -> Entries:
        """Unpack what has arrived."""
        (indices, _), (values, _) = moving
        every, result = _owners(counts, bounds), self.room.entries("result", sum(counts))
        self.kernels.unpack_index_pieces(indices, every, result.indices)
        self.kernels.unpack_value_pieces(values, every, self.dtype, result.values)
        return result

    # -- whole algorithms ----------------------------------------------------------------------------------------------

    def union(self, entries: Entries, k: int) -> Stages:
        """The sum, as Entries: an all-reduce at the union of all ranks' indices. `k` as in `gather`."""
        union = (yield from self.gather(entries, k, with_values=False)).indices
        total = self.on_union(entries, union)
        yield from self.all_reduce(total)
        return Entries(union, total)

    def split(self, entries: Entries, bounds: Sequence[int], scale: float = 1.0) -> Stages:
        """The sum times `scale`, as Entries, by owners of ranges, in rank order."""
        owned = yield from self.to_owners(entries, bounds)
        owned.values.mul_(scale)
        counts = yield from self.all_counts(len(owned))
        return (yield from self.from_owners(owned, counts, bounds))

    def all_counts(self, count: int) -> Stages:
        """What every rank passes, in rank order: list[int]."""
        rows, work = self._all_gather(torch.tensor([count], dtype=torch.int32).to(self.device))
        yield work
        counts: list[int] = rows.view(-1).tolist()
        return counts

    def on_union(self, entries: Entries, union: Tensor) -> Tensor:
        """The entries' values at the indices of the union, zero where there is none."""
        n, u = len(entries), len(union)
        lists = self.room.entries("union and own", u + n)
        lists.indices[:u], lists.indices[u:] = union, entries.indices
        lists.values[:u] = 0
        lists.values[u:] = entries.values
        where = lists.indices, lists.values, (0, u, u + n), 0, self.numel
        room = self.room.entries("on union", u + n)
        found, _ = self.kernels.merge(*where, room.indices, room.values)
        return room.values[:found]

    def _exchange_counts(self, counts: Sequence[int]) -> Stages:
        mine = torch.tensor(counts, dtype=torch.int32).to(self.device)
        theirs = torch.empty_like(mine)
        yield self.group.all_to_all(theirs, mine)
        others = 4 * (self.world_size - 1)
        self._count(others, others)
        arriving: list[int] = theirs.tolist()
        return arriving

    def _all_to_all(self, name: str, wire: Tensor, sent: list[int], received: list[int]) -> Moving:
        into = self.room(name, sum(received))
        work = self.group.all_to_all_v(into, wire, received, sent)
        self._count(sum(sent) - sent[self.rank], sum(received) - received[self.rank])
        return into, work

    def _all_gather_v(self, piece: Tensor, sizes: list[int]) -> Moving:
        wire = self.group.gathered(sum(sizes), device=self.device)
        work = self.group.all_gather_v(wire, piece, sizes)
        self._count(sizes[self.rank], sum(sizes) - sizes[self.rank])
        return wire, work

    # -- the largest of all owners' sums -----------------------------------------------------------------------------

    def cut(self, sums: Tensor, k: int, guess: int | None) -> Stages:
        """Of all owners' sums together, the k largest magnitudes.

        Compared by the 21 highest bits of a magnitude (sign left out), which tell 2^-13 of it; among equals those of
        lower index win, as owners' ranges ascend. NaN is largest.

        Args:
            sums: this owner's, float32, in ascending order of index.
            guess: where the last cut was, or None: if it is near, one collective does, otherwise two or three.

        Returns, at the stages' end:
            Which of the own sums are kept (bool), how many every owner keeps, and where the cut is.
        """
        keys = (sums.view(torch.int32) & 0x7FFFFFFF) >> (KEY_BITS - KEPT_BITS)
        fine, found = None, None
        if guess is not None:
            fine = yield from self._census(keys, guess - BINS // 2, 0, k)
            found = _bin_of(fine.total, k)
        if found is None:
            coarse = _bin_of((yield from self._census(keys, 0, KEPT_BITS - COARSE_BITS, k)).total, k)
            assert coarse is not None  # these bins are all there are
            fine = yield from self._census(keys, coarse << (KEPT_BITS - COARSE_BITS), 0, k)
            found = _bin_of(fine.total, k)
        assert fine is not None
        assert found is not None
        above, ties = yield from self._above_and_in(fine, found)
        left = k - int(above.sum())
        taken = (left - (ties.cumsum(0) - ties)).clamp_(min=0).minimum(ties)
        self.union_size = int(fine.total.sum())
        key = fine.window + found
        equal = keys == key
        kept = (keys > key) | (equal & (equal.cumsum(0) <= int(taken[self.rank])))
        return kept, (above + taken).tolist(), key

    def _census(self, keys: Tensor, window: int, shift: int, k: int) -> Stages:
        bins = ((keys >> shift) - window).clamp_(-1, BINS) + 1
        mine = torch.bincount(bins, minlength=BINS + 2).int()
        if census_is_shared(k, self.world_size):
            every, work = self._all_gather(mine)
            yield work
            return _Census(window, every.sum(0), mine, every)
        total = mine.clone()
        yield from self.all_reduce(total)
        return _Census(window, total, mine, None)

    def _above_and_in(self, census: _Census, place: int) -> Stages:
        """How many keys every owner has above a bin, and in it."""
        if census.every is None:
            mine = torch.stack([census.mine[place + 2 :].sum(), census.mine[place + 1]]).int()
            pairs, work = self._all_gather(mine)
            yield work
            return pairs[:, 0].long(), pairs[:, 1].long()
        return census.every[:, place + 2 :].sum(1), census.every[:, place + 1].long()

    def all_reduce(self, tensor: Tensor) -> Stages:
        """`tensor`, flat, = its sum over the ranks, in their order; over NCCL in the backend's."""
        pieces = self.room(f"pieces {tensor.dtype}", tensor.numel() + self.world_size, tensor.dtype)
        yield from self.group.sum(tensor, pieces)
        self.count_all_reduce(tensor)

    def count_all_reduce(self, tensor: Tensor) -> None:
        """An all-reduce of this tensor has been made."""
        self._count(tensor.nbytes, 2 * tensor.nbytes * (self.world_size - 1) // self.world_size)


def fill(out: Tensor, result: Entries) -> Tensor:
    """Write entries to a dense vector, zero elsewhere."""
    out.zero_()
    out[result.indices.to(out.device).long()] = result.values.to(out.device, out.dtype)
    return out


def _owners(counts: Sequence[int], bounds: Sequence[int]) -> Pieces:
    return Pieces(counts, bounds[:-1], [b - a for a, b in pairwise(bounds)])


@dataclass(frozen=True)
class _Census:
    """How many keys lie below a window, in each of its bins, and above it: int32 [BINS + 2]."""

    window: int
    total: Tensor
    mine: Tensor
    every: Tensor | None  # of each owner, where that is little


def _bin_of(counts: Tensor, k: int) -> int | None:
    """The bin in which the k-th largest lies, None outside the window. With fewer than k in all, the lowest."""
    below, *_ = counts.tolist()
    at_least = counts.flip(0).cumsum(0).flip(0)[1:]  # in this bin or above; the last is beyond the window
    reached = (at_least >= k).nonzero().view(-1)
    if len(reached) == 0:
        return 0 if below == 0 else None
    place = int(reached[-1])
    return place if place < len(counts) - 2 else None
