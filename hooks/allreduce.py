"""The exchanges: how compressed buckets become one mean on every rank.

| name     | how                                                                       | received per rank |
| -------- | ------------------------------------------------------------------------- | ----------------- |
| gather   | all-gather of the wires, part by part (top-k: indices, then values)       | (P-1)·w           |
| two_pass | all-to-all of slices of the wire, mean, encode again, all-gather          | 2·w·(P-1)/P       |
| dense    | all-reduce in float32                                                     | 2·N·4·(P-1)/P     |

with w the bytes of a wire, N the elements and P the world size. `two_pass` is DoubleSqueeze (Tang et al., ICML 2019)
with all ranks as servers. In all three, replicas end bit-identical; gather and two_pass sum in rank order.

An exchange serves one length, codec and group, and owns every buffer it needs. `extra` float32 elements travel
uncompressed beside the codec's wire, in the same messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..compress.cast import Identity
from ..compress.codec import Codec
from .group import Group

Clock = Callable[[str], AbstractContextManager[None]]

IDENTITY = Identity()


def choose_exchange(exchange: str, codec: Codec, world_size: int) -> str:
    """What `exchange` means for a codec: "auto" takes the fewest bytes received, and one pass where they are equal.

    Raises:
        ValueError: unknown, or impossible for this codec.
    """
    if exchange == "auto":
        if codec.lossless:
            return "dense"
        return "gather" if codec.block_size is None or world_size <= 2 else "two_pass"
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r}: expected 'auto' or one of {', '.join(map(repr, EXCHANGES))}")
    if exchange == "two_pass" and codec.block_size is None:
        raise ValueError(f"exchange='two_pass' cuts wires into slices, and {codec} has none: use exchange='gather'")
    return exchange


class Exchange(ABC):
    """One bucket's way from gradient to mean, as three phases that are called in this order.

    Args:
        codec: what compresses.
        numel: elements that are compressed, possibly 0.
        extra: float32 elements that travel as they are.
        device: where the gradient is.
        group: the ranks.
    """

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        self.codec, self.numel, self.extra, self.device, self.group = codec, numel, extra, device, group
        self.rank, self.world_size = group.rank, group.size
        self.workspaces = [IDENTITY.workspace(1, device)]

    def bytes(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    @property
    def owned_slice(self) -> tuple[int, int] | None:
        """Start and length of the elements whose mean this rank encodes again; None where nobody does."""
        return None

    @property
    @abstractmethod
    def payload_bytes(self) -> int:
        """Bytes that this rank hands to collectives for other ranks."""

    @property
    @abstractmethod
    def transfer_bytes(self) -> int:
        """Bytes that this rank sends, and as many it receives, in the table's terms."""

    @abstractmethod
    def encode(self, grad: Tensor, extra: Tensor, residual: Tensor | None, draw: Tensor) -> None:
        """Compress `grad`; with a residual, by error feedback. `extra` is float32 of `self.extra` elements."""

    @abstractmethod
    def exchange(self, owned: Tensor | None, owner_draw: Tensor, clock: Clock) -> None:
        """Talk to the other ranks. `owned` is the residual of `owned_slice`, None without feedback."""

    @abstractmethod
    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        """Write the mean to `out` and `extra_out` (float32)."""

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


class Gather(Exchange):
    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.sizes = codec.part_bytes(numel) if numel else (0,)
        if numel:
            self.workspaces.append(codec.workspace(numel, device))
        # One buffer for the whole wire, its parts one after the other, and the extra elements behind the last.
        self.row = self.bytes(sum(self.sizes) + 4 * extra)
        self.wire, tail = self.row.split([sum(self.sizes), 4 * extra])
        self.tail = tail.view(torch.float32)
        lengths = (*self.sizes[:-1], self.sizes[-1] + 4 * extra)
        self.sent = self.row.split(lengths)
        self.received = [self.bytes(self.world_size * length).view(self.world_size, length) for length in lengths]

    @property
    def payload_bytes(self) -> int:
        return self.row.numel() if self.world_size > 1 else 0

    @property
    def transfer_bytes(self) -> int:
        return (self.world_size - 1) * self.row.numel()

    def encode(self, grad: Tensor, extra: Tensor, residual: Tensor | None, draw: Tensor) -> None:
        if self.numel:
            self._encode(grad, residual, self.wire, draw, workspace=1)
        self.tail.copy_(extra)

    def exchange(self, owned: Tensor | None, owner_draw: Tensor, clock: Clock) -> None:
        with clock("exchange"):
            for part, gathered in zip(self.sent, self.received, strict=True):
                self.group.all_gather(gathered, part).wait()

    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        if self.numel:
            wires = [gathered[:, :size] for gathered, size in zip(self.received, self.sizes, strict=True)]
            self.codec.decode_mean(wires, out, self.workspaces[1])
        self._decode_extra(self.received[-1][:, self.sizes[-1] :], extra_out)


