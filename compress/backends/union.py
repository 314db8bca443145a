"""Unions of index sets, and an all-reduce there: `union` where no host may read. In torch, as in csrc/entries.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .places import add_at, is_among, used_places, write_at

#: A list of which the first are used: how many, int32 [1], indices, int32, ascending, and values, float32.
Listed = tuple[Tensor, Tensor, Tensor]


class Union:
    """The union of index sets below `numel`, for up to `capacity` indices; reusable. The host reads nothing.

    Attributes:
        indices: int32 [capacity]: ascending; anything beyond `size`.
        size: int32 [1]: how many there are; more than `capacity` means that the highest are missing.
        status: int64 [2]: the first counts indices out of range, which are left out.
        later: bool: which of the entries that `take` was given last wait.
    """

    later: Tensor

    def __init__(self, numel: int, capacity: int, device: torch.device) -> None:
        if not 0 < numel < 1 << 31:
            raise ValueError(f"a union of 32-bit indices cannot serve {numel} elements: use fewer than 2^31")
        self.numel = numel
        self.indices = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.size = torch.zeros(1, dtype=torch.int32, device=device)
        self.status = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(self, sets: Sequence[Tensor]) -> None:
        """Fill `indices` and `size` from index sets, int32 each, in any order."""
        every = torch.cat(list(sets))
        inside = (every >= 0) & (every < self.numel)
        self.status[0] += (~inside).sum()
        ordered = torch.where(inside, every, self.numel).sort().values
        fresh = ordered < self.numel
        fresh[1:] &= ordered[1:] != ordered[:-1]
        place, capacity = fresh.cumsum(0) - 1, len(self.indices)
        self.size.copy_(fresh.sum())
        room = torch.zeros(capacity + 1, dtype=torch.int32, device=every.device)  # the last is for what is not listed
        room.scatter_(0, torch.where(fresh, place, capacity).clamp_(max=capacity), ordered)
        self.indices.copy_(room[:capacity])

    def take(
        self, entries: Listed, residual: Tensor | None, room: int, extra: Tensor, total: Tensor, out: Tensor
    ) -> None:
        """Write what this rank has at the first `room` of the union to `total`, float32, `extra` behind that, and zeros
        to `out`. There the residual becomes zero, if the sum is finite; the entries that are elsewhere are added to it.
        """
        count, indices, values = entries
        k, device = len(indices), indices.device
        at, used = used_places(indices, count)
        union = self.indices[:room]
        listed = torch.arange(room, device=device) < self.size
        ascending = torch.where(listed, union, self.numel)
        found = is_among(indices, ascending) & used
        place = torch.where(found, torch.searchsorted(ascending, indices), torch.arange(k, device=device))
        mine = total[:room].zero_()
        mine.index_add_(0, place, torch.where(found, values, -0.0))
        late, finite = used & ~found, values.isfinite()
        # What is not finite must be seen, and waits nowhere: it spreads.
        mine.masked_fill_((late & ~finite).any(), torch.nan)
        self.later = late & finite
        if residual is not None:
            there = torch.where(listed, union, torch.arange(room, device=device))
            rest = torch.where(listed, residual[there], -0.0)
            mine += rest
            residual.index_add_(0, there, torch.where(mine.isfinite() & listed, -rest, -0.0))
            add_at(residual, at, torch.where(late, values, -0.0))
        total[room:].copy_(extra)
        out.zero_()

    def deliver(
        self, total: Tensor, ranks: int, out: Tensor, extra: Tensor, came: tuple[Tensor, int], counted: Tensor
    ) -> None:
        """Divide `total`, and write it to `out`, which is zero, and to `extra`.

        Args:
            came: how many indices of each set, int32 [P], of so many, were meant to be some.
            counted: int64 [2], counted up by the means that are not finite, and down by the sets' other indices, which
                `status` counts.
        """
        total.mul_(1.0 / ranks)
        room, (used, k) = len(total) - len(extra), came
        at, listed = used_places(self.indices[:room], self.size)
        counted[1] += write_at(out, at, total[:room], listed)
        extra.copy_(total[room:])
        counted[1] += (~extra.isfinite()).sum()
        counted[0] += used.clamp(max=k).sum() - len(used) * k  # padding is out of range
