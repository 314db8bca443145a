"""The plan of a bucket: its codec and exchange, as the user asks or as the cost model predicts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from ...compress.codec import BlockCodec, Codec
from ...compress.codecs.cast import Cast
from ...compress.formats.layout import Layout, layout_numel
from ..comm.topology import Topology
from ..exchanges import (
    EXCHANGES,
    BucketSpec,
    Dense,
    Exchange,
    Hierarchical,
    NonZeroBlocks,
    possible,
    serving,
)
from ..exchanges.dense import all_reduce_estimate
from ..network import cost, probe
from ..network.cost import HIERARCHICAL
from .trial import COMPRESSED, FALLBACK, HALF, PLANNED

#: Values of `CompressState(fallback=…)`.
Fallback = torch.dtype | Literal["auto"] | None
#: Half precision, with residuals.
HALF_PRECISION = Cast(torch.bfloat16)
#: Steps after which "auto" plans again, with the union as it is then.
REPLAN_INTERVAL = 256


@dataclass(frozen=True)
class Choice:
    """The compression of a step, on which the ranks must agree. `exchange` may still be "auto" or "hierarchical";
    `candidate` is the trial's. `warmup`: number of first steps that are dense, if this is one of them."""

    codec: Codec
    exchange: str
    feedback: bool
    candidate: str = PLANNED
    warmup: int = field(default=0, compare=False, repr=False)

    @cached_property
    def digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=7).digest(), "big")


def codecs_of(choice: Choice, fallback: Fallback) -> list[Codec]:
    """The codecs that may serve a choice."""
    half = choice.exchange == "auto" and (fallback == torch.bfloat16 or (fallback == "auto" and choice.feedback))
    return [choice.codec, HALF_PRECISION] if half and choice.codec != HALF_PRECISION else [choice.codec]


def check_exchange(exchange: str, codec: Codec, besides: Sequence[str] = ("auto", HIERARCHICAL)) -> None:
    """Raises ValueError if `exchange` is neither one of `EXCHANGES` nor of `besides`, or impossible for this codec."""
    if exchange not in (*besides, *EXCHANGES):
        names = ", ".join(map(repr, (*besides, *EXCHANGES)))
        raise ValueError(f"exchange={exchange!r}: expected one of {names}")
    able = possible(codec)
    if exchange in EXCHANGES and exchange not in able:
        names, needs = ", ".join(map(repr, able)), EXCHANGES[exchange].needs
        raise ValueError(f"exchange={exchange!r} needs {needs}, not {codec}: use one of {names}")


@dataclass(frozen=True)
class Plan:
    """The codec and exchange that serve a bucket.

    Attributes:
        codec: a cast if compression does not pay.
        exchange: a key of `EXCHANGES`, after "hierarchical " for an exchange between nodes.
        feedback: residuals are kept.
    """

    codec: Codec
    exchange: str
    feedback: bool


def calibrated(
    topology: Topology, device: torch.device, again: bool = False
) -> tuple[cost.Calibration, cost.Nodes | None]:
    """Calibrations among all ranks, and inside and between nodes. A collective; groups are probed once, or `again`."""
    everywhere = False if again else None
    flat = probe.calibration(topology.all, device, everywhere)
    if topology.inside is None or topology.between is None:
        return flat, None
    inside, between = (
        probe.slowest(probe.calibration(group, device, everywhere), topology.all, device)
        for group in (topology.inside, topology.between)
    )
    return flat, cost.Nodes(inside, between, topology.inside.size)


def compressed(
    what: BucketSpec, flat: cost.Calibration, nodes: cost.Nodes | None, inline: bool = False
) -> list[cost.Estimate]:
    """Estimates of the exchanges that can carry the codec: among all ranks, and with `nodes` also between nodes.

    Args:
        inline: leave out exchanges that make the host wait for the device.
    """
    names = (what.codec.exchange,) if what.codec.exchange else possible(what.codec)
    able = [serving(name, inline) for name in names if name != Dense.name]
    able = [exchange for exchange in able if not (exchange.syncs_host and inline)]
    estimates = [exchange.estimate(flat, what) for exchange in able if what.world_size >= exchange.least_ranks]
    if nodes is not None:
        estimates += [Hierarchical.estimate_around(exchange, nodes, what) for exchange in able]
    return estimates


