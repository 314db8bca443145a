"""The interface of an exchange: one bucket's gradients in, their mean over the ranks out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...compress.backends import Workspace
from ...compress.codec import Codec
from ...compress.codecs.cast import Identity
from ...compress.feedback.base import FeedbackState
from ...compress.formats.layout import OwnedSlice
from ..comm.group import Group
from ..comm.ports import Port, Stages
from ..network.cost import Calibration, CodecSpeed, Estimate

IDENTITY = Identity()


@dataclass(frozen=True)
class BucketSpec:
    """A bucket, for an estimate.

    Attributes:
        codec, speed: the codec, and its measured speed.
        numel: elements.
        world_size: ranks.
        union: elements that any rank selects with a sparse codec, or elements of blocks that are not zero; 0: unknown.
        feedback: residuals are kept.
    """

    codec: Codec
    speed: CodecSpeed
    numel: int
    world_size: int
    union: int = 0
    feedback: bool = True


@dataclass(eq=False)
class ExchangeArgs:
    """The arguments of one bucket's exchange in one step.

    Attributes:
        grad: flat, of the exchange's `numel` elements; may be `out`.
        out: flat, as long as `grad`.
        extra: float32, the exchange's `extra` uncompressed elements.
        feedback: this rank's state for these elements; it encodes `grad`.
        owned: the state for each of the exchange's `owned_slices`; empty if none is kept.
        draw, owner_draw: random draws for the rank's own code, and for what it encodes for others (`codec.new_draw`).
        step: the number of this step, alike on all ranks.
    """

    grad: Tensor
    out: Tensor
    extra: Tensor
    feedback: FeedbackState
    owned: Sequence[FeedbackState]
    draw: Tensor
    owner_draw: Tensor
    step: int = 0

    def read_on_this_stream(self) -> None:
        """On a GPU: `grad` may have been made on the stream that encodes, and has been read on the current one."""
        if self.grad is not self.out:
            self.grad.record_stream(torch.cuda.current_stream(self.grad.device))


class Exchange(ABC):
    """Reduces one bucket's gradients to their mean, step after step. Owns every buffer that it needs.

    Args:
        numel: elements that are compressed, possibly 0.
        extra: float32 elements that travel uncompressed in the same messages.
        device: of the gradient.
        group: the ranks; a channel of the bucket's own if several buckets are in flight.
    """

    name: ClassVar[str]
    #: The codecs that it carries, for an error.
    needs: ClassVar[str] = "another codec"
    #: Fewer ranks receive about as much by one pass, in fewer messages: "auto" leaves it out there.
    least_ranks: ClassVar[int] = 2
    #: The host waits for sizes from the device.
    syncs_host: ClassVar[bool] = False
    #: Takes this class's place where the host must not wait for the device, as over NCCL.
    device_variant: ClassVar[type[Exchange] | None] = None
    #: It starts collectives, which must not begin before the ranks have compared their steps.
    collective: ClassVar[bool] = False
    #: It reads the step's number from the draws on the device, whether the codec draws or not.
    reads_step: bool = False
    #: Residuals are complete only once the mean is known (`conclude`).
    concludes: ClassVar[bool] = False

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        self.codec, self.numel, self.extra, self.device, self.group = codec, numel, extra, device, group
        self.rank, self.world_size = group.rank, group.size
        group.scratch.clear()
        self.workspaces = [IDENTITY.workspace(1, device)]
        self.ports: list[Port] = []

    @classmethod
    def carries(cls, codec: Codec) -> bool:
        """True if it can exchange this codec's wires."""
        raise NotImplementedError

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        """The predicted cost on this network."""
        raise NotImplementedError

    @property
    def owned_slices(self) -> list[OwnedSlice]:
        """The elements whose mean this rank encodes for others, and the weight of the residual that it keeps there."""
        return []

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks in the last step, before an entropy coder."""

    @property
    @abstractmethod
    def bytes_received(self) -> int:
        """Bytes received from other ranks in the last step, after an entropy decoder."""

    @abstractmethod
    def reduce(self, x: ExchangeArgs) -> Stages:
        """Write the ranks' mean of `x.grad` to `x.out`, and that of `x.extra` to `x.extra`."""

    def conclude(self, mean: Tensor, x: ExchangeArgs) -> None:  # noqa: B027 - most have nothing to do
        """Bring residuals to where they are after a step with this mean, of which only this rank lacks the last
        messages. By default they are there once all of its own are sent."""

    def union_of(self, out: Tensor) -> Tensor | None:
        """The size of the ranks' union with a sparse codec, or the elements of blocks that are not zero with a lossless
        one, from the last `out`: int64 []; None: unknown."""
        return None

    def counts(self) -> list[Tensor]:
        """Counts since this exchange was made, int64[2] each, to be added: entries skipped, and records not finite. The
        same list, of the same memory, in every step."""
        return [workspace.status for workspace in self.workspaces]

    def workspace(self, codec: Codec, numel: int) -> Workspace:
        """A workspace whose scratch memory is shared with other buckets."""
        workspace = codec.workspace(numel, self.device)
        workspace.scratch = self.group.scratch
        return workspace

    def bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def persistent_gather(self, output: Tensor, row: Tensor, ahead: int = 2) -> Port:
        """An all-gather that is alike in every step."""
        group = self._own_group("gather")
        self.ports.append(group.persistent_gather(output, row, ahead, group.entropy_coding))
        return self.ports[-1]

    def persistent_swap(self, output: Tensor, rows: Tensor, ahead: int = 2) -> Port:
        """An all-to-all that is alike in every step."""
        group = self._own_group("swap")
        self.ports.append(group.persistent_swap(output, rows, ahead, group.entropy_coding))
        return self.ports[-1]

    def _own_group(self, name: str) -> Group:
        """A channel for one stage, so that receives posted ahead for another are not mistaken for its own."""
        return self.group.channel(name) if self.group.is_channel else self.group

    def _decode_extra(self, rows: Tensor, out: Tensor) -> None:
        if self.extra:
            IDENTITY.decode_mean((rows,), out, self.workspaces[0])
