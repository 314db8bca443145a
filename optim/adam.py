"""1-bit Adam: Adam until its variance has settled, then an all-reduce of momenta in a bit each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compress import Codec, Feedback, OneBit
from ..compress.codec import BlockCodec, check_choice
from ..hooks.auto.planner import Choice
from ..hooks.core.options import Options
from ..hooks.exchanges import EXCHANGES, ExchangeKind
from .base import ExchangingOptimizer
from .flat_state import FlatState
from .groups import check_range


class OneBitAdam(ExchangingOptimizer):
    """1-bit Adam (Tang et al., ICML 2021), in the form of DeepSpeed's `OnebitAdam`. Of rank r's gradient g_r:

        the first `warmup_steps`:  g = the ranks' mean of g_r;  m = β1·m + (1-β1)·g;  v = β2·v + (1-β2)·g²
        then, v being fixed:       m_r = β1·m + (1-β1)·g_r;  m = their mean through the codec, with error feedback
        in both:                   p -= lr·(m / (√v + eps) + weight_decay·p)

    The bias is not corrected, as published: begin with a learning rate that rises. With "two_pass" both the ranks and
    the owners of slices keep residuals. Nothing of the momentum is lost: the mean over the ranks of m plus residual is
    that without compression.

    An element whose v is zero stays unchanged, weight decay included: one bit cannot express zero, and an element that
    never had a gradient must not move. A parameter with its first gradient after the warm-up is therefore not trained,
    and a warning says so.

    m, v and residual are float32 for parameters of any dtype: 16 bytes an element in all, also during an exchange.
    `ExchangingOptimizer` says what else holds.

    Args:
        params, lr, betas, eps, weight_decay, maximize: `torch.optim.AdamW`'s: weight decay is decoupled.
        warmup_steps: DeepSpeed's `freeze_step`: 15 to 25 % of all steps as published, until v has settled.
        codec: the momenta's codec, one that contracts, or a function of the step, equal on all ranks.
        exchange: "auto" is "two_pass" for block codecs, "dense" for `Identity`, else "gather".
        error_feedback: `CompressState`'s, but on by default.
        bucket_cap_mb, process_group, seed: `LocalUpdates`'.

    Raises:
        TypeError, ValueError: an argument is invalid, here or on another rank, or the ranks disagree.
        RuntimeError: torch.distributed is not initialized, or a rank did not arrive.
    """

    kept: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int,
        codec: Codec = OneBit(),  # noqa: B008 - frozen
        exchange: Literal["auto"] | ExchangeKind | str = "auto",
        error_feedback: bool | Literal["auto"] | Feedback = True,
        maximize: bool = False,
        bucket_cap_mb: float = 25.0,
        process_group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        options = AdamOptions(codec, exchange, error_feedback, warmup_steps, None, None, seed)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        self._still: list[nn.Parameter] = []  # parameters whose v stays zero
        super().__init__(params, defaults, options, bucket_cap_mb, process_group)
        self._update: Tensor | None = None

    @property
    def warming_up(self) -> bool:
        """True if the next step is one of plain Adam."""
        return self._step < self._options.warmup_steps

    def _encoded(self, flat: FlatState) -> Tensor:
        group = self.param_groups[flat.group]
        sign = -1.0 if group["maximize"] else 1.0
        if self.warming_up:
            flat.divisor_of, self._still = None, []
            flat.exchanged.zero_()
            flat.add_gradients(flat.exchanged_views, sign)
            return flat.exchanged
        self._freeze(flat, group["eps"])
        beta = group["betas"][0]
        momentum = flat.flat["exp_avg"].mul_(beta)
        flat.add_gradients(flat.views["exp_avg"], sign * (1.0 - beta))
        return momentum

    def _decoded(self, flat: FlatState, group: Mapping[str, Any], mean: Tensor) -> None:
        momentum, variance = flat.flat["exp_avg"], flat.flat["exp_avg_sq"]
        if self.warming_up:
            for beta, state in zip(group["betas"], (momentum, variance), strict=True):
                state.mul_(beta)
            momentum.add_(mean, alpha=1.0 - group["betas"][0])
            variance.addcmul_(mean, mean, value=1.0 - group["betas"][1])
            divisor(variance, group["eps"], flat.exchanged)  # the gradient is not needed any more
        update = self._scratch(len(momentum), momentum.device)
        torch.div(momentum, flat.exchanged, out=update)
        if group["weight_decay"]:
            flat.decay(update, variance != 0, group["weight_decay"])
        flat.move(update, group["lr"])

    def _freeze(self, flat: FlatState, eps: float) -> None:
        """Let `exchanged` hold √v + eps: the warm-up is over, or v or eps have been changed since."""
        variance = flat.flat["exp_avg_sq"]
        if flat.divisor_of != (variance._version, eps):
            flat.divisor_of = variance._version, eps
            divisor(variance, eps, flat.exchanged)
            parts = zip(flat.parameters, flat.views["exp_avg_sq"], strict=True)
            still = {id(p): p for p in self._still}
            for p, part in parts:
                still.pop(id(p), None)
                if not bool(part.any()):
                    still[id(p)] = p
            self._still = list(still.values())

    def _scratch(self, numel: int, device: torch.device) -> Tensor:
        """Memory that buckets use one after the other."""
        if self._update is None or len(self._update) < numel:
            longest = max(flat.bucket.numel for flat in self._buckets)
            self._update = torch.empty(longest, dtype=torch.float32, device=device)
        return self._update[:numel]

    def _problem(self) -> str | None:
        late = [p for p in self._still if p.grad is not None]
        if late:
            self._still = []
            warnings.warn(
                f"{len(late)} parameters, the first of shape {tuple(late[0].shape)}, have a gradient and had none in "
                f"the {self._options.warmup_steps} steps of OneBitAdam's warm-up, so that their variance is zero and "
                "they stay as they are: use them in the warm-up, or make another optimizer, which has one",
                stacklevel=6,
            )
        return super()._problem()

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_range("eps", group["eps"], math.inf)

    def _check_addition(self) -> None:
        if not self.warming_up:
            raise ValueError(
                f"a group of parameters is added at step {self._step}, after the {self._options.warmup_steps} of the "
                "warm-up, so that they would have no variance: add it before, or make another OneBitAdam"
            )


class AdamOptions(Options):
    """Options of `OneBitAdam`."""

    def check(self, world_size: int | None) -> None:
        check_choice("exchange", self.exchange, ("auto", *EXCHANGES))
        super().check(world_size)
        if not self.warmup_steps:
            raise ValueError(
                "warmup_steps=0: expected 1 or more, 15 to 25 % of all steps as published; without a warm-up there is "
                "no variance, and nothing would move"
            )
        if self.strategy is not None and not self.strategy.only_residual:
            raise ValueError(
                f"error_feedback={self.strategy!r}: the codec gets a momentum already; use Residual(), or True"
            )
        self.choice(self.warmup_steps)

    def _choose(self, codec: Codec, warm: bool) -> Choice:
        choice = super()._choose(codec, warm)
        if choice.exchange != "auto":
            return choice
        blocks = "two_pass" if isinstance(codec, BlockCodec) else "gather"
        return replace(choice, exchange="dense" if codec.lossless else blocks)


def divisor(variance: Tensor, eps: float, out: Tensor) -> None:
    """`out` = √v + eps, infinite where v is zero, so that nothing moves there."""
    torch.sqrt(variance, out=out).add_(eps).masked_fill_(variance == 0, math.inf)
