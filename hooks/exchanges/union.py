"""An all-reduce at the union of the ranks' selections."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.feedback.base import FeedbackState
from ...compress.formats.entries import index_bytes
from ..comm.entry_exchange import Entries
from ..comm.ports import Stages
from ..network.cost import Calibration, Estimate, Shape
from .base import BucketSpec
from .entry_base import EntryExchange, entries_of, with_selection
from .fixed_union import FixedSizeUnion


def union_estimate(network: Calibration, shape: Shape) -> Estimate:
    """The cost of summing entries at their union."""
    ranks, k, union, work = shape.world_size, shape.k, shape.union, network.work
    half = (network.all_to_all, 4 * union * (ranks - 1) / ranks)  # of the all-reduce, by messages
    moves = [(network.all_gather, (ranks - 1) * index_bytes(shape.numel, k)), half, half]
    decode = (work.unpack + work.merge) * ranks * k + work.merge * (union + k) + 2 * work.sweep * shape.numel
    decode += work.scatter * union
    return network.estimate("union", moves, work.pack * k, decode, network.latency.union)


class Union(EntryExchange):
    """Every rank sends its values at all indices that any rank has selected, so more is applied than was selected.
    (P-1)·k·i + 8·u·(P-1)/P bytes received, i for an index, u in the union."""

    name, needs = "union", "a sparse codec"
    device_variant = FixedSizeUnion

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        return with_selection(union_estimate(network, entries_of(what)), network, what)

    def combine(self, entries: Entries, extra: Tensor, feedback: FeedbackState) -> Stages:
        exchanger = self.exchanger
        union = (yield from exchanger.gather(entries, self.k, with_values=False)).indices
        mine = exchanger.on_union(entries, union)
        feedback.take_at(union, mine)
        total = torch.cat([mine, extra])
        yield from exchanger.all_reduce(total)
        extra.copy_(total[len(mine) :])
        self.union_size = len(mine)
        return Entries(union, total[: len(mine)].mul_(1.0 / self.world_size))
