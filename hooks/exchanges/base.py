"""What every exchange of a bucket's gradients is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...compress.cast import Identity
from ...compress.codec import Codec
from ...compress.feedback import OwnedSlice
from ..comm.group import Group

Clock = Callable[[str], AbstractContextManager[None]]

IDENTITY = Identity()


def all_finite(x: Tensor) -> Tensor:
    """Whether every element is finite, as a tensor of one bool: one pass, and no memory."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    least, largest = torch.aminmax(x)  # either is NaN or infinite where any element is
    return least.isfinite() & largest.isfinite()


class Exchange(ABC):
    """One bucket's way from gradient to mean, as three phases that are called in this order.

    Args:
        codec: what compresses.
        numel: elements that are compressed, possibly 0.
        extra: float32 elements that travel as they are.
        device: where the gradient is.
        group: the ranks.
    """

    #: Whether it has begun already, before the three phases: then nothing is left to encode.
    under_way = False

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        self.codec, self.numel, self.extra, self.device, self.group = codec, numel, extra, device, group
        self.rank, self.world_size = group.rank, group.size
        self.workspaces = [IDENTITY.workspace(1, device)]

    def bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    @property
    def owned_slices(self) -> list[OwnedSlice]:
        """The elements whose mean this rank encodes for others, with the weight of the residual that it keeps there."""
        return []

    @property
    @abstractmethod
    def payload_bytes(self) -> int:
        """Bytes that this rank hands to collectives for other ranks, in the last step."""

    @property
    @abstractmethod
    def transfer_bytes(self) -> int:
        """Bytes that this rank receives from others, in the last step: the table's."""

    @abstractmethod
    def encode(self, grad: Tensor, extra: Tensor, residual: Tensor | None, draw: Tensor) -> None:
        """Compress `grad`; with a residual, by error feedback. `extra` is float32 of `self.extra` elements."""

    @abstractmethod
    def exchange(self, owned: Sequence[Tensor], owner_draw: Tensor, clock: Clock) -> None:
        """Talk to the other ranks. `owned` are the residuals of `owned_slices`, empty without feedback."""

    @abstractmethod
    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        """Write the mean to `out` and `extra_out` (float32)."""

    def union_of(self, out: Tensor) -> int:
        """How many elements any rank has selected, of a sparse codec's, by what was decoded last; else 0."""
        return 0

    def status(self) -> Tensor:
        """int64[2]: entries skipped and records not finite, since this exchange was made."""
        return torch.stack([workspace.status for workspace in self.workspaces]).sum(0)

    def _encode(self, x: Tensor, residual: Tensor | None, wire: Tensor, draw: Tensor, workspace: int) -> None:
        if residual is None:
            self.codec.encode(x, wire, draw, self.workspaces[workspace])
        else:
            self.codec.encode_feedback(x, residual, wire, draw, self.workspaces[workspace])

    def _decode_extra(self, rows: Tensor, out: Tensor) -> None:
        if self.extra:
            IDENTITY.decode_mean((rows,), out, self.workspaces[0])
