"""What every exchange of a bucket's gradients is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...compress.backends import backend_for
from ...compress.codec import Codec
from ...compress.codecs.cast import Identity
from ...compress.feedback.base import Kept
from ...compress.formats.layout import OwnedSlice
from ..comm.group import Group
from ..comm.pipeline import Stages
from ..comm.ports import Collective, PersistentMessage
from ..network.cost import Calibration, CodecSpeed, Estimate

IDENTITY = Identity()


def all_finite(x: Tensor) -> Tensor:
    """Whether every element is finite, bool []."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    return backend_for(x.device).vectors.all_finite(x)


@dataclass(frozen=True)
class BucketSpec:
    """What an estimate is of.

    Attributes:
        codec, speed: what compresses, and how fast.
        numel: elements.
        world_size: ranks.
        union: elements that any rank selects, of a sparse codec's; 0: not known.
        feedback: whether residuals are kept.
    """

    codec: Codec
    speed: CodecSpeed
    numel: int
    world_size: int
    union: int = 0
    feedback: bool = True


@dataclass(eq=False)
class ExchangeArgs:
    """What an exchange is given of one bucket in one step.

    Attributes:
        grad: flat, of the exchange's `numel` elements; may be `out`.
        out: flat, of as many.
        extra: float32, of the exchange's `extra` elements.
        feedback: what this rank keeps of these elements; it encodes `grad`.
        owned: the same for each of the exchange's `owned_slices`; empty where nothing is kept.
        draw, owner_draw: of the rank's own code, and of what it encodes for others (`codec.new_draw`).
    """

    grad: Tensor
    out: Tensor
    extra: Tensor
    feedback: Kept
    owned: Sequence[Kept]
    draw: Tensor
    owner_draw: Tensor


class Exchange(ABC):
    """One bucket's way from gradient to mean. It owns every buffer it needs, and serves the same bucket step by step.

    Args:
        codec: what compresses.
        numel: elements that are compressed, possibly 0.
        extra: float32 elements that travel as they are, in the same messages.
        device: where the gradient is.
        group: the ranks; a channel of its own, where other buckets are under way besides.
    """

    name: ClassVar[str]
    #: Whether the host reads sizes from the device on the way.
    syncs_host: ClassVar[bool] = False
    #: What does the same, and takes its place, where the host must not read: as over NCCL.
    device_variant: ClassVar[type[Exchange] | None] = None
    #: Whether it starts collectives, which must not begin before ranks have compared what they do.
    collective: ClassVar[bool] = False

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        self.codec, self.numel, self.extra, self.device, self.group = codec, numel, extra, device, group
        self.rank, self.world_size = group.rank, group.size
        self.workspaces = [IDENTITY.workspace(1, device)]
        self.ports: list[PersistentMessage | Collective] = []

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        """Whether it can exchange what this codec encodes."""
        raise NotImplementedError

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        """What it will take."""
        raise NotImplementedError

    @property
    def owned_slices(self) -> list[OwnedSlice]:
        """The elements whose mean this rank encodes for others, with the weight of the residual that it keeps there."""
        return []

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes that this rank hands to collectives for other ranks, in the last step."""

    @property
    @abstractmethod
    def bytes_received(self) -> int:
        """Bytes that this rank receives from others, in the last step."""

    @abstractmethod
    def reduce(self, x: ExchangeArgs) -> Stages:
        """Write the ranks' mean of `x.grad` to `x.out`, and that of `x.extra` to `x.extra`."""

    def union_of(self, out: Tensor) -> Tensor | None:
        """How many elements any rank has selected, of a sparse codec's, by what was written to `out` last: int64 []; or
        None: it does not know."""
        return None

    def counts(self) -> list[Tensor]:
        """int64[2] each, which add up: entries skipped and records not finite, since this exchange was made."""
        return [workspace.status for workspace in self.workspaces]

    def bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def persistent_gather(self, output: Tensor, row: Tensor, ahead: int = 2) -> PersistentMessage | Collective:
        """For all-gathers that are alike in every step."""
        self.ports.append(self._own_group("gather").persistent_gather(output, row, ahead))
        return self.ports[-1]

    def persistent_swap(self, output: Tensor, rows: Tensor, ahead: int = 2) -> PersistentMessage | Collective:
        """For all-to-alls that are alike in every step."""
        self.ports.append(self._own_group("swap").persistent_swap(output, rows, ahead))
        return self.ports[-1]

    def _own_group(self, name: str) -> Group:
        """So that receives posted ahead for one stage are not taken for another's."""
        return self.group.channel(name) if self.group.is_channel else self.group

    def _decode_extra(self, rows: Tensor, out: Tensor) -> None:
        if self.extra:
            IDENTITY.decode_mean((rows,), out, self.workspaces[0])
