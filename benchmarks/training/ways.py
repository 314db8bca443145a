"""The ways of learning that `gradwire-bench learn` compares."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from ...compress import (
    QSGD,
    ChunkedTopK,
    Codec,
    Identity,
    Momentum,
    OneBit,
    Outliers,
    PowerSGD,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
)
from ...compress.codecs.sign_vote import Votes
from ...compress.feedback.base import Feedback
from ..common.arms import CARRIED, WIDE, label
from .apart import Rounds

FLOAT32 = "float32"
MOMENTUM = 0.9


@dataclass(frozen=True)
class Way:
    """One way to learn.

    Attributes:
        codec, exchange, strategy: as of `VirtualRanks`.
        begins: so many steps, to begin with, send 8 bits an element.
        method: what ranks exchange in the place of gradients, a name of `training.inside`; "": gradients.
        corrected: the learning rate of step t is divided by 1 - β^t, which corrects the bias of the estimate that is
            handed out, as Adam does with its own first moment.
        rounds: ranks train models of their own, and exchange differences of parameters; None: gradients.
        momentum: the optimizer's, β1 of AdamW, where the strategy has none. What a residual keeps back arrives late,
            which is a momentum too (Mitliagkas et al. 2016), so that Adam may do with less of its own.
        late: so many steps pass before a mean gradient reaches the optimizer: what being late costs by itself.
    """

    codec: Codec = field(default_factory=Identity)
    exchange: str = "dense"
    strategy: Feedback | None = None
    begins: int = 0
    corrected: bool = False
    method: str = ""
    rounds: Rounds | None = None
    momentum: float = MOMENTUM
    late: int = 0

    @property
    def plain(self) -> bool:
        """Whether this is float32, whatever its momentum, and however late."""
        return replace(self, momentum=MOMENTUM, late=0) == Way()

    @property
    def title(self) -> str:
        momentum = "" if self.momentum == MOMENTUM else f", momentum {self.momentum:g}"
        if self.plain:
            return FLOAT32 + (f", {self.late} steps late" if self.late else "") + momentum
        feedback = "" if self.strategy is None else f", {type(self.strategy).__name__}"
        if isinstance(self.strategy, Residual) and self.strategy.dtype != torch.float32:
            feedback += f" in {self.strategy.dtype}"
        begins = f", after {self.begins} steps of 8 bits" if self.begins else ""
        method = {"adam": "1-bit Adam, ", "lion": "Distributed Lion, "}.get(self.method, "")
        text = f"{method}{label(self.codec)} by {self.exchange}{feedback}{begins}{', corrected' * self.corrected}"
        rounds = "" if self.rounds is None else f", {self.rounds}"
        return text.replace("torch.", "") + rounds + momentum

    @property
    def kind(self) -> str:
        """What is exchanged, in the legend of a plot."""
        if self.plain:
            return FLOAT32
        if self.rounds is not None:
            return "parameters, every few steps"
        if self.method:
            return "what the optimizer makes of gradients"
        strategies: dict[type, str] = {Tracking: "gradients, Tracking", Momentum: "gradients, Momentum"}
        return strategies.get(type(self.strategy), "gradients")

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer must have none."""
        return self.strategy is not None and self.strategy.has_momentum

    def clipped(self, clip: float, world: int) -> tuple[Feedback | None, float]:
        """The strategy, and the largest norm of what is handed out, where that of a mean gradient is to be `clip`."""
        if isinstance(self.strategy, Momentum):  # hands out what gradients add up to: clips before, as published
            return replace(self.strategy, clip=clip * world**-0.5), math.inf
        return self.strategy, clip


SMOOTH = Tracking(MOMENTUM, clip=1.0)


def _top(density: float) -> Codec:
    return TopK(density=density, values=torch.int8)


