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

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from ..compress.cast import Identity
from ..compress.codec import Codec
from ..compress.feedback import OwnedSlice
from ..compress.topk import TopK
from .entries import Carrier, Entries
from .group import Group
from .sparse import fill

Clock = Callable[[str], AbstractContextManager[None]]

IDENTITY = Identity()
#: Steps after which `Split` balances the owners' ranges again.
BALANCE_EVERY = 64


def possible_exchanges(codec: Codec) -> tuple[str, ...]:
    """The exchanges that can carry a codec's wire."""
    if codec.lossless:
        return "dense", "gather", "two_pass"
    return ("gather", "two_pass", "dense") if codec.block_size is not None else ("gather", "union", "split", "dense")


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
        assert block is not None  # choose_exchange saw to it
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


class Sparse(Exchange):
    """What `Union` and `Split` share: the codec selects, and its entries travel one by one, not as a wire."""

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        assert isinstance(codec, TopK)  # check_exchange saw to it
        self.select = replace(codec, indices="plain", values=torch.float32)
        self.carrier = Carrier(max(1, numel), codec.values, device, group)
        self.k = codec.k(numel) if numel else 0
        self.wire = self.bytes(self.select.wire_bytes(numel) if numel else 0)
        if numel:
            self.workspaces.append(self.select.workspace(numel, device))
        self.extras = torch.zeros(extra, dtype=torch.float32, device=device)
        self.residual: Tensor | None = None
        self.result = self.carrier.room.entries("result", 0)
        self.moved = (0, 0)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        #: Entries in the union of the ranks', in the last step; 0 before it is known.
        self.union_size = 0

    @property
    def payload_bytes(self) -> int:
        return self.carrier.sent - self.moved[0]

    @property
    def transfer_bytes(self) -> int:
        return self.carrier.received - self.moved[1]

    def encode(self, grad: Tensor, extra: Tensor, residual: Tensor | None, draw: Tensor) -> None:
        self.residual = residual
        self.extras.copy_(extra)
        if not self.numel:
            return
        workspace = self.workspaces[1]
        if residual is None:
            self.select.encode(grad, self.wire, draw, workspace)
        else:
            self.select.encode_feedback(grad, residual, self.wire, draw, workspace)

    def exchange(self, owned: Sequence[Tensor], owner_draw: Tensor, clock: Clock) -> None:
        carrier = self.carrier
        self.moved = carrier.sent, carrier.received
        with clock("exchange"):
            if self.numel:
                indices, values = (
                    self.wire.view(torch.int32)[1 : 1 + self.k],
                    self.wire.view(torch.float32)[1 + self.k :],
                )
                count = int(self.wire.view(torch.int32)[0])
                self.reduce(Entries(indices[:count], values[:count]))
                self.counts[0] = carrier.skipped
                self.counts[1] += (~self.result.values.isfinite()).sum()
            elif self.extra:
                carrier.all_reduce(self.extras)

    @abstractmethod
    def reduce(self, entries: Entries) -> None:
        """Bring this rank's entries together with the others', into `result` (means), and sum `extras`."""

    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        if self.numel:
            fill(out, self.result)
        extra_out.copy_(self.extras.mul_(1.0 / self.world_size))

    def union_of(self, out: Tensor) -> int:
        return self.union_size

    def status(self) -> Tensor:
        return self.counts


class Union(Sparse):
    """Where any rank has selected an element, all give what they have of it: more arrives than was selected, for as
    many bytes."""

    def reduce(self, entries: Entries) -> None:
        carrier, residual = self.carrier, self.residual
        union = carrier.gather(entries, self.k, with_values=False).indices
        mine = carrier.on_union(entries, union)
        if residual is not None:
            at = union.long()
            mine += residual[at]
            residual[at] = torch.where(mine.isfinite(), 0.0, residual[at])
        total = torch.cat([mine, self.extras])
        carrier.all_reduce(total)
        self.extras.copy_(total[len(mine) :])
        self.union_size = len(mine)
        self.result = Entries(union, total[: len(mine)].mul_(1.0 / self.world_size))


