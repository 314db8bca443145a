"""Distributed Lion: every rank votes on the direction of each element, in a bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..compress import Codec, Identity, Ternary
from ..compress.codec import check_choice
from ..compress.codecs.sign_vote import RULES, Votes, vote
from ..hooks.core.options import Options
from .base import ExchangingOptimizer
from .flat_state import FlatState

EXCHANGES = ("auto", "gather", "two_pass")
#: Ranks from which on a bit to the owner of a slice and two back are fewer than one to each rank.
TWO_PASS_RANKS = 4


class DistributedLion(ExchangingOptimizer):
    """Distributed Lion (Liu et al., NeurIPS 2024). Of rank r's gradient g_r, with a momentum m_r that stays its own:

        d_r = sign(β1·m_r + (1-β1)·g_r);  m_r = β2·m_r + (1-β2)·g_r
        Δ = sign(Σ d_r) by majority, a tie being 0, or the ranks' mean of d_r
        p -= lr·(Δ + weight_decay·p)

    Votes are sent exactly, 4096 of them in a bit each and 8 bytes, and no residual is kept. One bit cannot express
    zero: a rank with neither gradient nor momentum votes -1 and +1 by turns, half of such ranks against the others, so
    that the other ranks decide most of the time. An element stays unchanged, weight decay included, until the outcome
    first differs from that of ranks without an opinion: elements that no rank uses do not move. With `codec=Ternary()`
    a vote may be zero, in 1.63 bits.

    m is float32 for parameters of any dtype; 9 bytes an element in all. `ExchangingOptimizer` says what else holds.

    Args:
        params: those of torch's optimizers.
        lr: a third to a tenth of Adam's, as published.
        betas: β1 of the vote, β2 of the momentum.
        weight_decay: decoupled; three to ten times Adam's, as published.
        vote: "majority" or "mean".
        codec: the votes' codec: `Votes()`, `Ternary()`, or `Identity()`, for tests.
        exchange: "gather", all votes to all ranks; "two_pass", for a majority only: to the owner of a slice, and from
            there in 2 bits; "auto", the one with fewer bytes.
        maximize, bucket_cap_mb, process_group, seed: `OneBitAdam`'s.

    Raises:
        TypeError, ValueError: an argument is invalid, here or on another rank, or the ranks disagree.
        RuntimeError: torch.distributed is not initialized, or a rank did not arrive.
    """

    kept: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg": torch.float32, "moving": torch.bool}
    own: ClassVar[frozenset[str]] = frozenset({"exp_avg"})

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        vote: Literal["majority", "mean"] = "majority",
        codec: Codec = Votes(),  # noqa: B008 - frozen
        exchange: Literal["auto", "gather", "two_pass"] = "auto",
        maximize: bool = False,
        bucket_cap_mb: float = 25.0,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        self._vote, self._exchange = vote, exchange
        if isinstance(codec, Votes) and vote in RULES:
            codec = replace(codec, rule=vote)
        if exchange == "auto" and dist.is_available() and dist.is_initialized():
            many = dist.get_world_size(process_group) >= TWO_PASS_RANKS
            exchange = "two_pass" if many and isinstance(codec, Votes) and vote == "majority" else "gather"
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        options = Options(codec, exchange, False, 0, None, None, seed)
        super().__init__(params, defaults, options, bucket_cap_mb, process_group)

    def _encoded(self, flat: FlatState) -> Tensor:
        group = self.param_groups[flat.group]
        sign, (first, second) = -1.0 if group["maximize"] else 1.0, group["betas"]
        momentum, votes = flat.flat["exp_avg"], flat.exchanged
        torch.mul(momentum, first, out=votes)
        flat.add_gradients(flat.exchanged_views, sign * (1.0 - first))
        vote(votes)
        if isinstance(self._options.codec, Votes):
            rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
            votes.masked_fill_(votes == 0, no_opinion(rank, self._step, ranks))
        momentum.mul_(second)
        flat.add_gradients(flat.views["exp_avg"], sign * (1.0 - second))
        return votes

    def _decoded(self, flat: FlatState, group: Mapping[str, Any], mean: Tensor) -> None:
        if self._vote == "majority":
            vote(mean)
        moving, abstained = flat.flat["moving"], 0.0
        if isinstance(self._options.codec, Votes):
            abstained = nobody(self._step, dist.get_world_size(self._group), self._vote == "majority")
        moving.logical_or_(mean != abstained)
        mean.mul_(moving)
        if group["weight_decay"]:
            flat.decay(mean, moving, group["weight_decay"])
        flat.move(mean, group["lr"])

    def _check(self) -> None:
        check_choice("vote", self._vote, RULES)
        check_choice("exchange", self._exchange, EXCHANGES)
        if not isinstance(self._options.codec, Votes | Ternary | Identity):
            raise ValueError(
                f"codec={self._options.codec!r}: votes arrive exactly through Votes(), Ternary() and Identity() alone"
            )
        if self._exchange == "two_pass" and not (isinstance(self._options.codec, Votes) and self._vote == "majority"):
            raise ValueError(
                f"exchange='two_pass' brings back the majority of Votes(), and nothing of vote={self._vote!r} with "
                f"{self._options.codec}: use 'gather'"
            )
        super()._check()


def no_opinion(rank: int, step: int, ranks: int) -> float:
    """The vote of a rank without an opinion: half of the ranks against the others, other ones in every step."""
    return (1.0 if (rank + step) % ranks % 2 == 0 else -1.0) * _odd_one(step, ranks)


def nobody(step: int, ranks: int, majority: bool) -> float:
    """The outcome if no rank has an opinion: the vote of the odd one of an odd number of ranks, or its share."""
    if ranks % 2 == 0:
        return 0.0
    share = torch.tensor(1.0, dtype=torch.float32, device="cpu") / ranks
    return _odd_one(step, ranks) * (1.0 if majority else float(share))


def _odd_one(step: int, ranks: int) -> float:
    return -1.0 if ranks % 2 and step % 2 else 1.0
