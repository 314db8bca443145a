"""The exchanges of entries where the host must not wait for the device, as over NCCL.

What travels has a size that the host knows beforehand, and how much of it is used is known on the device alone. Where
more is to travel than fits, the rest waits in the residual: a later step sends it. Without a residual there is room for
all that can come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.backends import entries_for
from ...compress.codec import Codec, SparseCodec
from ..comm.group import Group
from .base import Exchange


class FixedSizeExchange(Exchange):
    """The codec selects, and its entries travel in rows of fixed size.

    Attributes:
        count, indices, values: what the codec has selected here: how many, int32 [1], and as many of int32 and float32
            [k], ascending; zeros behind them.
        row: what goes to all ranks.
        room: for how many entries, of what varies: in each row to an owner, or in the union.
    """

    row: Tensor
    room: int

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        if not isinstance(codec, SparseCodec):
            raise TypeError(f"{codec} does not select entries, which {type(self).__name__} exchanges")
        self.select, self.dtype, self.kernels = codec.raw_entries, codec.value_dtype, entries_for(device)
        self.k = codec.k(numel) if numel else 0
        self.wire = self.bytes(self.select.wire_bytes(numel) if numel else 0)
        self.count, self.indices = self.wire.view(torch.int32)[: 1 + self.k].split([min(1, numel), self.k])
        self.values = self.wire.view(torch.float32)[1 + self.k :]
        if numel:
            self.workspaces.append(self.select.workspace(numel, device))
        #: Entries skipped, and means that were not finite.
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        return isinstance(codec, SparseCodec)

    @property
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.indices, self.values

    def counts(self) -> list[Tensor]:
        return [self.counted]
