"""Exchanges between nodes, with full precision inside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.feedback import OwnedSlice
from ..comm.group import Group
from .base import IDENTITY, Clock, Exchange, all_finite


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
        means = self.means.view(-1)[: self.numel]
        out.copy_(means)
        extra_out.copy_(self.extras)
        # The inner exchange has seen this rank's slice alone.
        self.counts[1] += ~(all_finite(means) & all_finite(self.extras))

    def status(self) -> Tensor:
        return torch.stack([self.inner.status()[0], self.counts[1]])
