"""Entries to the owners of index ranges, who sum them; the k largest sums go to all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...compress.backends.sparse import Pieces
from ...compress.codec import Codec
from ...compress.feedback.base import FeedbackState
from ..comm.entry_exchange import Entries, EntryExchanger
from ..comm.group import Group
from ..comm.ports import Stages
from ..network.cost import Calibration, Estimate, Shape
from .base import BucketSpec, ExchangeArgs
from .entry_base import EntryExchange, EntryMessages, entries_of, with_selection
from .fixed_base import SPREAD
from .fixed_split import FixedSizeSplit

#: Steps after which the owners' ranges are balanced again.
BALANCE_EVERY = 64
Keys: TypeAlias = npt.NDArray[np.int32]
Flags: TypeAlias = npt.NDArray[np.bool_]
HOST = torch.device("cpu")
#: A place in the order of sums: the bits of the magnitude, and the index; of equals the lower index comes first.
Place = tuple[int, int]
#: Behind all other places.
NOWHERE: Place = (-1, 0)


def split_estimate(network: Calibration, shape: Shape, kept: int, latency: float | None = None) -> Estimate:
    """The cost of summing entries by owners of ranges.

    Args:
        kept: sums that owners send to all.
        latency: seconds, where it was measured as a whole; None: ranges, and how many sums each owner sends, are known
            from earlier steps.
    """
    ranks, k, work = shape.world_size, shape.k, network.work
    span, own, mine = max(1, shape.numel // ranks), -(-k // ranks), -(-kept // ranks)
    moves = [
        (network.all_to_all, (ranks - 1) * shape.entry_bytes(span, own)),
        (network.all_to_all, (ranks - 1) * shape.entry_bytes(span, mine)),
    ]
    decode = work.pack * mine + (work.unpack + work.merge) * k + work.unpack * kept + work.sweep * span
    decode += work.scatter * kept
    return network.estimate("split", moves, work.pack * k, decode, latency)


class Split(EntryExchange):
    """Owners of index ranges sum the entries that fall there, and the k largest of all sums are kept (Ok-Topk: Li &
    Hoefler, PPoPP 2022). Entries that are not kept go back to their rank's residual, and rounding errors of means to
    their owner's. (P-1)·(2·k/P + 3·√(k/P))·(i+v) bytes received, i for an index, v for a value.

    Each of two stages takes one message from each rank to each other. Owners do not agree on how many each has of the k
    largest: they send as many as in the step before and some more, with the magnitude of their next one. If a next one
    is among the k largest that have arrived, which all ranks see alike, a third stage brings the missing sums.

    Entries are on the host, wherever the gradient is.
    """

    name, needs = "split", "a sparse codec"
    device_variant = FixedSizeSplit
    concludes = True

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.exchanger = exchanger = EntryExchanger(max(1, numel), self.exchanger.dtype, HOST, group)
        self.step = 0
        self.bounds: list[int] = []
        self.share = -(-self.k // self.world_size)
        #: Own sums that are likely to be kept: rises at once and falls slowly, as single steps vary.
        self.likely = self.share
        #: This rank's entries, and the sums that it owns, of the last step.
        self.sent: tuple[Entries, Entries]
        if numel:
            # As `tensor_split` cuts.
            slices = [extra // self.world_size + (rank < extra % self.world_size) for rank in range(self.world_size)]
            own = [slices[self.rank]] * self.world_size
            self.to_owners = EntryMessages("to owners", exchanger, self._own_group("swap"), self.k, 1, own)
            self.to_all = EntryMessages("to all", exchanger, self._own_group("gather"), self.k, 4, slices)
            self.ports = [self.to_owners.port, self.to_all.port]

    @property
    def quota(self) -> int:
        """Own sums that this rank sends in the second stage."""
        return min(self.k, self.likely + math.ceil(SPREAD * math.sqrt(max(self.likely, self.share))))

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        shape = entries_of(what)
        return with_selection(split_estimate(network, shape, min(shape.k, shape.union)), network, what)

    def combine(self, entries: Entries, extra: Tensor, feedback: FeedbackState) -> Stages:
        entries = Entries(entries.indices.to(HOST), entries.values.to(HOST))
        if self.step % BALANCE_EVERY == 0:
            self.bounds = yield from self.exchanger.balanced_bounds(entries.indices)
        self.step += 1
        owned, extras = yield from self._sums(entries, extra, feedback)
        means = Entries(owned.indices, owned.values * (1.0 / self.world_size))
        self.sent = entries, owned
        result = yield from self._largest(means, extras, extra)
        self._settle(result, feedback)
        return result

    def conclude(self, mean: Tensor, x: ExchangeArgs) -> None:
        if self.numel:
            host = mean.to(HOST)
            indices = host.view(torch.int32).nonzero().view(-1).int()  # -0.0, too
            self._settle(Entries(indices, host[indices]), x.feedback)

    def _settle(self, result: Entries, feedback: FeedbackState) -> None:
        """Take back what has been sent and is not in the result."""
        entries, owned = self.sent
        first, end = torch.searchsorted(result.indices, _int32(self.bounds[self.rank : self.rank + 2])).tolist()
        self.likely = max(end - first, self.likely - (self.likely - (end - first)) // 4)
        with feedback.open():
            if self.exchanger.dtype != torch.float32:
                mine = result[first:end]
                sums = owned.values[torch.searchsorted(owned.indices, mine.indices)]
                self._give_back(feedback, mine.indices, sums - self.world_size * mine.values)
            feedback.restore_unless(
                *(part.to(self.device) for part in (entries.indices, entries.values, result.indices))
            )

    def _give_back(self, feedback: FeedbackState, indices: Tensor, values: Tensor) -> None:
        feedback.restore(indices.to(self.device), values.to(self.device))

    def _sums(self, entries: Entries, extra: Tensor, feedback: FeedbackState) -> Stages:
        """The sums of the own range, as Entries; and of the own part of `extra`."""
        messages, bounds, rank = self.to_owners, self.bounds, self.rank
        cuts = [0, *torch.searchsorted(entries.indices, _int32(bounds[1:-1])).tolist(), len(entries)]
        sent = self._pieces([b - a for a, b in pairwise(cuts)])
        slices = extra.to(HOST).tensor_split(self.world_size)
        written = messages.write([[count] for count in sent.counts], slices, entries, sent)
        if self.exchanger.dtype != torch.float32 and feedback.keeps:
            self._give_back(feedback, entries.indices, entries.values - messages.rounded(sent))
        yield messages.swap(written)
        counts = [count for (count,) in messages.heads()]
        ranges = [bounds[rank + 1] - bounds[rank]] * self.world_size
        parts, lists = messages.read(Pieces(counts, [bounds[rank]] * self.world_size, ranges), "owned lists")
        owned = self.exchanger.merge(lists, list(accumulate(counts, initial=0)), bounds[rank], bounds[rank + 1])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return owned, total

    def _largest(self, means: Entries, extras: Tensor, extra: Tensor) -> Stages:
        """The k largest of all owners' means, as Entries. `extra` becomes all ranks' `extras`."""
        keys, places = _magnitudes(means.values), means.indices.numpy()
        sent = largest(keys, self.quota)
        parts, every, heads = yield from self._share(means, sent, keys, extras, "means")
        if self.extra:
            extra.copy_(torch.cat(list(parts)))
        self.union_size = sum(head[1] for head in heads)
        kept, last = self._cut(every)
        if any((key, -index) > (last[0], -last[1]) for _, _, key, index in heads):
            key, index = last
            keys[sent | (keys < key) | ((keys == key) & (places > index))] = -1
            more = largest(keys, self.k - int(sent.sum())) & (keys >= 0)
            _, others, _ = yield from self._share(means, more, keys, extras, "more means")
            indices, order = torch.cat([every.indices, others.indices]).sort()
            every = Entries(indices, torch.cat([every.values, others.values])[order])
            kept, _ = self._cut(every)
        return _selected(every, kept)

    def _share(self, means: Entries, sent: Flags, keys: Keys, extras: Tensor, into: str) -> Stages:
        """Send some of the own means to all. Returns the extra numbers that arrived; all ranks' means, as Entries; and
        each rank's head: means sent, means it has, and the place of the next."""
        messages, mine = self.to_all, _selected(means, sent)
        head = [len(mine), len(means), *self._next(means, sent, keys)]
        bounds, rank = self.bounds, self.rank
        piece = Pieces([len(mine)], bounds[rank : rank + 1], [bounds[rank + 1] - bounds[rank]])
        (message,) = messages.write([head], [extras], mine, piece)
        yield messages.share(message)
        heads = messages.heads()
        return *messages.read(self._pieces([head[0] for head in heads]), into), heads

    def _next(self, means: Entries, sent: Flags, keys: Keys) -> Place:
        """The place of the largest mean that is not sent, rounded down, as rounding of those sent must not hide it."""
        left = np.where(sent, -1, keys)
        at = int(left.argmax()) if len(left) else 0
        if not len(left) or left[at] < 0:
            return NOWHERE
        magnitude, dtype = means.values[at : at + 1].abs(), self.exchanger.dtype
        if dtype == torch.bfloat16:
            magnitude *= 1 - 2**-8
        elif dtype == torch.int8:
            magnitude = (magnitude - means.values.abs().max() / 127).clamp_(min=0)
        return int(_magnitudes(magnitude)[0]), int(means.indices[at])

    def _cut(self, every: Entries) -> tuple[Flags, Place]:
        """The means that are kept, and the place of the last one."""
        keys = _magnitudes(every.values)
        kept = largest(keys, self.k)
        if len(keys) < self.k:
            return kept, NOWHERE
        key = int(keys[kept].min())
        return kept, (key, int(every.indices[np.flatnonzero(kept & (keys == key))[-1]]))

    def _pieces(self, counts: Sequence[int]) -> Pieces:
        """Pieces of `counts[r]` entries in the range of owner r."""
        return Pieces(counts, self.bounds[:-1], [b - a for a, b in pairwise(self.bounds)])


def largest(keys: Keys, k: int) -> Flags:
    """Flags of the k largest numbers; the first of equals."""
    if k >= len(keys):
        return np.ones(len(keys), np.bool_)
    key = np.partition(keys, -k)[-k] if k else keys.max() + 1
    kept: Flags = keys > key
    kept[np.flatnonzero(keys == key)[: k - np.count_nonzero(kept)]] = True
    return kept


def _magnitudes(values: Tensor) -> Keys:
    """Magnitudes as integers in the same order; NaN is the largest."""
    return values.numpy().view(np.int32) & 0x7FFFFFFF


def _selected(entries: Entries, flags: Flags) -> Entries:
    at = torch.from_numpy(np.flatnonzero(flags))
    return Entries(entries.indices[at], entries.values[at])


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=HOST)