class Split(Sparse):
    """The owners of index ranges sum what falls there, and of all sums together the k largest are kept. What a rank
    sent for nothing goes back to its residual, and what rounding takes from a mean to its owner's."""

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.step = 0
        self.bounds: list[int] = []
        self.guess: int | None = None

    def reduce(self, entries: Entries) -> None:
        carrier, residual = self.carrier, self.residual
        if self.step % BALANCE_EVERY == 0:
            self.bounds = carrier.balanced_bounds(entries.indices)
        self.step += 1
        owned = carrier.to_owners(entries, self.bounds, residual)
        kept, counts, self.guess = carrier.cut(owned.values, self.k, self.guess)
        owned = owned[kept]
        means = Entries(owned.indices, owned.values * (1.0 / self.world_size))
        self.result = carrier.from_owners(means, counts, self.bounds)
        self.union_size = carrier.union_size
        if residual is not None:
            if carrier.dtype != torch.float32:
                first = sum(counts[: self.rank])
                rest = owned.values - self.world_size * self.result.values[first : first + len(owned)]
                at = owned.indices.long()
                residual[at] += torch.where(rest.isfinite(), rest, 0.0)
            carrier.kernels.put_back((entries.indices, entries.values), self.result.indices, residual)
        if self.extra:
            carrier.all_reduce(self.extras)


class Hierarchical(Exchange):
    """Full precision inside a node, compression between nodes: each rank of a node reduces a slice of the gradient, and
    exchanges it, compressed, with the ranks of other nodes that have the same slice.

    Args:
        inner: the exchange between nodes.
        inside, between: the ranks of this node, and those with this rank's slice.
    """

    def __init__(
        self,
        inner: type[Exchange],
        codec: Codec,
        numel: int,
        extra: int,
        device: torch.device,
        inside: Group,
        between: Group,
    ) -> None:
        super().__init__(codec, numel, extra, device, inside)
        self.slice = -(-numel // inside.size)
        self.start = min(self.rank * self.slice, numel)
        own = min(self.slice, numel - self.start)
        self.inner = inner(codec, own, extra, device, between)
        self.sent = torch.zeros(inside.size * self.slice, dtype=torch.float32, device=device)
        self.slices = self.bytes(4 * self.sent.numel()).view(inside.size, 4 * self.slice)
        self.mean = torch.zeros(self.slice, dtype=torch.float32, device=device)
        self.extras = torch.zeros(extra, dtype=torch.float32, device=device)
        self.means = torch.zeros(inside.size, self.slice, dtype=torch.float32, device=device)
        self.draw: Tensor | None = None

    @property
    def owned_slices(self) -> list[OwnedSlice]:
        own, size = self.inner.numel, self.world_size
        if not own:
            return []
        inner = [(self.start + start, n, weight * size) for start, n, weight in self.inner.owned_slices]
        return [(self.start, own, size), *inner]

    @property
    def payload_bytes(self) -> int:
        return self.inner.payload_bytes + 4 * (self.sent.numel() + self.extra)

    @property
    def transfer_bytes(self) -> int:
        """Between nodes alone."""
        return self.inner.transfer_bytes

    def encode(self, grad: Tensor, extra: Tensor, residual: Tensor | None, draw: Tensor) -> None:
        self.extras.copy_(extra)
        self.draw = draw
        mine = self.sent[: self.numel]
        mine.copy_(grad)
        if residual is not None:  # what other exchanges and other slices have left behind
            mine += residual
            residual.masked_fill_(mine.isfinite(), 0.0)

    def exchange(self, owned: Sequence[Tensor], owner_draw: Tensor, clock: Clock) -> None:
        assert self.draw is not None
        own = self.inner.numel
        with clock("exchange"):
            self.group.all_to_all(self.slices, self.sent.view(torch.uint8)).wait()
            self.group.all_reduce(self.extras).wait()
            self.extras.mul_(1.0 / self.world_size)
            if self.slice:
                IDENTITY.decode_mean((self.slices,), self.mean, self.workspaces[0])
        with clock("encode"):
            self.inner.encode(self.mean[:own], self.extras, owned[0] if owned else None, self.draw)
        self.inner.exchange(owned[1:], owner_draw, clock)
        with clock("decode"):
            self.inner.decode(self.mean[:own], self.extras)
        with clock("exchange"):
            self.group.all_gather(self.means, self.mean).wait()

    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        out.copy_(self.means.view(-1)[: self.numel])
        extra_out.copy_(self.extras)

    def status(self) -> Tensor:
        return self.inner.status()


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

    def exchange(self, owned: Sequence[Tensor], owner_draw: Tensor, clock: Clock) -> None:
        with clock("exchange"):
            self.group.all_reduce(self.total).wait()

    def decode(self, out: Tensor, extra_out: Tensor) -> None:
        self.total.mul_(1.0 / self.world_size)
        self.not_finite[1] += (~self.total.isfinite()).sum()
        out.copy_(self.total[: self.numel])
        extra_out.copy_(self.total[self.numel :])

    def status(self) -> Tensor:
        return self.not_finite


EXCHANGES: dict[str, type[Exchange]] = {
    "gather": Gather,
    "two_pass": TwoPass,
    "union": Union,
    "split": Split,
    "dense": Dense,
}
