"""Elements dealt to owners, one by one, and the entries that go to them and come back: `split` where no host may read.
In torch; csrc/partition.cu is the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels import Workspace
from .places import add_at, is_among, write_at
from .union import Listed

#: By what numbers are scattered: odd, about 2^31 divided by the golden ratio, and any other.
SCATTER, NEXT_TURN, LOW_BITS = 0x4F1BBCDD, 0x2545F491, 0x7FFFFFFF
#: Rows of packed indices and of packed values, uint8 [P, bytes] each.
Packed = tuple[Tensor, Tensor]


class Partition:
    """The owners of elements: of every `ranks` in a row each rank owns one, by a new rotation in every step. So each
    owns about as many of whatever ranks select, wherever that lies, and no rank has to say what it selects beforehand.

    An owner's elements have places, 0 up to `span`, in ascending order of index. An element's key is
    owner · (span + 1) + place, so that none is one less than another owner's first.
    """

    def __init__(self, numel: int, ranks: int, device: torch.device) -> None:
        self.numel, self.ranks, self.span, self.device = numel, ranks, -(-numel // ranks), device
        self.owners = torch.arange(ranks, device=device)
        #: Where each owner's keys begin, and what lies beyond all keys.
        self.edges = torch.arange(ranks + 1, device=device) * (self.span + 1)
        self.first = self.edges[:-1, None]

    def keys(self, indices: Tensor, turn: Tensor) -> Tensor:
        """The keys of elements, int64. `turn`: int64 [], alike on all ranks."""
        indices = indices.long()
        places = indices // self.ranks
        return (indices + self._turned(places, turn)) % self.ranks * (self.span + 1) + places

    def indices(self, places: Tensor, turn: Tensor) -> Tensor:
        """The elements at places [ranks, …] of each owner, int64: beyond `numel` where there is none."""
        return places * self.ranks + (self.owners[:, None] - self._turned(places, turn)) % self.ranks

    def _turned(self, places: Tensor, turn: Tensor) -> Tensor:
        """The rotation of the owners of a place. A product alone would treat places that lie evenly apart, as a
        matrix's columns do, alike; its square does not."""
        mixed = ((places + turn * NEXT_TURN) & LOW_BITS) * SCATTER & LOW_BITS
        return (mixed * mixed >> 31) % self.ranks


