"""One vote an element: a bit from every rank, and what the majority of them says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends import Kernels, Workspace
from ..codec import Codec, check_choice
from .onebit import OneBit
from .qsgd import QSGD

RULES = ("majority", "mean")


def vote(x: Tensor) -> Tensor:
    """The sign of each element, 0 of a zero, in place; NaN of what is not finite, which `torch.sign` would hide."""
    return x.copy_(torch.where(x.isfinite(), x.sign(), torch.nan))


@dataclass(frozen=True)
class Votes(OneBit):
    """Votes of -1 and +1 by `OneBit` with the mean magnitude, which is then 1: they travel exactly, in a bit each and 8
    bytes a block, as in Distributed Lion (Liu et al., NeurIPS 2024).

    With `rule="majority"` decoding gives the sign of the sum of the ranks' votes, a tie 0, and owners of slices encode
    that once more in 2 bits. With "mean" it gives their mean, k·(1/P) in float32, and no slice can be encoded again.

    Args:
        block, scale: as of `OneBit`.
        rule: "majority" or "mean".
    """

    block: int = 4096
    scale: str = "symmetric"
    rule: str = "majority"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rule", self.rule, RULES)

    @property
    def default_feedback(self) -> bool:
        return False  # a sign has no error to keep

    def second_pass(self) -> Codec:
        return QSGD(bits=2, block=self.block, rounding="nearest") if self.rule == "majority" else self

    def kernels(self, device: torch.device) -> Kernels:
        inner = super().kernels(device)
        return Majority(inner) if self.rule == "majority" else inner


class Majority(Kernels):
    """OneBit's kernels, whose mean becomes its sign."""

    def __init__(self, inner: Kernels) -> None:
        self.inner = inner

    def workspace(self, codec: Codec, numel: int, device: torch.device) -> Workspace:
        return self.inner.workspace(codec, numel, device)

    def prepare(self, codec: Codec, dtype: torch.dtype, device: torch.device) -> None:
        self.inner.prepare(codec, dtype, device)

    def encode(self, codec: Codec, x: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        self.inner.encode(codec, x, wire, draw, workspace)

    def decode_add(self, codec: Codec, wire: Tensor, out: Tensor, alpha: float, workspace: Workspace) -> None:
        self.inner.decode_add(codec, wire, out, alpha, workspace)

    def decode_mean(self, codec: Codec, wires: Sequence[Tensor], out: Tensor, workspace: Workspace) -> None:
        self.inner.decode_mean(codec, wires, out, workspace)
        vote(out)
