"""Exchanges of entries for which the host does not wait for the device, as over NCCL.

The host knows the size of messages beforehand; only the device knows how much of them is used. Entries beyond their
capacity wait in the residual for a later step. Without a residual the capacity is the most that can come.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...compress.backends import entries_for
from ...compress.codec import Codec
from ..comm.group import Group
from .entry_base import SelectingExchange

#: Standard deviations of room beyond an owner's share, as if entries fell to owners by chance.
SPREAD = 3.0


def row_capacity(k: int, span: int, ranks: int, feedback: bool) -> int:
    """Entries, of k, that fit in the row to each of `ranks` owners of at most `span` elements. The others wait in the
    residual; without feedback there is room for all."""
    share = k / ranks
    return min(k, span, math.ceil(share + SPREAD * math.sqrt(share)) if feedback else k)


class FixedSizeExchange(SelectingExchange):
    """Entries travel in rows of fixed size.

    Attributes:
        count, indices, values: this rank's selection: its size, int32 [1], and int32 and float32 [k] in ascending order
            of indices, zero behind them.
        row: this rank's message to all.
        capacity: entries that fit in each row to an owner, or in the union.
    """

    row: Tensor
    capacity: int

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.kernels = entries_for(device)
        self.count, self.indices = self.wire.view(torch.int32)[: 1 + self.k].split([min(1, numel), self.k])
        self.values = self.wire.view(torch.float32)[1 + self.k :]

    @property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.indices, self.values
