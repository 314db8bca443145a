"""Steps of the library's reducer on a `World`: over NCCL, on GPUs that are not there, or over messages, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from gradwire.compress import Codec
from gradwire.compress.feedback.base import Feedback
from gradwire.compress.feedback.store import FeedbackStore
from gradwire.compress.formats.layout import Slot
from gradwire.hooks.auto.planner import Choice, Planner
from gradwire.hooks.comm.group import Group
from gradwire.hooks.comm.pipeline import Pipeline
from gradwire.hooks.comm.send_queue import SendQueue
from gradwire.hooks.comm.topology import Topology
from gradwire.hooks.core.bucket import Bucket
from gradwire.hooks.core.reducer import Reducer
from gradwire.hooks.core.session import WORDS, Announcement, Session
from gradwire.hooks.core.statistics import Statistics
from gradwire.hooks.training.grad_scaler import LossScale, ScalerSync
from torch import Tensor

from .tensors import DEVICE, on_gpu, read
from .world import World

CPU = torch.device("cpu")
#: Parameters, by bucket.
BUCKETS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"a.weight": (40, 21), "a.bias": (7,)},
    {"b.weight": (33, 9)},
    {"b.bias": (5,), "c.weight": (300,)},
)
GROWTH_INTERVAL = 2


@dataclass(frozen=True)
class Recipe:
    """What is trained.

    Attributes:
        nodes: ranks on each node, 0 without any.
        overflows: the steps in which a rank's gradient is not finite.
        reads: whether the host may wait for the device, as some exchanges must.
        abandons: whether nobody waits for the means of the last step, whose buffers are gone as soon as they are handed
            over, as where a backward pass raises.
    """

    codec: Codec
    exchange: str
    strategy: Feedback | None = None
    feedback: bool = True
    scaler: bool = False
    exclude: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    steps: int = 4
    nodes: int = 0
    overflows: frozenset[int] = frozenset()
    abandons: bool = False
    reads: bool = False
    seed: int = 0
    buckets: tuple[dict[str, tuple[int, ...]], ...] = field(default=BUCKETS, hash=False)


@dataclass
class Outcome:
    """What a rank has at the end: means that were applied, in sum, what it keeps, and what was counted."""

    applied: list[Tensor]
    kept: dict[str, dict[str, Tensor]]
    statistics: Statistics
    scale: float | None


class Meeting(Session):
    """A connection of ranks that have met."""

    def __init__(self, world: World, rank: int, device: torch.device, nodes: int) -> None:
        everyone = tuple(range(world.size))
        gpu = device.type == "cuda"

        def group(ranks: tuple[int, ...]) -> Group:
            if gpu:
                return Group(world.communicator(ranks).member(rank), ranks)
            return Group(world.words_of(ranks).member(rank), ranks)

        self.control = Group(world.words.member(rank), everyone)
        #: As Gloo's, beside a GPU too.
        self.host_group = Group(world.words_of(everyone).member(rank), everyone).channel("state")
        self.group = group(everyone) if gpu else self.host_group
        self.sends = SendQueue()
        parts: tuple[Group, ...] = ()
        if nodes:
            first, place = rank - rank % nodes, rank % nodes
            parts = group(tuple(range(first, first + nodes))), group(tuple(range(place, world.size, nodes)))
        self.dense_group = None
        self.planner = Planner(Topology(self.group, *parts), device, torch.float32, inline=True)
        self.uneven_saves = self.drifted = False
        self._announcement = Announcement(self.control.channel("steps"), WORDS)
        self.pipeline = Pipeline(f"test-{rank}", device, threaded=False)


def gradient(recipe: Recipe, rank: int, step: int, bucket: int, numel: int) -> Tensor:
    """A rank's own, of a bucket, on the CPU."""
    generator = torch.Generator().manual_seed(((recipe.seed * 97 + step) * 31 + bucket) * 17 + rank)
    x = torch.randn(numel, generator=generator)
    if step in recipe.overflows and rank == step % 2 and bucket == 1:
        x[3] = torch.inf
    return x.to(recipe.dtype)


