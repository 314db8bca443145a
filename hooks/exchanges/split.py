"""Entries to the owners of their ranges; of all sums the largest are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.feedback import Kept
from ..auto.cost import Calibration, Estimate
from ..comm.entries import Entries
from ..comm.group import Group
from ..comm.pipeline import Stages
from .base import Bucketful
from .selected import Selected

#: Steps after which the owners' ranges are balanced again.
BALANCE_EVERY = 64


class Split(Selected):
    """The owners of index ranges sum what falls there, and of all sums together the k largest are kept (Ok-Topk: Li &
    Hoefler, PPoPP 2022). What a rank sent for nothing goes back to its residual, and what rounding takes from a mean to
    its owner's. 2·k·(i+v)·(P-1)/P bytes received, i for an index, v for a value."""

    name = "split"

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
        owned = yield from carrier.to_owners(entries, self.bounds, feedback.residual)
        kept, counts, self.guess = yield from carrier.cut(owned.values, self.k, self.guess)
        owned = owned[kept]
        means = Entries(owned.indices, owned.values * (1.0 / self.world_size))
        result = yield from carrier.from_owners(means, counts, self.bounds)
        self.union_size = carrier.union_size
        if carrier.dtype != torch.float32:
            first = sum(counts[: self.rank])
            rest = owned.values - self.world_size * result.values[first : first + len(owned)]
            feedback.give_back(owned.indices, rest)
        feedback.give_back_unless(entries.indices, entries.values, result.indices)
        if self.extra:
            yield from carrier.all_reduce(extra)
        return result
