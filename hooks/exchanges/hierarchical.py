"""Exchanges between nodes, with full precision inside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...compress.backends import all_finite
from ...compress.codec import Codec
from ...compress.feedback.residual import NOTHING
from ...compress.formats.layout import OwnedSlice, Packing
from ..comm.group import Group
from ..comm.ports import Collective, Port, Stages
from ..network.cost import HIERARCHICAL, Estimate, Nodes
from .base import IDENTITY, BucketSpec, Exchange, ExchangeArgs


class Hierarchical(Exchange):
    """Full precision inside a node, compression between nodes: each rank of a node reduces a slice of the gradient, and
    exchanges it, compressed, with the ranks of other nodes that have the same slice. Extra elements travel in slices
    too, so that nothing leaves a node more than once.

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
        self.slice, ranks = -(-numel // inside.size), inside.size
        self.start, own = _range(self.rank, self.slice, numel)
        _, own_extra = _range(self.rank, -(-extra // ranks), extra)
        self.inner = inner(codec, own, own_extra, device, between)
        self.reads_step = self.inner.reads_step
        # A row for each rank of the node: its slice of the gradient, then its slice of the extra elements. That rank's
        # means arrive in the same memory, as it sends them only once it has all ranks' gradients. No message carries
        # this rank's own row, so the mean over the node has its place.
        width = self.slice + -(-extra // ranks)
        self.sent = torch.zeros(ranks, width, dtype=torch.float32, device=device)
        self.averages = inside.launches(device)
        self.row = torch.zeros_like(self.sent[0]) if self.averages else self.sent[self.rank]
        self.mean, self.own_extra = self.row[:own], self.row[self.slice : self.slice + own_extra]
        self.rows, self.extra_rows = self._packing(self.sent)
        self.counted = torch.zeros(2, dtype=torch.int64, device=device)
        self.not_finite = self.counted[1]
        # Inside a node nothing is far, and messages are as long as the gradient.
        if self.averages:
            self.to_owners: Port = Collective(lambda: inside.mean_of_rows(self.row, self.sent))
        else:
            self.slices = self.bytes(4 * self.sent.numel()).view(ranks, 4 * width)
            self.to_owners = self.persistent_swap(self.slices, self.sent.view(torch.uint8), ahead=1)
        self.to_all = self.persistent_gather(self.sent, self.row, ahead=1)
        self.ports += self.inner.ports

    def _packing(self, rows: Tensor) -> tuple[Packing, Packing]:
        """Moves of the gradient, and of the extra elements, between a flat tensor and such rows."""
        return tuple(  # type: ignore[return-value]
            Packing(numel, ((start, row[:length]) for row, (start, length) in _in_rows(columns, numel)))
            for columns, numel in ((rows[:, : self.slice], self.numel), (rows[:, self.slice :], self.extra))
        )

    @classmethod
    def estimate_around(cls, inner: type[Exchange], nodes: Nodes, what: BucketSpec) -> Estimate:
        """The predicted cost with `inner` between nodes."""
        local = nodes.local_size
        sliced = replace(
            what, numel=-(-what.numel // local), world_size=what.world_size // local, union=what.union // local
        )
        name = f"{HIERARCHICAL} {inner.name}"
        network, between = nodes.inside, inner.estimate(nodes.between, sliced)
        share, sweep = (local - 1) * (4 * -(-what.numel // local)), network.work.dense * what.numel
        moves = [(network.all_to_all, share), (network.all_gather, share)]
        inside = network.estimate(name, moves, between.encode + 2 * sweep, between.decode + sweep)
        return replace(
            inside,
            received=between.received,
            inside=inside.received,
            latency=inside.latency + between.latency,
            transfer=inside.transfer + between.transfer,
            stages=inside.stages + between.stages,
        )

    @property
    def owned_slices(self) -> list[OwnedSlice]:
        own, size = self.inner.numel, self.world_size
        if not own:
            return []
        inner = [(self.start + start, n, weight * size) for start, n, weight in self.inner.owned_slices]
        return [(self.start, own, size), *inner]

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent + 4 * self.sent.numel()

    @property
    def bytes_received(self) -> int:
        """Bytes received between nodes."""
        return self.inner.bytes_received

    def reduce(self, x: ExchangeArgs) -> Stages:
        if not self.row.numel():  # empty parameters alone, as DDP puts those of another dtype in a bucket of their own
            return
        self.rows.take(x.feedback.flush(x.grad))  # with the residuals of other exchanges and other slices
        self.extra_rows.take(x.extra)
        yield self.to_owners.start()
        if not self.averages:
            IDENTITY.decode_mean((self.slices,), self.row, self.workspaces[0])
        if self.inner.numel or self.inner.extra:
            slices = (x.owned[0] if x.owned else NOTHING), x.owned[1:]
            operands = ExchangeArgs(self.mean, self.mean, self.own_extra, *slices, x.draw, x.owner_draw, x.step)
            yield from self.inner.reduce(operands)
        yield self.to_all.start()
        self.rows.put(x.out)
        self.extra_rows.put(x.extra)
        # The inner exchange has seen this rank's slice alone.
        self.not_finite.add_(~all_finite(self.sent))

    def counts(self) -> list[Tensor]:
        return [*self.inner.counts(), self.counted]


def _range(rank: int, length: int, numel: int) -> tuple[int, int]:
    """Start and length of a rank's slice, of slices of `length` elements."""
    start = min(rank * length, numel)
    return start, min(length, numel - start)


def _in_rows(rows: Tensor, numel: int) -> Iterator[tuple[Tensor, tuple[int, int]]]:
    """Memory for slices of `numel` elements, a row each, with start and length; one piece if rows lie end to end."""
    if rows.is_contiguous():
        yield rows.view(-1), (0, numel)
    else:
        yield from ((row, _range(rank, rows.shape[1], numel)) for rank, row in enumerate(rows))