@dataclass
class Planner:
    """Turns choices into plans, the same on every rank.

    Args:
        topology: the ranks.
        device: of gradients.
        fallback: replaces compression that does not pay: float32; bfloat16; "auto": bfloat16 if residuals are kept and
            it is faster, else float32; None: compress always.
        inline: the host does not wait for exchanges, as over NCCL.
    """

    topology: Topology
    device: torch.device
    fallback: Fallback
    inline: bool = False
    _flat: cost.Calibration | None = None
    _nodes: cost.Nodes | None = None
    _speeds: dict[tuple[Codec, bool], cost.CodecSpeed] = field(default_factory=dict)

    @property
    def network(self) -> cost.Calibration | None:
        """The calibration among all ranks; None: not probed."""
        return self._flat

    def calibrate(self) -> None:
        """Probe the groups: a collective, at most once."""
        if self._flat is None and self.topology.all.size > 1:
            self._flat, self._nodes = calibrated(self.topology, self.device)

    def recalibrate(self) -> None:
        """Probe the groups again. A collective."""
        self._flat, self._nodes = calibrated(self.topology, self.device, again=True)

    def knows(self, choice: Choice) -> bool:
        """True if `plan` of a choice by "auto" needs no collective any more."""
        return self.topology.all.size == 1 or self._key(choice) in self._speeds

    def learn(self, choice: Choice, numel: int) -> None:
        """Measure the speed of the choice's codecs, for `plan`. A collective.

        Args:
            numel: elements of all gradients, of which buckets have at most as many.
        """
        keys = [self._key(choice), *((codec, True) for codec in codecs_of(choice, self.fallback)[1:])]
        for key in keys:
            if key not in self._speeds:
                self._speeds[key] = probe.codec_speed(*key, numel, self.topology.all, self.device)

    def plan(self, choice: Choice, numel: int, union: int, buckets: int = 1) -> tuple[Plan, cost.Decision | str]:
        """The plan of a bucket of `numel` elements, and the reason.

        Args:
            union: the last observed size of the ranks' union with a sparse codec, or of the blocks that are not zero
                with a lossless one; 0: unknown.
            buckets: buckets like it in a step, which wait for the network together.
        """
        codec, feedback, size = choice.codec, choice.feedback, self.topology.all.size
        if choice.exchange == HIERARCHICAL and self.topology.between is not None:
            inner = "two_pass" if codec.lossless else default_exchange(codec, self.topology.between.size)
            name = f"{HIERARCHICAL} {inner}"
            return Plan(codec, name, feedback), "as asked"
        if choice.exchange in EXCHANGES:
            return Plan(codec, choice.exchange, feedback and choice.exchange != "dense"), "as asked"
        if self._flat is None or numel == 0 or choice.exchange == HIERARCHICAL:
            name = default_exchange(codec, size)
            return Plan(codec, name, feedback and name != "dense"), "nothing to choose from"
        plans = self._estimates(choice, numel, union)
        decision = cost.decide((estimate for _, estimate in plans.values()), buckets)
        return plans[decision.name][0], decision

    def make(self, plan: Plan, name: str, layout: Layout, extra: int, device: torch.device) -> Exchange:
        """Make a plan's exchange, on channels of this name."""
        inner, topology = serving(plan.exchange.rpartition(" ")[2], self.inline), self.topology
        numel = layout_numel(layout)
        if not plan.exchange.startswith(HIERARCHICAL):
            return inner(plan.codec.for_layout(layout), numel, extra, device, topology.all.channel(name))
        assert topology.inside is not None
        assert topology.between is not None
        groups = topology.inside.channel(name), topology.between.channel(name)
        return Hierarchical(inner, plan.codec, numel, extra, device, *groups)

    def needs_trial(self, choice: Choice) -> bool:
        """True if the cost model chooses between compression and a fallback."""
        return (
            choice.exchange == "auto"
            and self._flat is not None
            and self.fallback is not None
            and not choice.codec.lossless
        )

    def challengers(self, choice: Choice, buckets: Sequence[tuple[int, int, Plan]]) -> tuple[str, dict[str, float]]:
        """The candidate nearest to the plan, and the others for a trial, with the seconds in which the network carries
        their bytes.

        Args:
            choice: one that `needs_trial`.
            buckets: elements, union and plan of each.
        """
        assert self._flat is not None
        beta = min(line.beta for line in (self._flat.all_gather, self._flat.all_to_all, self._flat.all_reduce))
        served = {self._candidate_of(choice, plan) for numel, _, plan in buckets if numel}
        choices = {name: replace(choice, candidate=name) for name in (COMPRESSED, HALF, FALLBACK)}
        candidates = [name for name, candidate in choices.items() if self._codecs(candidate)]
        planned = next((name for name in candidates if name in served), FALLBACK)
        found = {}
        for name in candidates:
            plans = [self._estimates(choices[name], n, union).values() for n, union, _ in buckets if n]
            found[name] = beta * sum(min(estimate.received for _, estimate in bucket) for bucket in plans)
        return planned, {name: seconds for name, seconds in found.items() if name != planned}

    def _estimates(self, choice: Choice, numel: int, union: int) -> dict[str, tuple[Plan, cost.Estimate]]:
        size, plans = self.topology.all.size, dict[str, tuple[Plan, cost.Estimate]]()
        assert self._flat is not None
        for codec in self._codecs(choice):
            if codec is None:
                plans["dense"] = Plan(choice.codec, "dense", False), all_reduce_estimate(self._flat, numel, size)
                if choice.codec.lossless and union and not self.inline:
                    speed = self._speeds[choice.codec.speed_key, False].at(numel)
                    blocks = NonZeroBlocks.estimate(self._flat, BucketSpec(choice.codec, speed, numel, size, union))
                    plans[blocks.name] = Plan(choice.codec, blocks.name, False), blocks
                continue
            asked = codec == choice.codec
            feedback = choice.feedback if asked else True
            speed = self._speeds[codec.speed_key, feedback].at(numel)
            what = BucketSpec(codec, speed, numel, size, union if asked else 0, feedback)
            for estimate in compressed(what, self._flat, self._nodes, self.inline):
                name = estimate.name if asked else f"{estimate.name} in bfloat16"
                plans[name] = Plan(codec, estimate.name, feedback), replace(estimate, name=name)
        return plans

    def _codecs(self, choice: Choice) -> Sequence[Codec | None]:
        """The codecs of a choice's candidate; None: an all-reduce of float32."""
        lossless, half = choice.codec.lossless, codecs_of(choice, self.fallback)[1:]
        compression = [] if lossless else [choice.codec]
        exact = [None] if lossless or self.fallback in (torch.float32, "auto") else []
        candidates = {COMPRESSED: compression, HALF: half if exact else [], FALLBACK: exact or half}
        return candidates.get(choice.candidate, [*compression, *half, *exact])

    @staticmethod
    def _candidate_of(choice: Choice, plan: Plan) -> str:
        if plan.exchange == "dense":
            return FALLBACK
        return COMPRESSED if plan.codec == choice.codec else HALF

    @staticmethod
    def _key(choice: Choice) -> tuple[Codec, bool]:
        return choice.codec.speed_key, choice.feedback


def default_exchange(codec: Codec, world_size: int) -> str:
    """The exchange without a cost model: fewest bytes received, and of equals the one with fewest stages. A single rank
    sends nothing, so its gradients stay exact."""
    if codec.lossless or world_size == 1:
        return "dense"
    if codec.exchange:
        return codec.exchange
    return "gather" if not isinstance(codec, BlockCodec) or world_size <= 2 else "two_pass"