class Dealer:
    """Deals this rank's entries, sums what comes as an owner, and hands out the owners' means. The host reads nothing.

    Args:
        kernels: what packs entries: `EntryKernels`.
        k: of this rank.
        share: of each owner's means.
        codec: what rows to owners are packed as, with room for its `count`: a `Largest`.
        sent: the rows to owners.

    Attributes:
        status: int64 [2]: the first counts entries that cannot be right, which are left out.
        later: bool [k]: which entries `deliver` has returned.
    """

    def __init__(
        self, kernels: Any, partition: Partition, k: int, share: int, codec: Any, sent: tuple[Tensor, Tensor]
    ) -> None:
        self.kernels, self.partition, self.k, self.share, self.codec = kernels, partition, k, share, codec
        self.capacity, self.dtype, self.sent = codec.count, codec.value_dtype, sent
        device, ranks = partition.device, partition.ranks
        self.slots, self.places, self.returned = (
            torch.zeros(size, dtype=torch.int32, device=device) for size in (k, (ranks, self.capacity), (ranks, share))
        )
        self.used = torch.zeros(ranks, dtype=torch.int32, device=device)
        self.numbers = torch.zeros(ranks, self.capacity, dtype=torch.float32, device=device)
        self.later = torch.zeros(k, dtype=torch.bool, device=device)
        counted = torch.zeros(4, dtype=torch.int64, device=device)
        # What is not finite is counted as it is delivered, and not where the mean counts it.
        self.workspace, self.status = Workspace(counted[:2]), counted[::2]

    def deal(self, entries: Listed, turn: Tensor) -> None:
        """Fill the rows to owners. `slots` says where in its owner's row each entry is, or would be if there were
        room."""
        count, listed, numbers = entries
        partition, edges, k, capacity = self.partition, self.partition.edges, self.k, self.capacity
        slots = torch.arange(k, device=listed.device)
        keys, order = torch.where(slots < count, partition.keys(listed, turn), edges[-1]).sort()
        values, starts = numbers[order], torch.searchsorted(keys, edges)
        owner = (keys // (partition.span + 1)).clamp_(max=partition.ranks - 1)
        slot = slots - starts[owner]
        self.slots.scatter_(0, order, slot.int())
        counts = starts.diff().clamp_(max=capacity)
        inside = slots[:capacity] < counts[:, None]
        at = (starts[:-1, None] + slots[:capacity]).clamp_(max=k - 1)
        self.places.copy_(torch.where(inside, keys[at] - partition.first, 0))
        # What is not finite must be seen, and waits nowhere: a row that has no room for it is of NaN.
        hidden = (keys < edges[-1]) & (slot >= capacity) & ~values.isfinite()
        rows = (
            torch.zeros(partition.ranks, dtype=torch.int64, device=listed.device).index_add_(0, owner, hidden.long())
            > 0
        )
        self.numbers.copy_(torch.where(inside, values[at], 0.0).masked_fill_(rows[:, None], torch.nan))
        counts = counts.int()
        for row, (indices, packed) in enumerate(zip(*self.sent, strict=True)):
            self.kernels.pack_indices(self.places[row], counts[row : row + 1], 0, partition.span, indices)
            self.kernels.pack_values(self.numbers[row], self.dtype, packed)

    def mean(self, rows: Packed, mean: Tensor, out: Tensor) -> None:
        """Write the mean of what has come, in the ranks' order, to `mean`, float32, and zeros to `out`."""
        self.codec.decode_mean(rows, mean, self.workspace)
        out.zero_()

    def deliver(
        self,
        entries: Listed,
        turn: Tensor,
        rows: Packed,
        mean: Tensor,
        rank: int,
        out: Tensor,
        residual: Tensor | None,
        counted: Tensor,
    ) -> None:
        """Write what the owners have sent to `out`, which is zero; and to the residual what no mean has: of
        this rank's entries those that no owner has sent, and what rounding has taken from the others; and from the
        means that this rank owns.

        Args:
            counted: int64 [2], counted up: entries that cannot be right, and means that are not finite.
        """
        partition, share, device = self.partition, self.share, out.device
        numbers = torch.empty(partition.ranks, share, dtype=torch.float32, device=device)
        self.kernels.unpack_indices(rows[0], 0, partition.span, self.used, self.returned)
        self.kernels.unpack_values(rows[1], self.dtype, numbers)
        places = self.returned.long()  # -1 where there is none
        highest = places.cummax(1).values
        indices = partition.indices(places, turn)
        sound = (places >= 0) & (indices < partition.numel)
        sound[:, 1:] &= places[:, 1:] > highest[:, :-1]
        counted[0] += self.used.clamp(max=share).sum() - sound.sum()
        spare = torch.arange(places.numel(), device=device).view_as(places) % partition.numel
        at = torch.where(sound, indices, spare)
        counted[1] += write_at(out, at.view(-1), numbers.view(-1), sound.view(-1))
        if residual is None:
            return
        if self.dtype != torch.float32:
            rest = partition.ranks * (mean[places[rank].clamp(min=0)] - numbers[rank])
            add_at(residual, at[rank], torch.where(sound[rank], rest, -0.0))
        count, listed, values = entries
        slots = torch.arange(self.k, device=device)
        used, keys = slots < count, partition.keys(listed, turn)
        arrived = used & (self.slots < self.capacity) & is_among(keys, (partition.first + highest).view(-1))
        rest = torch.where(arrived, self._rounded(keys, values), values)
        add_at(residual, torch.where(used, listed, slots), torch.where(used, rest, -0.0))
        torch.logical_and(used & ~arrived, values.isfinite(), out=self.later)

    def _rounded(self, keys: Tensor, values: Tensor) -> Tensor:
        """The rounding error of each entry that was sent; anything elsewhere."""
        if self.dtype == torch.float32:
            return torch.full_like(values, -0.0)
        told = torch.empty_like(self.numbers)
        self.kernels.unpack_values(self.sent[1], self.dtype, told)
        owner = (keys // (self.partition.span + 1)).clamp(max=self.partition.ranks - 1)
        return values - told[owner, self.slots.long().clamp(0, self.capacity - 1)]