def train(
    world: World,
    rank: int,
    recipe: Recipe,
    device: torch.device = DEVICE,
    alter: Callable[[Reducer, int], None] | None = None,
) -> Outcome:
    """Some steps, as DDP and an optimizer would make them; on a GPU none of them may wait for it.

    Args:
        alter: given the reducer, before the first step: for faults.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=GROWTH_INTERVAL) if recipe.scaler else None
    memory = FeedbackStore(recipe.strategy, keep_previous=scaler is not None)
    tracker, statistics = ScalerSync(LossScale(scaler), memory), Statistics()
    session = Meeting(world, rank, device, recipe.nodes)
    shapes = [shape for bucket in recipe.buckets for shape in bucket.values()]
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    reducer = Reducer(session, memory, tracker, statistics, recipe.seed, clean=False, numel=numel)
    if alter is not None:
        alter(reducer, rank)
    choice = Choice(recipe.codec, recipe.exchange, recipe.feedback)
    place: Callable[[Tensor], Tensor] = on_gpu if device.type == "cuda" else Tensor.clone
    data = [
        [place(gradient(recipe, rank, step, i, _slots(bucket)[1])) for i, bucket in enumerate(recipe.buckets)]
        for step in range(recipe.steps)
    ]
    buffers = [place(torch.zeros(_slots(bucket)[1], dtype=recipe.dtype)) for bucket in recipe.buckets]
    applied = [place(torch.zeros(buffer.numel())) for buffer in buffers]
    units: dict[int, Bucket] = {}
    for number in range(recipe.steps):
        last = recipe.abandons and number == recipe.steps - 1
        with nullcontext() if recipe.reads else world.machine.never_waiting():
            step = reducer.begin(number, choice)
            futures = []
            for i, bucket in enumerate(recipe.buckets):
                buffer, grad = buffers[i].clone() if last else buffers[i], data[number][i]
                buffer.copy_(grad if scaler is None else scaler.scale(grad))  # backward
                if i not in units:
                    units[i] = Bucket(i, [], _slots(bucket)[0], recipe.exclude & set(bucket), buffer, recipe.strategy)
                if i == 0:
                    reducer.announce_step(step, units[0], 0, tracker.loss_scale.scaling())
                step.names |= set(bucket)
                futures.append(reducer.reduce(step, units[i], buffer))
            reducer.end(step)
            if not last:
                _apply([future.wait() for future in futures], applied, scaler)
            futures.clear()
            del buffer
            if last:
                step.reduced.clear()
        session.pipeline.check()
    reducer.flush()
    kept = {vector: {name: read(x) for name, x in found.items()} for vector, found in memory.everything().items()}
    scale = None if scaler is None else float(scaler.get_scale())
    return Outcome([read(x) for x in applied], kept, statistics, scale)


def _slots(bucket: dict[str, tuple[int, ...]]) -> tuple[tuple[Slot, ...], int]:
    slots, start = [], 0
    for name, shape in bucket.items():
        slots.append(Slot(name, start, shape, torch.empty(shape, device="meta").stride()))
        start += torch.Size(shape).numel()
    return tuple(slots), start


def _apply(means: list[Tensor], applied: list[Tensor], scaler: torch.amp.GradScaler | None) -> None:
    """What an optimizer does, and a scaler, which skips what is not finite."""
    if scaler is None:
        for total, mean in zip(applied, means, strict=True):
            total += mean
        return
    scale = scaler._scale
    assert scale is not None
    finite = torch.stack([mean.isfinite().all() for mean in means]).all()
    for total, mean in zip(applied, means, strict=True):
        total += torch.where(finite, mean.float() / scale, 0.0)
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {means[0].device: (~finite).float().view(1)}
    scaler.update()


def outcomes(recipe: Recipe, world: World, device: torch.device = DEVICE, **options: Any) -> list[Outcome]:
    """Of every rank."""
    return world.run(lambda world, rank: train(world, rank, recipe, device, **options))


def differences(a: list[Outcome], b: list[Outcome]) -> list[str]:
    """In what two runs differ, to the bit."""
    found = []
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        pairs = {f"applied {i}": pair for i, pair in enumerate(zip(x.applied, y.applied, strict=True))}
        for vector, names in x.kept.items():
            pairs |= {f"{vector} of {name}": (names[name], y.kept[vector][name]) for name in names}
        found += [f"rank {rank}: {name}" for name, (p, q) in pairs.items() if not same_bits(p, q)]
        found += [f"rank {rank}: scale"] if x.scale != y.scale else []
        for count in ("steps", "elements", "bytes_sent", "bytes_received", "skipped_entries", "nonfinite_steps"):
            if getattr(x.statistics, count) != getattr(y.statistics, count):
                found.append(f"rank {rank}: {count} {getattr(x.statistics, count)} {getattr(y.statistics, count)}")
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
