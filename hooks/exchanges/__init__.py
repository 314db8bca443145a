"""The exchanges: how compressed buckets become one mean on every rank.

| name     | how                                                                       | received per rank       |
| -------- | ------------------------------------------------------------------------- | ----------------------- |
| gather   | all-gather of the wires, part by part (top-k: indices, then values)       | (P-1)·w                 |
| two_pass | all-to-all of slices of the wire, mean, encode again, all-gather          | 2·w·(P-1)/P             |
| union    | all-gather of indices; all-reduce of all that ranks have at their union   | (P-1)·k·i + 8·u·(P-1)/P |
| split    | entries to their owners, who sum them, keep the k largest and share them  | 2·k·(i+v)·(P-1)/P       |
| dense    | all-reduce in float32                                                     | 8·N·(P-1)/P             |

with w the bytes of a wire, N the elements, P the world size; for top-k, k entries of i and v bytes for index and value,
u in the union of all ranks'. `two_pass` is DoubleSqueeze (Tang et al., ICML 2019) with all ranks as servers, `split`
Ok-Topk (Li & Hoefler, PPoPP 2022). In all of them replicas end bit-identical; gather, two_pass and split sum in rank
order.

An exchange serves one length, codec and group, and owns every buffer it needs. `extra` float32 elements travel
uncompressed beside the codec's wire, in the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.feedback import OwnedSlice
from ...compress.topk import TopK
from ..comm.group import Group, Work
from .base import Clock, Exchange, all_finite
from .selected import Split, Union


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
        self.received = [group.gathered(self.world_size, length, device=device) for length in lengths]

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

    def exchange(self, owned: Sequence[Tensor], owner_draw: Tensor, clock: Clock) -> None:
        with clock("exchange"):
            works = [self.group.all_gather(into, part) for part, into in zip(self.sent, self.received, strict=True)]
            for work in works:
                work.wait()

    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        if self.numel:
            wires = [gathered[:, :size] for gathered, size in zip(self.received, self.sizes, strict=True)]
            self.codec.decode_mean(wires, out, self.workspaces[1])
        self._decode_extra(self.received[-1][:, self.sizes[-1] :], extra_out)

    def union_of(self, out: Tensor) -> int:
        return int(torch.count_nonzero(out)) if isinstance(self.codec, TopK) else 0


class TwoPass(Exchange):
    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        block = codec.block_size
        assert block is not None  # check_exchange saw to it
        blocks = -(-numel // block)
        self.slice = -(-blocks // self.world_size) * block
        slice_bytes = codec.wire_bytes(self.slice) if numel else 0
        self.start, own = self._range(self.rank)
        self.wire = self.bytes(self.world_size * slice_bytes)  # whole slices: padded behind the last record
        self.slices = self.bytes(self.world_size * slice_bytes).view(self.world_size, slice_bytes)
        self.mean = torch.zeros(own, dtype=torch.float32, device=device)
        self.row = self.bytes(slice_bytes + 4 * extra)
        self.received = group.gathered(self.world_size, self.row.numel(), device=device)
        self.slice_bytes = slice_bytes
        if numel:
            self.workspaces.append(codec.workspace(numel, device))
        if own:
            self.workspaces.append(codec.workspace(own, device))

    def _range(self, rank: int) -> tuple[int, int]:
        start = min(rank * self.slice, self.numel)
        return start, min(self.slice, self.numel - start)

    @property
    def owned_slices(self) -> list[OwnedSlice]:
        return [(self.start, self.mean.numel(), self.world_size)] if self.mean.numel() else []

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

    def exchange(self, owned: Sequence[Tensor], owner_draw: Tensor, clock: Clock) -> None:
        own = self.mean.numel()
        if self.numel:
            with clock("exchange"):
                self.group.all_to_all(self.slices, self.wire).wait()
        if own:
            size = self.codec.wire_bytes(own)
            with clock("decode"):
                self.codec.decode_mean((self.slices[:, :size],), self.mean, self.workspaces[2])
            with clock("encode"):
                self._encode(self.mean, owned[0] if owned else None, self.row[:size], owner_draw, workspace=2)
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
    """float32 all-reduce; the codec only waits. In place where the gradient is float32 and nothing travels beside it.

    Attributes:
        settled: whether the last mean was finite, so that no rank can have kept anything back. Not known on GPUs, as
            the host would have to wait for them.
    """

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.memory: Tensor | None = None  # where the sum cannot be made in place
        self.total: Tensor | None = None
        self.work: Work | None = None
        self.not_finite = torch.zeros(2, dtype=torch.int64, device=device)
        self.settled = False

    @property
    def under_way(self) -> bool:  # type: ignore[override]
        return self.work is not None

    @property
    def payload_bytes(self) -> int:
        return 4 * (self.numel + self.extra) if self.world_size > 1 else 0

    @property
    def transfer_bytes(self) -> int:
        return 2 * 4 * (self.numel + self.extra) * (self.world_size - 1) // self.world_size

    def start(self, grad: Tensor, group: Group) -> None:
        """Begin at once, on the caller's thread and a group of its own; `encode` falls away, `exchange` then waits.

        Args:
            grad: float32, alone: nothing travels beside it.
        """
        self.total, self.work = grad, group.all_reduce(grad)

    def encode(self, grad: Tensor, extra: Tensor, residual: Tensor | None, draw: Tensor) -> None:
        if grad.dtype == torch.float32 and not self.extra:
            self.total = grad
            return
        if self.memory is None:
            self.memory = torch.zeros(self.numel + self.extra, dtype=torch.float32, device=self.device)
        self.total = self.memory
        self.total[: self.numel].copy_(grad)
        self.total[self.numel :].copy_(extra)

    def exchange(self, owned: Sequence[Tensor], owner_draw: Tensor, clock: Clock) -> None:
        assert self.total is not None
        with clock("exchange"):
            work, self.work = self.work or self.group.all_reduce(self.total), None
            work.wait()

    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        total, self.total = self.total, None  # DDP's memory must not be kept
        assert total is not None
        total.mul_(1.0 / self.world_size)
        finite = all_finite(total)
        self.not_finite[1] += ~finite
        if not total.is_cuda:
            self.settled = bool(finite)
        if total is not out:
            out.copy_(total[: self.numel])
            extra_out.copy_(total[self.numel :])

    def status(self) -> Tensor:
        return self.not_finite


EXCHANGES: dict[str, type[Exchange]] = {
    "gather": Gather,
    "two_pass": TwoPass,
    "union": Union,
    "split": Split,
    "dense": Dense,
}


def possible_exchanges(codec: Codec) -> tuple[str, ...]:
    """The exchanges that can carry a codec's wire."""
    if codec.lossless:
        return "dense", "gather", "two_pass"
    if codec.block_size is not None:
        return "gather", "two_pass", "dense"
    return ("gather", "union", "split", "dense") if isinstance(codec, TopK) else ("gather", "dense")