class TwoPass(Exchange):
    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        block = codec.block_size
        assert block is not None  # choose_exchange saw to it
        blocks = -(-numel // block)
        self.slice = -(-blocks // self.world_size) * block
        slice_bytes = codec.wire_bytes(self.slice) if numel else 0
        self.start, own = self._range(self.rank)
        self.wire = self.bytes(self.world_size * slice_bytes)  # whole slices: padded behind the last record
        self.slices = self.bytes(self.world_size * slice_bytes).view(self.world_size, slice_bytes)
        self.mean = torch.zeros(own, dtype=torch.float32, device=device)
        self.row = self.bytes(slice_bytes + 4 * extra)
        self.received = self.bytes(self.world_size * self.row.numel()).view(self.world_size, -1)
        self.slice_bytes = slice_bytes
        if numel:
            self.workspaces.append(codec.workspace(numel, device))
        if own:
            self.workspaces.append(codec.workspace(own, device))

    def _range(self, rank: int) -> tuple[int, int]:
        start = min(rank * self.slice, self.numel)
        return start, min(self.slice, self.numel - start)

    @property
    def owned_slice(self) -> tuple[int, int] | None:
        return (self.start, self.mean.numel()) if self.mean.numel() else None

    @property
    def payload_bytes(self) -> int:
        if self.world_size == 1:
            return 0
        return self.wire.numel() // self.world_size * (self.world_size - 1) + self.row.numel()

    @property
    def transfer_bytes(self) -> int:
        return (self.world_size - 1) * (self.slice_bytes + self.row.numel())

    def encode(self, grad: Tensor, extra: Tensor, residual: Tensor | None, draw: Tensor) -> None:
        if self.numel:
            self._encode(grad, residual, self.wire[: self.codec.wire_bytes(self.numel)], draw, workspace=1)
        self.row[self.slice_bytes :].view(torch.float32).copy_(extra)

    def exchange(self, owned: Tensor | None, owner_draw: Tensor, clock: Clock) -> None:
        own = self.mean.numel()
        if self.numel:
            with clock("exchange"):
                self.group.all_to_all(self.slices, self.wire).wait()
        if own:
            size = self.codec.wire_bytes(own)
            with clock("decode"):
                self.codec.decode_mean((self.slices[:, :size],), self.mean, self.workspaces[2])
            with clock("encode"):
                self._encode(self.mean, owned, self.row[:size], owner_draw, workspace=2)
        with clock("exchange"):
            self.group.all_gather(self.received, self.row).wait()

    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        if not self.numel:
            pass
        elif not self.extra:  # the slices lie end to end: a wire of the whole bucket
            wire = self.received.view(1, -1)[:, : self.codec.wire_bytes(self.numel)]
            self.codec.decode_mean((wire,), out, self.workspaces[1])
        else:
            for rank in range(self.world_size):
                start, length = self._range(rank)
                if length:
                    wire = self.received[rank : rank + 1, : self.codec.wire_bytes(length)]
                    self.codec.decode_mean((wire,), out[start : start + length], self.workspaces[1])
        self._decode_extra(self.received[:, self.slice_bytes :], extra_out)


class Dense(Exchange):
    """float32 all-reduce; the codec only waits."""

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.total = torch.zeros(numel + extra, dtype=torch.float32, device=device)
        self.not_finite = torch.zeros(2, dtype=torch.int64, device=device)

    @property
    def payload_bytes(self) -> int:
        return 4 * self.total.numel() if self.world_size > 1 else 0

    @property
    def transfer_bytes(self) -> int:
        return 2 * 4 * self.total.numel() * (self.world_size - 1) // self.world_size

    def encode(self, grad: Tensor, extra: Tensor, residual: Tensor | None, draw: Tensor) -> None:
        self.total[: self.numel].copy_(grad)
        self.total[self.numel :].copy_(extra)

    def exchange(self, owned: Tensor | None, owner_draw: Tensor, clock: Clock) -> None:
        with clock("exchange"):
            self.group.all_reduce(self.total).wait()

    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        self.total.mul_(1.0 / self.world_size)
        self.not_finite[1] += (~self.total.isfinite()).sum()
        out.copy_(self.total[: self.numel])
        extra_out.copy_(self.total[self.numel :])

    def status(self) -> Tensor:
        return self.not_finite


EXCHANGES: dict[str, type[Exchange]] = {"gather": Gather, "two_pass": TwoPass, "dense": Dense}
