"""Elements dealt to owners, one by one, and the rows in which entries go to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

#: A row to an owner has room for so many standard deviations more than its share, if entries fell to owners by chance.
SPREAD = 3.0
#: By what numbers are scattered: odd, about 2^31 divided by the golden ratio, and any other.
SCATTER, NEXT_TURN, LOW_BITS = 0x4F1BBCDD, 0x2545F491, 0x7FFFFFFF


def row_capacity(k: int, span: int, ranks: int, feedback: bool) -> int:
    """How many of k entries fit in the row to each of so many owners of at most `span` elements. What does not fit
    waits in the residual; without one there is room for all."""
    share = k / ranks
    return min(k, span, math.ceil(share + SPREAD * math.sqrt(share)) if feedback else k)


class Dealing:
    """Which rank owns which element: of every `ranks` in a row each has one, dealt again in every step. So each has
    about as many of whatever ranks select, wherever that lies, and no rank has to say what it selects beforehand.

    An owner's elements have places, 0 up to `span`, in ascending order of index. An element's key is
    owner · (span + 1) + place, so that none is one less than another owner's first.
    """

    def __init__(self, numel: int, ranks: int, device: torch.device) -> None:
        self.numel, self.ranks, self.span = numel, ranks, -(-numel // ranks)
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
        """By how much the dealing to those who have this place is turned. A product alone would treat places that lie
        evenly apart, as a matrix's columns do, alike; its square does not."""
        mixed = ((places + turn * NEXT_TURN) & LOW_BITS) * SCATTER & LOW_BITS
        return (mixed * mixed >> 31) % self.ranks


@dataclass(frozen=True)
class Dealt:
    """This rank's entries in the order of their keys, and which lie in the rows to their owners.

    Attributes:
        keys, indices, values: [k], int64, int32 and float32. What is not used is last, with keys beyond all others.
        order: int64 [k]: where they were.
        used, sent: bool [k].
        owner, slot: int64 [k]: the row, and the place in it, also of what it has no room for.
        places, numbers, counts: of the rows: int32 and float32 [P, capacity], and how many are used, int32 [P].
    """

    keys: Tensor
    indices: Tensor
    values: Tensor
    order: Tensor
    used: Tensor
    sent: Tensor
    owner: Tensor
    slot: Tensor
    places: Tensor
    numbers: Tensor
    counts: Tensor

    @classmethod
    def of(cls, dealing: Dealing, entries: tuple[Tensor, Tensor, Tensor], capacity: int, turn: Tensor) -> Dealt:
        """Deal a list: its `count`, indices and values, of which as many are used."""
        count, listed, numbers = entries
        edges, k = dealing.edges, len(listed)
        slots = torch.arange(k, device=listed.device)
        keys, order = torch.where(slots < count, dealing.keys(listed, turn), edges[-1]).sort()
        indices, values, used = listed[order], numbers[order], keys < edges[-1]
        owner, starts = (keys // (dealing.span + 1)).clamp_(max=dealing.ranks - 1), torch.searchsorted(keys, edges)
        slot = slots - starts[owner]
        sent = used & (slot < capacity)
        counts = starts.diff().clamp_(max=capacity)
        inside = slots[:capacity] < counts[:, None]
        at = (starts[:-1, None] + slots[:capacity]).clamp_(max=k - 1)
        places = torch.where(inside, keys[at] - dealing.first, 0).int()
        # What is not finite must be seen, and waits nowhere: it spreads.
        hidden = (used & ~sent & ~values.isfinite()).any()
        numbers = torch.where(inside, values[at], 0.0).masked_fill_(hidden, torch.nan)
        return cls(keys, indices, values, order, used, sent, owner, slot, places, numbers, counts.int())

    def moved(self) -> None:
        """The current stream goes on with what another has made."""
        for field in fields(self):
            part = getattr(self, field.name)
            if part.is_cuda:
                part.record_stream(torch.cuda.current_stream(part.device))
