"""`split` where the host must not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.backends.dealing import Dealing
from ...compress.backends.places import used_places
from ...compress.codec import Codec
from ...compress.codecs.topk import Largest
from ...compress.feedback.base import Kept
from ..comm.group import Group
from ..comm.pipeline import Stages
from ..network.cost import Calibration, Estimate
from .base import BucketSpec, ExchangeArgs
from .entry_base import EntryExchange
from .fixed_base import FixedSizeExchange
from .partition import row_capacity


class FixedSizeSplit(FixedSizeExchange):
    """`Split` with owners of elements that are dealt to them, and each owner's k/P largest sums kept: as they are dealt
    by chance, those are about the k largest of all. (P-1)·(c+⌈k/P⌉)·(i+v) bytes received, c = k/P + 3·√(k/P).

    An entry that finds no room in the row to its owner stays in the residual; in the next step it has another owner.
    """

    name = "split"

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.rows: OwnerMessages | None = None
        self.room = 0
        ranks = self.world_size
        self.dealing = dealing = Dealing(numel, ranks, device)
        self.share = min(-(-self.k // ranks), dealing.span)
        self.back = Largest(self.share, self.dtype)
        sizes = self.back.part_bytes(dealing.span) if numel else (0, 0)
        self.row = self.bytes(sum(sizes) + 4 * extra)
        self.encoded, self.tail = self.row.split([sum(sizes), 4 * extra])
        self.received = group.gather_output(ranks, len(self.row), device=device)
        self.parts = self.received.split([*sizes, 4 * extra], dim=1)
        self.to_all = self.persistent_gather(self.received, self.row)
        if numel:
            self.workspaces.append(self.back.workspace(dealing.span, device))
            self.mean = torch.zeros(dealing.span, dtype=torch.float32, device=device)

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        shape, ranks = EntryExchange.shape(what), what.world_size
        span = -(-what.numel // ranks)
        capacity = row_capacity(shape.k, span, ranks, what.feedback)
        return network.selected(network.padded_split(shape, span, capacity, what.speed), what.speed, what.numel)

    @property
    def bytes_sent(self) -> int:
        if self.world_size == 1:
            return 0
        return (self.world_size - 1) * (self.rows.nbytes if self.rows else 0) + len(self.row)

    @property
    def bytes_received(self) -> int:
        return (self.world_size - 1) * ((self.rows.nbytes if self.rows else 0) + len(self.row))

    def reduce(self, x: ExchangeArgs) -> Stages:
        if self.extra:
            self.tail.view(torch.float32).copy_(x.extra)
        if self.numel:
            rows, turn = self.rows_for(x.feedback), x.draw[1]
            x.feedback.encode(self.select, x.grad, self.wire, x.draw, self.workspaces[1])
            rows.dealer.deal(self.entries, turn)
            yield rows.to_owners.start()
            rows.dealer.mean(rows.received, self.mean, x.out)
            self.back.encode(self.mean, self.encoded, x.owner_draw, self.workspaces[2])
        yield self.to_all.start()
        if self.numel:
            with x.feedback.open() as residual:
                means = self.parts[0], self.parts[1]
                rows.dealer.deliver(self.entries, turn, means, self.mean, self.rank, x.out, residual, self.counted)
                if x.feedback.follows_entries:
                    x.feedback.not_sent(used_places(self.indices, self.count)[0], rows.dealer.later)
        if self.extra:
            self._decode_extra(self.parts[2], x.extra)

    def rows_for(self, feedback: Kept) -> OwnerMessages:
        """The rows to the owners, with room for what does not wait in the residual."""
        room = row_capacity(self.k, self.dealing.span, self.world_size, feedback.keeps)
        if self.rows is None or self.room != room:
            self.room, self.rows = room, OwnerMessages(self, room)
        return self.rows

    def counts(self) -> list[Tensor]:
        found = [self.counted, self.workspaces[0].status]
        if self.rows is not None:
            found.append(self.rows.dealer.status)
        return found


class OwnerMessages:
    """Rows to the owners, with room for so many entries each: indices, then values."""

    def __init__(self, exchange: FixedSizeSplit, capacity: int) -> None:
        dealing, ranks = exchange.dealing, exchange.world_size
        codec = Largest(capacity, exchange.dtype)
        sizes = codec.part_bytes(dealing.span)
        self.capacity, self.nbytes = capacity, sum(sizes)
        self.sent, received = (exchange.bytes(ranks * self.nbytes).view(ranks, -1) for _ in range(2))
        self.received = (received[:, : sizes[0]], received[:, sizes[0] :])
        sent = self.sent[:, : sizes[0]], self.sent[:, sizes[0] :]
        self.dealer = exchange.kernels.dealer(dealing, exchange.k, exchange.share, codec, sent)
        self.to_owners = exchange.persistent_swap(received, self.sent.view(-1))