WAYS = {
    FLOAT32: Way(),
    "float32-b8": Way(momentum=0.8),
    "float32-b5": Way(momentum=0.5),
    "float32-late3": Way(late=3),
    "float32-late3-b5": Way(late=3, momentum=0.5),
    "tracking": Way(strategy=SMOOTH),
    "tracking-corrected": Way(strategy=SMOOTH, corrected=True),
    "tracking-ternary": Way(Ternary(), "two_pass", SMOOTH),
    "tracking-ternary-corrected": Way(Ternary(), "two_pass", SMOOTH, corrected=True),
    "tracking-onebit": Way(OneBit(block=256), "two_pass", SMOOTH),
    "tracking-topk8": Way(_top(0.08), "split", SMOOTH),
    "tracking-topk4": Way(_top(0.04), "split", SMOOTH),
    "tracking-topk2": Way(_top(0.02), "split", SMOOTH),
    "tracking-topk2-corrected": Way(_top(0.02), "split", SMOOTH, corrected=True),
    "tracking-topk1": Way(_top(0.01), "split", SMOOTH),
    "dgc-topk1": Way(TopK(0.01), "gather", Momentum(MOMENTUM)),
    "dgc-topk9": Way(_top(0.09), "split", Momentum(MOMENTUM, masking=False), begins=75),
    "dgc-topk01": Way(TopK(0.001), "gather", Momentum(MOMENTUM)),
    "onebit-adam": Way(OneBit(), "two_pass", Residual(), method="adam"),
    "topk4-adam": Way(_top(0.04), "gather", Residual(), method="adam"),
    "lion": Way(Votes(), "two_pass", method="lion"),
    "lion-mean": Way(Votes(rule="mean"), "gather", method="lion"),
    "terngrad": Way(TernGrad(), "two_pass"),
    "ternary": Way(Ternary(), "two_pass", Residual()),
    "onebit": Way(OneBit(block=256), "two_pass", Residual()),
    "onebit-bf16": Way(OneBit(block=256), "two_pass", Residual(dtype=torch.bfloat16)),
    "onebit-int8": Way(OneBit(block=256), "two_pass", Residual(dtype=torch.int8)),
    "onebit-outliers": Way(Outliers(OneBit()), "gather", Residual()),
    "ternary-outliers": Way(Outliers(Ternary()), "gather", Residual()),
    "topk7.5-split": Way(_top(0.075), "split", Residual(), begins=75),
    "topk9-split": Way(_top(0.09), "split", Residual(), begins=75),
    "topk4": Way(_top(0.04), "gather", Residual(), begins=60),
    "topk4-bf16": Way(_top(0.04), "gather", Residual(dtype=torch.bfloat16), begins=60),
    "topk4-int8": Way(_top(0.04), "gather", Residual(dtype=torch.int8), begins=60),
    "topk3": Way(_top(0.03), "gather", Residual()),
    "topk2": Way(_top(0.02), "gather", Residual()),
    "topk1": Way(_top(0.01), "gather", Residual()),
    "topk1-b5": Way(_top(0.01), "gather", Residual(), momentum=0.5),
    "powersgd4": Way(PowerSGD(rank=4), "factors", Residual()),
    "powersgd4-b5": Way(PowerSGD(rank=4), "factors", Residual(), momentum=0.5),
    "powersgd2": Way(PowerSGD(rank=2), "factors", Residual()),
    "powersgd1": Way(PowerSGD(rank=1), "factors", Residual()),
    "powersgd1-b5": Way(PowerSGD(rank=1), "factors", Residual(), momentum=0.5),
    "chunked18": Way(ChunkedTopK(k=737, values=4), "two_pass", Residual()),
    "chunked25": Way(ChunkedTopK(k=1024, values=2), "two_pass", Residual()),
    "chunked25-b8": Way(ChunkedTopK(k=1024, values=2), "two_pass", Residual(), momentum=0.8),
    "chunked25-b5": Way(ChunkedTopK(k=1024, values=2), "two_pass", Residual(), momentum=0.5),
    "chunked25-b3": Way(ChunkedTopK(k=1024, values=2), "two_pass", Residual(), momentum=0.3),
    "chunked25-late": Way(ChunkedTopK(k=1024, values=2), "two_pass", Residual(), begins=300),
    "chunked1.4-b5": Way(ChunkedTopK(k=58), "gather", Residual(), momentum=0.5),
    "wide1.5-b5": Way(ChunkedTopK(k=1000, chunk=65536), "gather", Residual(), momentum=0.5),
    "wide0.7-b5": Way(ChunkedTopK(k=448, chunk=65536), "gather", Residual(), momentum=0.5),
    "wide0.2-b5": Way(ChunkedTopK(k=160, chunk=65536), "gather", Residual(), momentum=0.5),
    "chunked3": Way(ChunkedTopK(k=138, values=2), "two_pass", Residual()),
    "local1-ternary": Way(Ternary(), "two_pass", Residual(), rounds=Rounds(1)),
    "local2-ternary": Way(Ternary(), "two_pass", Residual(), rounds=Rounds(2)),
    "local5-qsgd8": Way(QSGD(bits=8), "two_pass", Residual(), rounds=Rounds(5)),
    "local3-wide0.7-b8": Way(WIDE[3], "gather", Residual(), rounds=Rounds(3), momentum=0.8),
    "local4-wide1.2-b8": Way(WIDE[4], "gather", Residual(), rounds=Rounds(4), momentum=0.8),
    "local5-wide1.5-b8": Way(WIDE[5], "gather", Residual(), rounds=Rounds(5), momentum=0.8),
    "carried3-wide0.9-b8": Way(CARRIED, "gather", Residual(), rounds=Rounds(3, delay=1, carry=True), momentum=0.8),
    "local5-wide1.5": Way(WIDE[5], "gather", Residual(), rounds=Rounds(5)),
    "local8-wide2.6-b8": Way(ChunkedTopK(k=430, chunk=16384), "gather", Residual(), rounds=Rounds(8), momentum=0.8),
    "local10-ternary": Way(Ternary(), "two_pass", Residual(), rounds=Rounds(10)),
    "local30-ternary": Way(Ternary(), "two_pass", Residual(), rounds=Rounds(30)),
}
