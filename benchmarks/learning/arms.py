"""The ways of learning that `gradwire-bench learn` compares."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from ...compress import (
    EDEN,
    QSGD,
    ChunkedTopK,
    Codec,
    Identity,
    Lead,
    Magnitudes,
    Momentum,
    OneBit,
    PowerSGD,
    Residual,
    Ternary,
    TernGrad,
    TopK,
    Tracking,
)
from ...compress.feedback.base import Feedback
from ..common.arms import CARRIED, WIDE, label
from .independent_replicas import RoundSchedule
from .stages import StageCodes

FLOAT32 = "float32"
MOMENTUM = 0.9


@dataclass(frozen=True)
class LearningArm:
    """One way to learn.

    Attributes:
        codec, exchange, strategy: as of `InProcessRanks`.
        begins: so many steps, to begin with, send 8 bits an element.
        rounds: ranks train models of their own, and exchange differences of parameters; None: gradients.
        momentum: the optimizer's, β1 of AdamW, where the strategy has none. What a residual keeps back arrives late,
            which is a momentum too (Mitliagkas et al. 2016), so that Adam may do with less of its own.
        between: a pipeline's stages in the place of ranks, whose micro-batches then are the ranks' batches.
        late: so many steps pass before a mean gradient reaches the optimizer: what being late costs by itself.
    """

    codec: Codec = field(default_factory=Identity)
    exchange: str = "dense"
    strategy: Feedback | None = None
    begins: int = 0
    rounds: RoundSchedule | None = None
    momentum: float = MOMENTUM
    late: int = 0
    between: StageCodes | None = None

    @property
    def plain(self) -> bool:
        """True for float32, with any momentum and delay."""
        return replace(self, momentum=MOMENTUM, late=0) == LearningArm()

    @property
    def title(self) -> str:
        feedback = "" if self.strategy is None else f", {type(self.strategy).__name__}"
        if isinstance(self.strategy, Residual) and self.strategy.dtype != torch.float32:
            feedback += f" in {self.strategy.dtype}".replace("torch.", "")
        begins = f", after {self.begins} steps of 8 bits" if self.begins else ""
        return self._named(f" by {self.exchange}{feedback}{begins}")

    @property
    def short(self) -> str:
        """The title in pictures: without exchange and feedback."""
        return self._named("")

    def _named(self, how: str) -> str:
        if self.between is not None:
            return str(self.between)
        momentum = "" if self.momentum == MOMENTUM else f", momentum {self.momentum:g}"
        if self.plain:
            return FLOAT32 + (f", {self.late} steps late" if self.late else "") + momentum
        rounds = "" if self.rounds is None else f", {self.rounds}"
        codec = FLOAT32 if self.codec.lossless else label(self.codec).replace("torch.", "")
        return f"{codec}{how}{rounds}{momentum}"

    @property
    def has_momentum(self) -> bool:
        """True if the optimizer must have no momentum of its own."""
        return self.strategy is not None and self.strategy.has_momentum

    def clipped(self, clip: float, world: int) -> tuple[Feedback | None, float]:
        """The strategy, and the largest norm of what is handed out, where that of a mean gradient is to be `clip`."""
        if isinstance(self.strategy, Momentum):  # hands out what gradients add up to: clips before, as published
            return replace(self.strategy, clip=clip * world**-0.5), math.inf
        return self.strategy, clip


SMOOTH = Tracking(MOMENTUM, clip=1.0)


def _stages(bits: int, backward: int) -> LearningArm:
    return LearningArm(between=StageCodes(4, QSGD(bits=bits), QSGD(bits=backward)))


def _top(density: float) -> Codec:
    return TopK(density=density, values=torch.int8)


LEARNED = {
    FLOAT32: LearningArm(),
    "float32-b8": LearningArm(momentum=0.8),
    "float32-b5": LearningArm(momentum=0.5),
    "float32-late3": LearningArm(late=3),
    "float32-late3-b5": LearningArm(late=3, momentum=0.5),
    "tracking": LearningArm(strategy=SMOOTH),
    "tracking-ternary": LearningArm(Ternary(), "two_pass", SMOOTH),
    "tracking95-ternary": LearningArm(Ternary(), "two_pass", Tracking(0.95, clip=1.0)),
    "dgc-topk1": LearningArm(TopK(0.01), "gather", Momentum(MOMENTUM)),
    "dgc-topk9": LearningArm(_top(0.09), "split", Momentum(MOMENTUM, masking=False), begins=75),
    "eden": LearningArm(EDEN(), "two_pass"),
    "eden2": LearningArm(EDEN(levels=2), "two_pass"),
    "eden2-magnitudes": LearningArm(EDEN(levels=2), "two_pass", Magnitudes()),
    "terngrad": LearningArm(TernGrad(), "two_pass"),
    "qsgd8": LearningArm(QSGD(bits=8), "two_pass"),
    "qsgd4": LearningArm(QSGD(), "two_pass"),
    "ternary": LearningArm(Ternary(), "two_pass", Residual()),
    "onebit": LearningArm(OneBit(block=256), "two_pass", Residual()),
    "onebit-bf16": LearningArm(OneBit(block=256), "two_pass", Residual(dtype=torch.bfloat16)),
    "onebit-int8": LearningArm(OneBit(block=256), "two_pass", Residual(dtype=torch.int8)),
    "topk7.5-split": LearningArm(_top(0.075), "split", Residual(), begins=75),
    "topk9-split": LearningArm(_top(0.09), "split", Residual(), begins=75),
    "topk4": LearningArm(_top(0.04), "gather", Residual(), begins=60),
    "topk4-bf16": LearningArm(_top(0.04), "gather", Residual(dtype=torch.bfloat16), begins=60),
    "topk4-int8": LearningArm(_top(0.04), "gather", Residual(dtype=torch.int8), begins=60),
    "topk12": LearningArm(_top(0.12), "gather", Residual()),
    "topk4-at-once": LearningArm(_top(0.04), "gather", Residual()),
    "topk3": LearningArm(_top(0.03), "gather", Residual()),
    "topk1": LearningArm(_top(0.01), "gather", Residual()),
    "topk1-b5": LearningArm(_top(0.01), "gather", Residual(), momentum=0.5),
    "topk1-split-b5": LearningArm(TopK(0.01), "split", Residual(), momentum=0.5),
    "topk1-mask-b5": LearningArm(TopK(0.01), "mask", Residual(), momentum=0.5),
    "topk2-mask-b5": LearningArm(_top(0.02), "mask", Residual(), momentum=0.5),
    "topk1-exact-b5": LearningArm(TopK(0.01), "gather", Residual(), momentum=0.5),
    "powersgd4": LearningArm(PowerSGD(rank=4), "factors", Residual()),
    "chunked25": LearningArm(ChunkedTopK(k=1024, values=2), "two_pass", Residual()),
    "chunked25-b8": LearningArm(ChunkedTopK(k=1024, values=2), "two_pass", Residual(), momentum=0.8),
    "chunked25-b5": LearningArm(ChunkedTopK(k=1024, values=2), "two_pass", Residual(), momentum=0.5),
    "chunked25-b3": LearningArm(ChunkedTopK(k=1024, values=2), "two_pass", Residual(), momentum=0.3),
    "chunked25-lead": LearningArm(ChunkedTopK(k=1024, values=2), "two_pass", Lead()),
    "wide1.5-lead": LearningArm(ChunkedTopK(k=1000, chunk=65536), "gather", Lead()),
    "chunked1.4-b5": LearningArm(ChunkedTopK(k=58), "gather", Residual(), momentum=0.5),
    "wide1.5-b5": LearningArm(ChunkedTopK(k=1000, chunk=65536), "gather", Residual(), momentum=0.5),
    "wide0.7-b5": LearningArm(ChunkedTopK(k=448, chunk=65536), "gather", Residual(), momentum=0.5),
    "local1-ternary": LearningArm(Ternary(), "two_pass", Residual(), rounds=RoundSchedule(1)),
    "local2-ternary": LearningArm(Ternary(), "two_pass", Residual(), rounds=RoundSchedule(2)),
    "local3-wide0.7-b8": LearningArm(WIDE[3], "gather", Residual(), rounds=RoundSchedule(3), momentum=0.8),
    "local4-wide1.2-b8": LearningArm(WIDE[4], "gather", Residual(), rounds=RoundSchedule(4), momentum=0.8),
    "local5-wide1.5-b8": LearningArm(WIDE[5], "gather", Residual(), rounds=RoundSchedule(5), momentum=0.8),
    "carried3-wide0.9-b8": LearningArm(
        CARRIED, "gather", Residual(), rounds=RoundSchedule(3, delay=1, carry=True), momentum=0.8
    ),
    "local5-wide1.5": LearningArm(WIDE[5], "gather", Residual(), rounds=RoundSchedule(5)),
    "local3-qsgd4": LearningArm(QSGD(), "two_pass", Residual(), rounds=RoundSchedule(3)),
    "local5-chunked25": LearningArm(ChunkedTopK(k=1024, values=2), "two_pass", Residual(), rounds=RoundSchedule(5)),
    "local5-wide3": LearningArm(ChunkedTopK(k=1000, chunk=32768), "gather", Residual(), rounds=RoundSchedule(5)),
    "local10-ternary": LearningArm(Ternary(), "two_pass", Residual(), rounds=RoundSchedule(10)),
    "kept1-chunked25": LearningArm(
        ChunkedTopK(k=1024, values=2), "two_pass", Residual(), rounds=RoundSchedule(1, unsent=True)
    ),
    "kept5-chunked25": LearningArm(
        ChunkedTopK(k=1024, values=2), "two_pass", Residual(), rounds=RoundSchedule(5, unsent=True)
    ),
    "local1": LearningArm(rounds=RoundSchedule(1)),
    "local1-longer": LearningArm(rounds=RoundSchedule(1, lengthened=True)),
    "kept1-longer": LearningArm(
        ChunkedTopK(k=1024, values=2), "two_pass", Residual(), rounds=RoundSchedule(1, unsent=True, lengthened=True)
    ),
    "kept5-longer": LearningArm(
        ChunkedTopK(k=1024, values=2), "two_pass", Residual(), rounds=RoundSchedule(5, unsent=True, lengthened=True)
    ),
    "local3-longer": LearningArm(QSGD(), "two_pass", Residual(), rounds=RoundSchedule(3, lengthened=True)),
    "local5-eden": LearningArm(EDEN(), "two_pass", rounds=RoundSchedule(5, lengthened=True)),
    "stages4-q8": _stages(8, 8),
    "stages4-q8-q4": _stages(8, 4),
    "stages4-q6-q4": _stages(6, 4),
}
