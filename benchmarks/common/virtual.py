"""Ranks that share a process: the library's own exchanges, feedback and codecs, with memory in the place of a network.

For learning alone, which depends on what is exchanged and not on how long that takes. Stages of all ranks run in
lockstep: each has put its messages under way before any is waited for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compress import Codec
from ...compress.feedback.base import Feedback
from ...compress.feedback.store import Memory
from ...compress.formats.layout import Layout, layout_numel
from ...hooks.comm.group import Group
from ...hooks.core.bucket import Bucket
from ...hooks.exchanges import EXCHANGES

Mailbox = dict[tuple[int, int], deque[Tensor]]


class _Delivered:
    """What was put into a mailbox, fetched when it is waited for."""

    def __init__(self, mailbox: Mailbox, rank: int, received: Sequence[Tensor]) -> None:
        self._mailbox, self._rank, self._received = mailbox, rank, received

    def wait(self) -> None:
        for source, target in enumerate(self._received):
            if source != self._rank and target.numel():
                sent = self._mailbox[source, self._rank].popleft()
                target[: len(sent)].copy_(sent)


class VirtualGroup(Group):
    """One rank of several in this process. Messages lie where they were sent from until they are waited for."""

    def __init__(self, rank: int, size: int, mailbox: Mailbox) -> None:
        self.rank, self.size = rank, size
        self._mailbox, self._tag = mailbox, 0

    def channel(self, name: str) -> VirtualGroup:
        """This group: in lockstep messages arrive in the order in which they are sent."""
        return self

    def _pairwise(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Any:
        own = sent[self.rank]
        received[self.rank][: len(own)].copy_(own)
        for target, part in enumerate(sent):
            if target != self.rank and part.numel():
                self._mailbox[self.rank, target].append(part)
        return _Delivered(self._mailbox, self.rank, received)

    def means(self, device: torch.device) -> tuple[Callable[[list[Tensor]], Any], float | None]:
        return (lambda tensors: self.all_reduce(tensors[0])), 1.0 / self.size

    def all_reduce(self, tensor: Tensor) -> Any:
        """Summed in the order of the ranks."""
        rows = tensor.new_empty(self.size, tensor.numel())
        work = self.all_gather(rows, tensor.clone())

        class Sum:
            def wait(self) -> None:
                work.wait()
                total = rows[0].clone()
                for row in rows[1:]:
                    total += row
                tensor.copy_(total)

        return Sum()


class VirtualRanks:
    """What P ranks' gradients become, step by step.

    Args:
        layout: of the flat gradient.
        exchange: a name of `hooks.exchanges`.
        strategy: what each rank keeps; None: nothing.
        seed: of stochastic codecs.
    """

    def __init__(
        self, size: int, layout: Layout, codec: Codec, exchange: str, strategy: Feedback | None, seed: int = 0
    ) -> None:
        mailbox = defaultdict[tuple[int, int], deque[Tensor]](deque)
        self.numel, self.seed = layout_numel(layout), seed
        self.strategy, self.step = strategy, 0
        self.memories = [Memory(strategy) for _ in range(size)]
        self.groups = [VirtualGroup(rank, size, mailbox) for rank in range(size)]
        self.units = [Bucket(0, [], layout, frozenset(), torch.empty(self.numel), strategy) for _ in range(size)]
        self.use(codec, exchange)

    def use(self, codec: Codec, exchange: str) -> None:
        """Go on with another codec and exchange; what is kept stays."""
        self.keeps = self.strategy is not None and not codec.lossless
        codec = (codec.with_feedback() if self.keeps else codec).of_layout(self.units[0].layout)
        for rank, (unit, group) in enumerate(zip(self.units, self.groups, strict=True)):
            unit.use(EXCHANGES[exchange](codec, self.numel, 0, torch.device("cpu"), group), self.seed, rank)

    def reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        """Replace each rank's flat float32 gradient by what is handed out there, and return that.

        Raises:
            RuntimeError: the ranks' results differ.
        """
        limit = None if self.strategy is None else self.strategy.largest_norm
        if limit is not None:
            for gradient in gradients:
                gradient.mul_(min(1.0, limit / max(float(gradient.norm()), 1e-30)))
        stages = [
            unit.reduce(gradient, memory, self.keeps, self.step)
            for unit, memory, gradient in zip(self.units, self.memories, gradients, strict=True)
        ]
        while works := [work for stage in stages if (work := next(stage, None)) is not None]:
            for work in works:
                work.wait()
        self.step += 1
        first, *others = (gradient.view(torch.int32) for gradient in gradients)  # by bits: NaN is not equal to itself
        if not all(torch.equal(first, other) for other in others):
            raise RuntimeError(f"ranks differ after step {self.step}")
        return gradients[0]

    @property
    def bytes_received(self) -> int:
        """What a rank received in the last step, the most of any."""
        return max(unit.exchange.bytes_received for unit in self.units)
