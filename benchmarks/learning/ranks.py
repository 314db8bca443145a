"""Ranks of one process that replace their flat gradients by the mean, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress import Codec
from ...compress.feedback.base import Feedback
from ...compress.feedback.store import FeedbackStore
from ...compress.formats.layout import Layout, layout_numel
from ...hooks.comm.ports import Stages
from ...hooks.core.bucket import Bucket
from ...hooks.exchanges import EXCHANGES
from ..common.in_process import InProcessGroup, World


class InProcessRanks:
    """P ranks, with the library's own exchanges, feedback and codecs.

    Args:
        layout: of the flat gradient.
        exchange: a name of `hooks.exchanges`.
        strategy: of the feedback each rank keeps; None: none.
        seed: of stochastic codecs.
        memories: the ranks' feedback, to go on with; None: none yet.
        index: of the bucket that this is.
        device: of the gradients.
        excluded: names of what travels uncompressed.
    """

    def __init__(
        self,
        size: int,
        layout: Layout,
        codec: Codec,
        exchange: str,
        strategy: Feedback | None,
        seed: int = 0,
        memories: list[FeedbackStore] | None = None,
        index: int = 0,
        device: torch.device | str = "cpu",
        excluded: frozenset[str] = frozenset(),
    ) -> None:
        self.world, self.numel, self.seed = World(size), layout_numel(layout), seed
        self.strategy, self.step = strategy, 0
        self.memories = [FeedbackStore(strategy) for _ in range(size)] if memories is None else memories
        like = torch.empty(self.numel, device=device)
        self.units = [Bucket(index, [], layout, excluded, like, strategy) for _ in range(size)]
        self.use(codec, exchange)

    def use(self, codec: Codec, exchange: str) -> None:
        """Go on with another codec and exchange; the feedback stays."""
        self.codec, self.exchange = codec, exchange
        self.keeps = self.strategy is not None and not codec.lossless
        if self.strategy is not None and self.keeps:
            codec = self.strategy.codec_for(codec)
        codec = codec.for_layout(self.units[0].layout)
        for group, unit in zip(self.world.groups, self.units, strict=True):
            numel, extra = layout_numel(unit.layout), unit.uncompressed.numel()
            unit.use(EXCHANGES[exchange](codec, numel, extra, unit.device, group), self.seed, group.rank)

    def reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        """Replace each rank's flat float32 gradient by the mean that is handed out there, and return that.

        Raises:
            RuntimeError: the ranks' results differ.
        """
        limit = None if self.strategy is None else self.strategy.largest_norm
        if limit is not None:
            for gradient in gradients:
                gradient.mul_(min(1.0, limit / max(float(gradient.norm()), 1e-30)))

        def stages(group: InProcessGroup) -> Stages:
            rank = group.rank
            return self.units[rank].reduce(gradients[rank], self.memories[rank], self.keeps, self.step)

        self.world.run(stages)
        self.step += 1
        first, *others = (gradient.view(torch.int32) for gradient in gradients)  # by bits: NaN is not equal to itself
        if not all(torch.equal(first, other) for other in others):
            raise RuntimeError(f"ranks differ after step {self.step}")
        return gradients[0]

    @property
    def bytes_received(self) -> int:
        """Bytes that a rank received in the last step, the most of any."""
        return max(unit.exchange.bytes_received for unit in self.units)
