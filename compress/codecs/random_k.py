"""Random-k: elements that a draw picks, which all ranks share, so that only values travel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..backends import Kernels, backend_for
from ..backends.random_k import RANDOM_K, pick, words_of
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
        chosen = pick(words_of(draw), len(x), self.k(len(x)))
        odd = (~x.isfinite()).nonzero().view(-1)[: len(chosen)]
        if len(odd):
            chosen = torch.cat([odd, chosen[~torch.isin(chosen, odd)]])[: len(chosen)].sort().values
        return chosen

    def kernels(self, device: torch.device) -> Kernels:
        return backend_for(device).kernels.get(self.name, RANDOM_K)
