"""The exchanges of top-k entries: `union` and `split`; `allreduce` has the table."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...compress.codec import Codec
from ...compress.topk import TopK
from ..comm.entries import Carrier, Entries
from ..comm.group import Group
from ..sparse import fill
from .base import Clock, Exchange, all_finite

#: Steps after which `Split` balances the owners' ranges again.
BALANCE_EVERY = 64


class Sparse(Exchange):
    """What `Union` and `Split` share: the codec selects, and its entries travel one by one, not as a wire."""

    def __init__(self, codec: Codec, numel: int, extra: int, device: torch.device, group: Group) -> None:
        super().__init__(codec, numel, extra, device, group)
        if not isinstance(codec, TopK):
            raise TypeError(f"{codec} does not select entries, which {type(self).__name__} exchanges")
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
                words, first = self.wire.view(torch.int32), 1 + self.k
                count = int(words[0])
                self.reduce(Entries(words[1 : 1 + count], self.wire.view(torch.float32)[first : first + count]))
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
        self.counts[1] += ~all_finite(self.extras)

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
            rest = residual[at]
            mine += rest
            residual[at] = rest.masked_fill_(mine.isfinite(), 0.0)
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
