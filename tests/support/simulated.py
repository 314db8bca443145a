"""Ranks that share a process: what each keeps, step by step, and how far a strategy's law is off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from gradwire.benchmarks.learning.ranks import InProcessRanks
from gradwire.compress import Codec, Identity
from gradwire.compress.feedback.base import Feedback
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.compress.formats.layout import Layout, layout_numel
from torch import Tensor

#: Of each parameter, the mean over the ranks of each vector.
Means = dict[str, dict[str, Tensor]]


class SimulatedRanks:
    """Ranks that gather each other's wires.

    Args:
        shapes: of the parameters, by name.
    """

    def __init__(
        self,
        strategy: Feedback,
        codec: Codec,
        shapes: Mapping[str, tuple[int, ...]],
        size: int = 3,
        keep_previous: bool = False,
    ) -> None:
        self.strategy, self.codec, self.shapes = strategy, codec, dict(shapes)
        self.memories = [FeedbackStore(strategy, keep_previous) for _ in range(size)]
        self.number = 0

    def means(self) -> Means:
        found = {vector: [memory.by_name(vector) for memory in self.memories] for vector in self.strategy.state_names}
        return {
            name: {
                vector: sum(
                    (rank.get(name, torch.zeros(shape)).double() for rank in ranks),
                    start=torch.zeros(shape, dtype=torch.float64),
                )
                / len(ranks)
                for vector, ranks in found.items()
            }
            for name, shape in self.shapes.items()
        }

    def step(
        self, layouts: Sequence[Layout], dense: bool = False, applied: bool = True, scale: float = 1.0
    ) -> tuple[float, dict[str, Tensor]]:
        """Reduce fresh gradients of every layout.

        Args:
            dense: send everything.
            applied: else all ranks throw the means away, and keep them.
            scale: of the gradients.

        Returns:
            How far the law is off, relative to what went in and what was there; and what was handed out, by parameter.
        """
        before, self.number = self.means(), self.number + 1
        gradient, handed = {}, {}
        for index, layout in enumerate(layouts):
            generator = torch.Generator().manual_seed(97 * self.number + index)
            grads = [scale * torch.randn(layout_numel(layout), generator=generator) for _ in self.memories]
            mean = torch.stack(grads).double().mean(0)
            codec, exchange = (Identity(), "dense") if dense else (self.codec, "gather")
            world = len(self.memories), layout, codec, exchange, self.strategy
            ranks = InProcessRanks(*world, memories=self.memories, index=index)
            ranks.step = self.number
            ranks.reduce(grads)
            for slot in layout:
                gradient[slot.name], handed[slot.name] = slot.view(mean), slot.view(grads[0]).double()
                if not applied:
                    for memory, out in zip(self.memories, grads, strict=True):
                        memory.restore(layout, out, [(slot, None)])
        after, off, size = self.means(), 0.0, 0.0
        for name, there in before.items():
            given = handed[name] if applied else torch.zeros_like(handed[name])
            off += float(self.strategy.invariant(gradient[name], there, given, after[name]).square().sum())
            size += sum(float(x.square().sum()) for x in (gradient[name], *there.values()))
        return math.sqrt(off / size), handed
