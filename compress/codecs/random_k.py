"""Random-k: elements that a draw picks, which all ranks share, so that only values travel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import Kernels, Workspace
from ..backends.philox import philox, words_of
from ..codec import check_number
from ..formats.entries import value_fields
from ..formats.wire import Field, Part
from ..sparse_codec import SparseCodec
from .topk import entries_at, power_near


@dataclass(frozen=True)
class RandomK(SparseCodec):
    """k of the elements, by a draw (Stich et al., "Sparsified SGD with memory", NeurIPS 2018), as they are; the rest
    stays in the residual. It contracts on average over the draws, by 1 - k/n of the squared norm.

    k = max(1, ⌈density · n⌉). One element is drawn of each of k pieces of equal length, from ⌊i·n/k⌋ on, so that they
    ascend and none comes twice: ⌊u_i · length / 2^32⌋, u_i being word i mod 4 of Philox's for position i // 4
    (`new_draw`; of the stream the low 32 bits). Seed, step and bucket are the same on all ranks, and travel in 16 bytes
    in the place of indices. Ranks send the same elements, so `decode_mean` gives their exact mean.

    If anything in the gradient is not finite, all of it decodes to NaN, as one block: what is drawn might miss it.

    Args:
        density: share of the elements to send, in (0, 1]. 0.1 costs 3.2 bits an element.
    """

    name: ClassVar[str] = "random_k"
    source: ClassVar[str] = "Stich et al. 2018"

    density: float = 0.1

    def __post_init__(self) -> None:
        check_number("density", self.density, 0.0, 1.0)

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def default_feedback(self) -> bool:
        return True

    @property
    def speed_key(self) -> RandomK:
        return replace(self, density=power_near(self.density))

    def k(self, numel: int) -> int:
        return entries_at(self.density, numel)

    def parts(self, numel: int) -> tuple[Part, ...]:
        self._check_numel(numel)
        words = Field("draw", "<u4", 4, "seed (8 bytes), step, bucket: which elements these are, as `RandomK` says")
        return Part("draw", (words,), 1), Part("values", value_fields(self.k(numel), torch.float32), 1)

    def select(self, x: Tensor, draw: Tensor | None) -> Tensor:
        """As entries, for "union" and "split": what is not finite first, then what is drawn."""
        assert draw is not None
        numel, k = len(x), self.k(len(x))
        drawn = torch.zeros(numel, dtype=torch.int64, device=x.device).index_fill_(0, pick(words_of(draw), numel, k), 1)
        first = drawn.masked_fill_(~x.isfinite(), 2)
        # All distinct, so that there is one answer, and the host need not ask whether anything is not finite.
        order = first * numel + torch.arange(numel - 1, -1, -1, device=x.device)
        return order.topk(k).indices.sort().values

    def kernels(self, device: torch.device) -> Kernels:
        return KERNELS


class RandomKKernels(Kernels[RandomK]):
    """In torch, on any device. The host of a GPU does not wait."""

    def encode(self, codec: RandomK, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        chosen = self._begin(codec, len(x), wire, draw)
        least, largest = torch.aminmax(x)
        self._finish(wire, x[chosen], least.isfinite() & largest.isfinite())

    def encode_feedback(
        self, codec: RandomK, grad: Tensor, residual: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        chosen, total = self._begin(codec, len(grad), wire, draw), grad.float() + residual
        sound, sent = total.isfinite().all(), total[chosen]
        self._finish(wire, sent, sound)
        total[chosen] = sent - (sent + 0.0)  # zero, and of -0 the sign, as in the composition
        residual.copy_(torch.where(sound, total, residual))

    @staticmethod
    def _begin(codec: RandomK, numel: int, wire: Tensor, draw: Tensor | None) -> Tensor:
        assert draw is not None
        words = words_of(draw)
        wire[:16].view(torch.int32).copy_(words)
        return pick(words, numel, codec.k(numel))

    @staticmethod
    def _finish(wire: Tensor, values: Tensor, sound: Tensor) -> None:
        wire[16:].view(torch.float32).copy_(torch.where(sound, values.float(), torch.nan))

    def decode_add(self, codec: RandomK, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        words, values = wire[:16].view(torch.int32), wire[16:].view(torch.float32)
        bad = ~values.isfinite().all()
        workspace.status[1] += bad
        out[pick(words, len(out), len(values))] += alpha * values
        if out.is_cuda:  # the host does not wait to know
            out += torch.where(bad, torch.nan, -0.0)
        elif bad:
            out.fill_(torch.nan)

    def entries_of(
        self, codec: RandomK, wire: Tensor, numel: int, workspace: Workspace
    ) -> tuple[Tensor, Tensor, Tensor]:
        words, values = wire[:16].view(torch.int32), wire[16:].view(torch.float32)
        return (
            pick(words, numel, len(values)).int(),
            values,
            torch.full((1,), len(values), dtype=torch.int32, device=wire.device),
        )


def pick(words: Tensor, numel: int, k: int) -> Tensor:
    """The elements that `words_of` stands for: int64 [k], ascending. The host does not wait."""
    place = torch.arange(k + 1, device=words.device) * numel // k
    start, length = place[:-1], place.diff()
    return start + (philox(words, -(-k // 4)).view(-1)[:k] * length >> 32)


KERNELS = RandomKKernels()
