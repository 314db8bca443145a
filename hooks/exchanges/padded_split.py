"""`split` where the host must not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.feedback import Kept, is_among, used_places
from ...compress.topk import Largest
from ..auto.cost import Calibration, Estimate
from ..comm.group import Group
from ..comm.pipeline import Stages
from .base import Bucketful, Operands
from .dealing import Dealing, Dealt, row_capacity
from .padded import Padded
from .selected import Selected


class PaddedSplit(Padded):
    """`Split` with owners of elements that are dealt to them, and each owner's k/P largest sums kept: as they are dealt
    by chance, those are about the k largest of all. (P-1)·(c+⌈k/P⌉)·(i+v) bytes received, c = k/P + 3·√(k/P).

    An entry that finds no room in the row to its owner stays in the residual; in the next step it has another owner.
    """

    name = "split"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.rows: Rows | None = None
        self.room = 0
        self.skipped = torch.zeros(2, dtype=torch.int64, device=device)
        self.skipped[:1].fill_(1)
        ranks = self.world_size
        self.dealing = dealing = Dealing(numel, ranks, device)
        share = min(-(-self.k // ranks), dealing.span)
        self.back = Largest(share, self.dtype)
        sizes = self.back.part_bytes(dealing.span) if numel else (0, 0)
        self.row = self.bytes(sum(sizes) + 4 * extra)
        self.encoded, self.tail = self.row.split([sum(sizes), 4 * extra])
        self.received = group.gathered(ranks, len(self.row), device=device)
        self.parts = self.received.split([*sizes, 4 * extra], dim=1)
        self.to_all = self.gather_port(self.received, self.row)
        if numel:
            self.workspaces.append(self.back.workspace(dealing.span, device))
            self.mean = torch.zeros(dealing.span, dtype=torch.float32, device=device)
            self.places = torch.zeros(ranks, share, dtype=torch.int32, device=device)
            self.numbers = torch.zeros(ranks, share, dtype=torch.float32, device=device)
            self.used = torch.zeros(ranks, dtype=torch.int32, device=device)

    @classmethod
    def estimate(cls, network: Calibration, what: Bucketful) -> Estimate:
        shape, ranks = Selected.shape(what), what.world_size
        span = -(-what.numel // ranks)
        capacity = row_capacity(shape.k, span, ranks, what.feedback)
        return network.selected(network.padded_split(shape, span, capacity, what.speed), what.speed, what.numel)

    @property
    def payload_bytes(self) -> int:
        if self.world_size == 1:
            return 0
        return (self.world_size - 1) * (self.rows.nbytes if self.rows else 0) + len(self.row)

    @property
    def transfer_bytes(self) -> int:
        return (self.world_size - 1) * ((self.rows.nbytes if self.rows else 0) + len(self.row))

    def reduce(self, x: Operands) -> Stages:
        self.tail.view(torch.float32).copy_(x.extra)
        if self.numel:
            rows, turn = self.rows_for(x.feedback), x.draw[1]
            x.feedback.encode(self.select, x.grad, self.wire, x.draw, self.workspaces[1])
            dealt = Dealt.of(self.dealing, (self.count, self.indices, self.values), rows.capacity, turn)
            rows.pack(dealt)
            yield rows.to_owners.start()
            dealt.moved()
            rows.codec.decode_mean(rows.parts, self.mean, rows.workspace)
            self.back.encode(self.mean, self.encoded, x.owner_draw, self.workspaces[2])
        yield self.to_all.start()
        if self.numel:
            with x.feedback.open():
                delivered = self._unpack(x, turn)
                self._give_back(x.feedback, dealt, rows, delivered)
        if self.extra:
            self._decode_extra(self.parts[2], x.extra)

    def rows_for(self, feedback: Kept) -> Rows:
        """The rows to the owners, with room for what does not wait in the residual."""
        room = row_capacity(self.k, self.dealing.span, self.world_size, feedback.keeps)
        if self.rows is None or self.room != room:
            self.room, self.rows = room, Rows(self, room)
        return self.rows

    def _unpack(self, x: Operands, turn: Tensor) -> Tensor:
        """Write what the owners have sent to `x.out`, and return its keys, ascending."""
        dealing, numbers = self.dealing, self.numbers
        self.kernels.unpack_indices(self.parts[0], 0, dealing.span, self.used, self.places)
        self.kernels.unpack_values(self.parts[1], self.dtype, numbers)
        places = self.places.long()  # -1 where there is none
        highest = places.cummax(1).values
        indices = dealing.indices(places, turn)
        sound = (places >= 0) & (indices < self.numel)
        sound[:, 1:] &= places[:, 1:] > highest[:, :-1]
        self.counted[0] += self.used.clamp(max=places.shape[1]).sum() - sound.sum()
        at = torch.where(sound, indices, torch.arange(places.numel(), device=self.device).view_as(places) % self.numel)
        self._write(x.out, at.view(-1), numbers.view(-1), sound.view(-1))
        if self.dtype != torch.float32:  # what rounding takes from a mean stays with its owner
            mine, kept = at[self.rank], sound[self.rank]
            rest = self.world_size * (self.mean[places[self.rank].clamp(min=0)] - numbers[self.rank])
            x.feedback.give_back(mine, torch.where(kept, rest, -0.0))
        return (dealing.first + highest).view(-1)

    def _give_back(self, feedback: Kept, dealt: Dealt, rows: Rows, delivered: Tensor) -> None:
        """What has not reached the mean is to be sent later."""
        if not feedback.keeps:
            return
        arrived = dealt.sent & is_among(dealt.keys, delivered)
        rest = torch.where(arrived, rows.rounded(dealt), dealt.values)
        at = torch.where(dealt.used, dealt.indices, torch.arange(self.k, device=self.device))
        feedback.give_back(at, torch.where(dealt.used, rest, -0.0))
        later = torch.zeros_like(arrived)
        later[dealt.order] = dealt.used & ~arrived & dealt.values.isfinite()
        feedback.not_sent(used_places(self.indices, self.count)[0], later)

    def counts(self) -> list[Tensor]:
        found = [self.counted, self.workspaces[0].status]
        if self.rows is not None:  # what is not finite in the mean is counted as it is written
            found.append(self.rows.workspace.status * self.skipped)
        return found


class Rows:
    """Rows to the owners: for each, indices and values."""

    def __init__(self, exchange: PaddedSplit, capacity: int) -> None:
        ranks, span, device = exchange.world_size, exchange.dealing.span, exchange.device
        self.capacity, self.kernels, self.span = capacity, exchange.kernels, span
        self.codec = Largest(capacity, exchange.dtype)
        self.workspace = self.codec.workspace(span, device)
        sizes = self.codec.part_bytes(span)
        self.nbytes = sum(sizes)
        self.sent, received = (exchange.bytes(ranks * self.nbytes).view(ranks, -1) for _ in range(2))
        self.index_rows, self.value_rows = self.sent.split(sizes, dim=1)
        self.parts = received.split(sizes, dim=1)
        self.to_owners = exchange.swap_port(received, self.sent.view(-1))

    def pack(self, dealt: Dealt) -> None:
        for owner, (indices, values) in enumerate(zip(self.index_rows, self.value_rows, strict=True)):
            self.kernels.pack_indices(dealt.places[owner], dealt.counts[owner : owner + 1], 0, self.span, indices)
            self.kernels.pack_values(dealt.numbers[owner], self.codec.values, values)

    def rounded(self, dealt: Dealt) -> Tensor:
        """What rounding has taken from each entry that was sent; anything elsewhere."""
        if self.codec.values == torch.float32:
            return torch.full_like(dealt.values, -0.0)
        told = torch.empty_like(dealt.numbers)
        self.kernels.unpack_values(self.value_rows, self.codec.values, told)
        return dealt.values - told[dealt.owner, dealt.slot.clamp(max=self.capacity - 1)]
