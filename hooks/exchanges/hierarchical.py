"""Exchanges between nodes, with full precision inside them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.feedback import NOTHING
from ...compress.layout import OwnedSlice
from ..auto.cost import HIERARCHICAL, Estimate, Nodes
from ..comm.group import Group
from ..comm.pipeline import Stages
from .base import IDENTITY, Bucketful, Exchange, Operands, all_finite


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
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.pieces = torch.zeros(extra + inside.size, dtype=torch.float32, device=device)
        # Inside a node nothing is far, and messages are as long as the gradient.
        self.to_owners = self.swap_port(self.slices, self.sent.view(torch.uint8), ahead=1)
        self.to_all = self.gather_port(self.means, self.mean, ahead=1)
        self.ports += self.inner.ports

    @classmethod
    def estimate_around(cls, inner: type[Exchange], nodes: Nodes, what: Bucketful) -> Estimate:
        """What it will take with an exchange between nodes."""
        local = nodes.local_size
        sliced = replace(
            what, numel=-(-what.numel // local), world_size=what.world_size // local, union=what.union // local
        )
        name = f"{HIERARCHICAL} {inner.name}"
        return nodes.inside.around(inner.estimate(nodes.between, sliced), name, what.numel, local)

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

    def reduce(self, x: Operands) -> Stages:
        mine, own = self.sent[: self.numel], self.inner.numel
        mine.copy_(x.feedback.send_all(x.grad))  # with what other exchanges and other slices have left behind
        self.extras.copy_(x.extra)
        yield self.to_owners.start()
        yield from self.group.sum(self.extras, self.pieces)
        self.extras.mul_(1.0 / self.world_size)
        if self.slice:
            IDENTITY.decode_mean((self.slices,), self.mean, self.workspaces[0])
        slices = (x.owned[0] if x.owned else NOTHING), x.owned[1:]
        mean = self.mean[:own]
        yield from self.inner.reduce(Operands(mean, mean, self.extras, *slices, x.draw, x.owner_draw))
        yield self.to_all.start()
        means = self.means.view(-1)[: self.numel]
        x.out.copy_(means)
        x.extra.copy_(self.extras)
        # The inner exchange has seen this rank's slice alone.
        self.counts[1] += ~(all_finite(means) & all_finite(self.extras))

    def status(self) -> Tensor:
        return torch.stack([self.inner.status()[0], self.counts[1]])
