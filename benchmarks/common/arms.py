"""The ways to exchange gradients that benchmarks compare, and how they take turns."""

# Annotations stay evaluated here: DDP compares those of a hook with its own.
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ...compress import QSGD, Codec, OneBit, TernGrad, TopK

#: What each arm is.
HOOKS = {
    "none": "no communication",
    "fp32": "PyTorch DDP, float32",
    "fp16": "PyTorch's fp16 hook",
    "powersgd": "PyTorch's PowerSGD hook, rank 2, one bucket",
    "onebit": "gradwire, OneBit",
    "onebit-gather": "gradwire, OneBit by gather",
    "onebit-two_pass": "gradwire, OneBit by two_pass",
    "topk": "gradwire, TopK",
    "topk-gather": "gradwire, TopK by gather",
    "qsgd": "gradwire, QSGD",
    "terngrad": "gradwire, TernGrad",
    "auto": "gradwire, OneBit by auto",
}
#: In every picture of arms; mostly Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {
    "none": "#BBBBBB",
    "fp32": "#000000",
    "fp16": "#999999",
    "bf16": "#AA7744",
    "powersgd": "#56B4E9",
    "onebit": "#D55E00",
    "onebit-gather": "#D55E00",
    "onebit-two_pass": "#8C3D00",
    "topk": "#CC79A7",
    "topk-gather": "#CC79A7",
    "topk-0.1": "#E69F00",
    "topk8": "#E69F00",
    "qsgd": "#0072B2",
    "terngrad": "#009E73",
    "auto": "#B5A900",
}
COMPRESSING = ("onebit", "topk", "qsgd", "terngrad")
FLOOR, OPPONENT = "none", "fp16"
#: Steps that PowerSGD's hook leaves dense: the fewest that it takes. Its default of 1000 is longer than our runs.
POWERSGD_DENSE_STEPS = 2


class Hook(NamedTuple):
    """What `register_comm_hook` takes; no function: DDP's own all-reduce."""

    state: Any
    function: Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]] | None


class Floor:
    """The state of `without_communication`: how many buckets it has seen."""

    buckets = 0


def without_communication(floor: Floor, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that gives every rank its own gradients back: the floor."""
    floor.buckets += 1
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def bucket_cap(name: str, cap: float | None = None) -> float | None:
    """DDP's `bucket_cap_mb` for an arm, `cap` where it may be chosen: PowerSGD's hook dies on Gloo when several of its
    buckets are in flight."""
    return 10_000 if name == "powersgd" else cap


def codec_of(name: str, density: float) -> Codec:
    """The codec of one of gradwire's arms, whatever its exchange; "auto" has OneBit's."""
    codecs: dict[str, Codec] = {"topk": TopK(density=density), "qsgd": QSGD(), "terngrad": TernGrad()}
    return codecs.get(name.partition("-")[0], OneBit())


def hook_of(name: str, model: DistributedDataParallel, density: float = 0.01, rank: int = 2) -> Hook:
    """The hook of an arm and its state, for a model; codecs that are named compress always. `rank`: PowerSGD's."""
    if name == FLOOR:
        return Hook(Floor(), without_communication)
    if name == "fp32":
        return Hook(None, None)
    if name == "fp16":
        return Hook(None, default_hooks.fp16_compress_hook)
    if name == "powersgd":
        power = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=POWERSGD_DENSE_STEPS,
            orthogonalization_epsilon=1e-8,  # without it, columns of zeros become NaN
            compression_stats_logging_frequency=10**9,
        )
        return Hook(power, powerSGD_hook.powerSGD_hook)
    from ... import CompressState, compress_hook

    options: dict[str, Any] = {} if name == "auto" else {"fallback": None, "exchange": name.partition("-")[2] or "auto"}
    return Hook(CompressState(model, codec_of(name, density), **options), compress_hook)


def in_turns(turns: Mapping[str, Callable[[], None]], rounds: int) -> None:
    """Give every arm its turn in every round, in another order each: nobody always follows the one that heats most."""
    names = list(turns)
    for round_ in range(rounds):
        for place in range(len(names)):
            turns[names[(place + round_) % len(names)]]()


def deciding(state: Any) -> bool:
    """Whether a hook's state still tries what to do, if it is one that decides. Alike on all ranks."""
    return bool(getattr(state, "deciding", False))


def average(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Times [rounds][steps], each the mean of the ranks'."""
    return [[fmean(step) for step in zip(*turns, strict=True)] for turns in zip(*ranks, strict=True)]


def slowest(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Times [rounds][steps] of which each lasts until its slowest rank is done."""
    return [[max(step) for step in zip(*turns, strict=True)] for turns in zip(*ranks, strict=True)]
