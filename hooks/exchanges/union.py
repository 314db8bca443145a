"""An all-reduce at the union of what ranks have selected."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.feedback.base import FeedbackState
from ..comm.entry_exchange import Entries
from ..comm.pipeline import Stages
from ..network.cost import Calibration, Estimate
from .base import BucketSpec
from .entry_base import EntryExchange
from .fixed_union import FixedSizeUnion


class Union(EntryExchange):
    """Where any rank has selected an element, all give what they have of it: more arrives than was selected, for as
    many bytes. (P-1)·k·i + 8·u·(P-1)/P bytes received, i for an index, u in the union."""

    name = "union"
    device_variant = FixedSizeUnion

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        return network.selected(network.union(cls.shape(what)), what.speed, what.numel)

    def bring_together(self, entries: Entries, extra: Tensor, feedback: FeedbackState) -> Stages:
        carrier = self.carrier
        union = (yield from carrier.gather(entries, self.k, with_values=False)).indices
        mine = carrier.on_union(entries, union)
        feedback.take_at(union, mine)
        total = torch.cat([mine, extra])
        yield from carrier.all_reduce(total)
        extra.copy_(total[len(mine) :])
        self.union_size = len(mine)
        return Entries(union, total[: len(mine)].mul_(1.0 / self.world_size))
