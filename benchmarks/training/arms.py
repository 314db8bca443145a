"""The ways of exchanging gradients that the training benchmark compares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from ... import QSGD, Cast, Codec, CompressState, OneBit, TernGrad, TopK, compress_hook
from ..common.arms import FLOOR, OPPONENT, POWERSGD_DENSE_STEPS, bucket_cap, hook_of

DENSE = "fp32"


@dataclass(frozen=True)
class Arm:
    """One way of exchanging gradients.

    Attributes:
        name, title: for the command line, and for people.
        codec: gradwire's; None for PyTorch's own ways and for none at all.
        learns_as: the arm whose learning curve holds for this one too; itself by default.
        decides: whether `exchange="auto"` may choose not to compress.
    """

    name: str
    title: str
    codec: Codec | None = None
    learns_as: str | None = None
    decides: bool = False

    @property
    def dense_steps(self) -> int:
        """Steps at the start that cost what float32 costs."""
        return POWERSGD_DENSE_STEPS if self.name == "powersgd" else 0

    def wrap(self, model: nn.Module, bucket_mb: float, seed: int) -> Attached:
        """DDP around `model`, with this arm's hook. A collective."""
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap(self.name) or bucket_mb)
        if self.codec is not None:
            # Named, so that what learns is what is timed: "auto" decides by measurements, which differ between runs.
            state = CompressState(ddp, self.codec, seed=seed, exchange="auto" if self.decides else "gather")
            ddp.register_comm_hook(state, compress_hook)
            return Attached(ddp, state=state)
        hook = hook_of(self.name, ddp, rank=4)
        if hook.function is not None:
            ddp.register_comm_hook(hook.state, hook.function)
        return Attached(ddp, power=hook.state if self.name == "powersgd" else None)


@dataclass(frozen=True)
class Attached:
    """A model whose gradients an arm exchanges, and the state of its hook."""

    model: DistributedDataParallel
    state: CompressState | None = None
    power: PowerSGDState | None = None

    def bits_per_element(self, arm: Arm) -> float:
        """What stands for a gradient element on its way, at the end of the run."""
        if self.state is not None:
            done = self.state.statistics()
            return 32 * done.payload_bytes / done.dense_bytes
        if self.power is not None:
            _, before, after = self.power.compression_stats()
            return 32 * after / before if before else 32.0
        return 16.0 if arm.name == OPPONENT else 32.0

    def compresses(self) -> bool:
        """Whether anything but float32 travels."""
        return self.state is None or any(
            not decision.startswith("dense ") for decision in self.state.statistics().decisions.values()
        )

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


#: A density at which int8 values and packed indices still take 29 times fewer bytes than float32, and error feedback's
#: delay, of about 1/density steps, is short beside a run of a few hundred.
DENSER = TopK(density=0.08, values=torch.int8)

ARMS = {
    arm.name: arm
    for arm in (
        Arm(FLOOR, "no communication"),
        Arm(DENSE, "DDP, float32"),
        Arm(OPPONENT, "DDP, fp16 hook"),
        Arm("bf16", "Cast(bfloat16), for PyTorch's bf16 hook", Cast(torch.bfloat16)),
        Arm("powersgd", "DDP, PowerSGD hook, rank 4"),
        Arm("qsgd", "QSGD, 4 bits", QSGD(bits=4)),
        Arm("terngrad", "TernGrad", TernGrad()),
        Arm("onebit", "OneBit", OneBit()),
        Arm("topk", "TopK, 1 %", TopK(density=0.01)),
        Arm("topk8", "TopK, 8 %, int8", DENSER),
        Arm("auto", "auto: TopK, 8 %, int8, or dense", DENSER, learns_as="topk8", decides=True),
    )
}
