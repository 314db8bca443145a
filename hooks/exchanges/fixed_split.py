"""`split` in messages of fixed size, for which the host does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compress.backends.partition import Partition
from ...compress.backends.places import used_places
from ...compress.codec import Codec
from ...compress.codecs.topk import Largest
from ...compress.feedback.base import FeedbackState
from ..comm.group import Group
from ..comm.ports import Stages
from ..network.cost import Calibration, Estimate
from .base import BucketSpec, ExchangeArgs
from .entry_base import entries_of, with_selection
from .fixed_base import FixedSizeExchange, row_capacity


class FixedSizeSplit(FixedSizeExchange):
    """`Split` with elements dealt to owners by chance. Each owner keeps its k/P largest sums, which are about the k
    largest of all. (P-1)·(c+⌈k/P⌉)·(i+v) bytes received, c = k/P + 3·√(k/P).

    An entry that does not fit in the row to its owner stays in the residual; the next step gives it another owner.
    """

    name = "split"
    reads_step = True

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        self.rows: OwnerMessages | None = None
        self.capacity, self._counts = 0, [self.counted, self.workspaces[0].status]
        ranks = self.world_size
        self.partition = partition = Partition(numel, ranks, device)
        self.share = min(-(-self.k // ranks), partition.span)
        self.back = Largest(self.share, self.dtype)
        sizes = self.back.part_bytes(partition.span) if numel else (0, 0)
        self.row = self.bytes(sum(sizes) + 4 * extra)
        self.encoded, self.tail = self.row.split([sum(sizes), 4 * extra])
        self.received = group.gather_output(ranks, len(self.row), device=device)
        self.parts = self.received.split([*sizes, 4 * extra], dim=1)
        self.to_all = self.persistent_gather(self.received, self.row)
        if numel:
            self.workspaces.append(self.workspace(self.back, partition.span))

    @classmethod
    def estimate(cls, network: Calibration, what: BucketSpec) -> Estimate:
        shape, ranks, speed, work = entries_of(what), what.world_size, what.speed, network.work
        k, span = shape.k, -(-what.numel // ranks)
        capacity, share = row_capacity(k, span, ranks, what.feedback), min(-(-k // ranks), span)
        moves = [
            (network.all_to_all, (ranks - 1) * shape.entry_bytes(span, capacity)),
            (network.all_gather, (ranks - 1) * shape.entry_bytes(span, share)),
        ]
        encode = work.merge * k + work.pack * ranks * capacity
        decode = (speed.decode * ranks + speed.mean + speed.encode) * span + work.merge * k
        decode += (work.unpack + work.scatter) * ranks * share
        return with_selection(network.estimate(cls.name, moves, encode, decode), network, what)

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
            yield from self._reduce_entries(x)
        else:
            yield self.to_all.start()
        if self.extra:
            self._decode_extra(self.parts[2], x.extra)

    def _reduce_entries(self, x: ExchangeArgs) -> Stages:
        rows, rotation = self.rows_for(x.feedback), x.draw[1]
        x.feedback.encode(self.select, x.grad, self.wire, x.draw, self.workspaces[1])
        rows.dealer.deal(self.entries, rotation)
        yield rows.to_owners.start()
        with self.group.scratch.open(self.partition.span, self.device) as mean:
            rows.dealer.mean(rows.received, mean, x.out)
            self.back.encode(mean, self.encoded, x.owner_draw, self.workspaces[2])
            yield self.to_all.start()
            with x.feedback.open() as residual:
                means = self.parts[0], self.parts[1]
                rows.dealer.deliver(self.entries, rotation, means, mean, self.rank, x.out, residual, self.counted)
                if x.feedback.follows_entries:
                    x.feedback.on_unsent(used_places(self.indices, self.count)[0], rows.dealer.later)

    def rows_for(self, feedback: FeedbackState) -> OwnerMessages:
        """The rows to the owners, of the capacity that this feedback needs."""
        capacity = row_capacity(self.k, self.partition.span, self.world_size, feedback.keeps)
        if self.rows is None or self.capacity != capacity:
            self.capacity, self.rows = capacity, OwnerMessages(self, capacity)
            self._counts.append(self.rows.dealer.status)
        return self.rows

    def counts(self) -> list[Tensor]:
        return self._counts


class OwnerMessages:
    """Rows of at most `capacity` entries to each owner: indices, then values."""

    def __init__(self, exchange: FixedSizeSplit, capacity: int) -> None:
        partition, ranks = exchange.partition, exchange.world_size
        codec = Largest(capacity, exchange.dtype)
        sizes = codec.part_bytes(partition.span)
        self.capacity, self.nbytes = capacity, sum(sizes)
        self.sent, received = (exchange.bytes(ranks * self.nbytes).view(ranks, -1) for _ in range(2))
        self.received = (received[:, : sizes[0]], received[:, sizes[0] :])
        sent = self.sent[:, : sizes[0]], self.sent[:, sizes[0] :]
        self.dealer = exchange.kernels.dealer(partition, exchange.k, exchange.share, codec, sent)
        self.to_owners = exchange.persistent_swap(received, self.sent.view(-1))
