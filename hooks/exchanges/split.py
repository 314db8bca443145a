"""Entries to the owners of their ranges; of all sums the largest are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.feedback import Kept
from ..auto.cost import Calibration, Estimate
from ..comm.entries import BINS, COARSE_BITS, KEPT_BITS, KEY_BITS, Carrier, Entries, census_is_shared
from ..comm.group import Group
from ..comm.pipeline import Stages
from .base import Bucketful
from .padded_split import PaddedSplit
from .selected import Selected

#: Steps after which the owners' ranges are balanced again.
BALANCE_EVERY = 64


class Split(Selected):
    """The owners of index ranges sum what falls there, and of all sums together the k largest are kept (Ok-Topk: Li &
    Hoefler, PPoPP 2022). What a rank sent for nothing goes back to its residual, and what rounding takes from a mean to
    its owner's. 2·k·(i+v)·(P-1)/P bytes received, i for an index, v for a value."""

    name = "split"
    unread = PaddedSplit

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.step = 0
        self.bounds: list[int] = []
        self.guess: int | None = None

    @classmethod
    def estimate(cls, network: Calibration, what: Bucketful) -> Estimate:
        return network.selected(network.split_k(cls.shape(what)), what.speed, what.numel)

    def bring_together(self, entries: Entries, extra: Tensor, feedback: Kept) -> Stages:
        carrier = self.carrier
        if self.step % BALANCE_EVERY == 0:
            self.bounds = yield from carrier.balanced_bounds(entries.indices)
        self.step += 1
        owned = yield from carrier.to_owners(entries, self.bounds, feedback.open)
        kept, counts, self.guess = yield from cut(carrier, owned.values, self.k, self.guess)
        owned = owned[kept]
        means = Entries(owned.indices, owned.values * (1.0 / self.world_size))
        result = yield from carrier.from_owners(means, counts, self.bounds)
        self.union_size = carrier.union_size
        with feedback.open():
            if carrier.dtype != torch.float32:
                first = sum(counts[: self.rank])
                rest = owned.values - self.world_size * result.values[first : first + len(owned)]
                feedback.give_back(owned.indices, rest)
            feedback.give_back_unless(entries.indices, entries.values, result.indices)
        if self.extra:
            yield from carrier.all_reduce(extra)
        return result


def cut(carrier: Carrier, sums: Tensor, k: int, guess: int | None) -> Stages:
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
        fine = yield from _census(carrier, keys, guess - BINS // 2, 0, k)
        found = _bin_of(fine.total, k)
    if found is None:
        coarse = _bin_of((yield from _census(carrier, keys, 0, KEPT_BITS - COARSE_BITS, k)).total, k)
        assert coarse is not None  # these bins are all there are
        fine = yield from _census(carrier, keys, coarse << (KEPT_BITS - COARSE_BITS), 0, k)
        found = _bin_of(fine.total, k)
    assert fine is not None
    assert found is not None
    above, ties = yield from _above_and_in(carrier, fine, found)
    left = k - int(above.sum())
    taken = (left - (ties.cumsum(0) - ties)).clamp_(min=0).minimum(ties)
    carrier.union_size = int(fine.total.sum())
    key = fine.window + found
    equal = keys == key
    kept = (keys > key) | (equal & (equal.cumsum(0) <= int(taken[carrier.rank])))
    return kept, (above + taken).tolist(), key


def _census(carrier: Carrier, keys: Tensor, window: int, shift: int, k: int) -> Stages:
    bins = ((keys >> shift) - window).clamp_(-1, BINS) + 1
    mine = torch.bincount(bins, minlength=BINS + 2).int()
    if census_is_shared(k, carrier.world_size):
        every, work = carrier.all_gather(mine)
        yield work
        return _Census(window, every.sum(0), mine, every)
    total = mine.clone()
    yield from carrier.all_reduce(total)
    return _Census(window, total, mine, None)


def _above_and_in(carrier: Carrier, census: _Census, place: int) -> Stages:
    """How many keys every owner has above a bin, and in it."""
    if census.every is None:
        mine = torch.stack([census.mine[place + 2 :].sum(), census.mine[place + 1]]).int()
        pairs, work = carrier.all_gather(mine)
        yield work
        return pairs[:, 0].long(), pairs[:, 1].long()
    return census.every[:, place + 2 :].sum(1), census.every[:, place + 1].long()


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
