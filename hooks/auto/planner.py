"""Which exchange serves a bucket: as the user says, or by what the cost model predicts."""

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
from ..exchanges import EXCHANGES, BucketSpec, Dense, Exchange, Hierarchical, TwoPass, possible, serving
from ..exchanges.dense import all_reduce_estimate
from ..network import cost, probe
from ..network.cost import HIERARCHICAL
from .trial import COMPRESSED, FALLBACK, HALF, PLANNED

#: What `CompressState(fallback=…)` takes.
Fallback = torch.dtype | Literal["auto"] | None
#: Half precision: what it leaves out is kept.
HALF_PRECISION = Cast(torch.bfloat16)
#: Steps after which "auto" looks again at how much the ranks' selections overlap.
REPLAN_INTERVAL = 256


@dataclass(frozen=True)
class Choice:
    """How a step is compressed: what ranks compare. `exchange` may still be "auto" or "hierarchical"; `way` is what a
    trial lets "auto" choose from."""

    codec: Codec
    exchange: str
    feedback: bool
    way: str = PLANNED

    @cached_property
    def digest(self) -> int:
        return int.from_bytes(hashlib.blake2b(repr(self).encode(), digest_size=7).digest(), "big")


def codecs_of(choice: Choice, fallback: Fallback) -> list[Codec]:
    """Every codec that may serve a choice."""
    half = choice.exchange == "auto" and (fallback == torch.bfloat16 or (fallback == "auto" and choice.feedback))
    return [choice.codec, HALF_PRECISION] if half and choice.codec != HALF_PRECISION else [choice.codec]


def check_exchange(exchange: str, codec: Codec, besides: Sequence[str] = ("auto", HIERARCHICAL)) -> None:
    """Raises ValueError if `exchange` is neither one of `EXCHANGES` nor of `besides`, or impossible for this codec."""
    if exchange not in (*besides, *EXCHANGES):
        names = ", ".join(map(repr, (*besides, *EXCHANGES)))
        raise ValueError(f"exchange={exchange!r}: expected one of {names}")
    able = possible(codec)
    if exchange in EXCHANGES and exchange not in able:
        needs = {"two_pass": "cuts wires into slices", "factors": "averages factors of matrices"}
        why = needs.get(exchange, "needs indices on the wire")
        raise ValueError(f"exchange={exchange!r} {why}, and {codec} has none: use one of {', '.join(map(repr, able))}")


@dataclass(frozen=True)
class Plan:
    """What serves a bucket now.

    Attributes:
        codec: what compresses it; a cast where compression does not pay.
        exchange: a key of `EXCHANGES`, with "hierarchical " before it where nodes count.
        feedback: whether residuals are kept.
    """

    codec: Codec
    exchange: str
    feedback: bool


def calibrated(
    topology: Topology, device: torch.device, again: bool = False
) -> tuple[cost.Calibration, cost.Nodes | None]:
    """What all ranks' exchanges take, and those inside and between nodes. A collective; groups are probed once, and
    `again` if told to."""
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
    """Every exchange that can carry a bucket in its codec's wire, or the one made for that: among all ranks, and
    where they lie on nodes, between those.

    Args:
        inline: leave out what makes the host wait for the device.
    """
    names = (what.codec.exchange,) if what.codec.exchange else possible(what.codec)
    able = [serving(name, inline) for name in names if name != Dense.name]
    able = [exchange for exchange in able if not (exchange.syncs_host and inline)]
    # Two ranks receive as much by one pass as by two.
    estimates = [exchange.estimate(flat, what) for exchange in able if exchange is not TwoPass or what.world_size > 2]
    if nodes is not None:
        estimates += [Hierarchical.estimate_around(exchange, nodes, what) for exchange in able]
    return estimates


@dataclass
class Planner:
    """Turns choices into plans, the same on every rank.

    Args:
        topology: the ranks.
        device: where gradients are.
        fallback: what to send where compression does not pay: float32, bfloat16, "auto": bfloat16 where residuals are
            kept and it is faster, else float32; or None: compress always.
        inline: whether the host does not wait for exchanges, as over NCCL.
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
        """What messages among all ranks take, where that has been probed."""
        return self._flat

    def calibrate(self) -> None:
        """Probe the groups: a collective, at most once."""
        if self._flat is None and self.topology.all.size > 1:
            self._flat, self._nodes = calibrated(self.topology, self.device)

    def recalibrate(self) -> None:
        """Probe the groups again. A collective."""
        self._flat, self._nodes = calibrated(self.topology, self.device, again=True)

    def knows(self, choice: Choice) -> bool:
        """Whether `plan` needs no other rank any more."""
        return choice.exchange != "auto" or self.topology.all.size == 1 or self._key(choice) in self._speeds

    def learn(self, choice: Choice, numel: int) -> None:
        """Measure what `plan` needs to know of a codec. A collective."""
        keys = [self._key(choice), *((codec, True) for codec in codecs_of(choice, self.fallback)[1:])]
        for key in keys:
            if key not in self._speeds:
                self._speeds[key] = probe.codec_speed(*key, numel, self.topology.all, self.device)

    def plan(self, choice: Choice, numel: int, union: int, buckets: int = 1) -> tuple[Plan, str]:
        """What serves a bucket of `numel` elements, and why.

        Args:
            union: how many elements any rank has selected, of a sparse codec's, as seen before; 0: not known.
            buckets: how many like it a step has, which wait for the network together.
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
        plans = self._candidates(choice, numel, union)
        decision = cost.decide((estimate for _, estimate in plans.values()), buckets)
        return plans[decision.name][0], str(decision)

    def make(self, plan: Plan, name: str, layout: Layout, extra: int, device: torch.device) -> Exchange:
        """The exchange that a plan wants, with every buffer it needs, on channels of this name."""
        inner, topology = serving(plan.exchange.rpartition(" ")[2], self.inline), self.topology
        numel = layout_numel(layout)
        if not plan.exchange.startswith(HIERARCHICAL):
            return inner(plan.codec.of_layout(layout), numel, extra, device, topology.all.channel(name))
        assert topology.inside is not None
        assert topology.between is not None
        groups = topology.inside.channel(name), topology.between.channel(name)
        return Hierarchical(inner, plan.codec, numel, extra, device, *groups)

    def needs_trial(self, choice: Choice) -> bool:
        """Whether the cost model chooses between compression and something else."""
        return (
            choice.exchange == "auto"
            and self._flat is not None
            and self.fallback is not None
            and not choice.codec.lossless
        )

    def challengers(self, choice: Choice, buckets: Sequence[tuple[int, int, Plan]]) -> tuple[str, dict[str, float]]:
        """Which way what is planned comes nearest to, and what a trial should hold against it: ways, and the seconds in
        which the network carries their bytes.

        Args:
            choice: an `needs_trial` one, as planned.
            buckets: of each, elements, union, and what serves it now.
        """
        assert self._flat is not None
        beta = min(line.beta for line in (self._flat.all_gather, self._flat.all_to_all, self._flat.all_reduce))
        served = {self._way(choice, plan) for numel, _, plan in buckets if numel}
        ways = [way for way in (COMPRESSED, HALF, FALLBACK) if self._codecs(replace(choice, way=way))]
        planned = next((way for way in ways if way in served), FALLBACK)
        found = {}
        for way in ways:
            plans = [self._candidates(replace(choice, way=way), n, union).values() for n, union, _ in buckets if n]
            found[way] = beta * sum(min(estimate.received for _, estimate in bucket) for bucket in plans)
        return planned, {way: seconds for way, seconds in found.items() if way != planned}

    def _candidates(self, choice: Choice, numel: int, union: int) -> dict[str, tuple[Plan, cost.Estimate]]:
        size, plans = self.topology.all.size, dict[str, tuple[Plan, cost.Estimate]]()
        assert self._flat is not None
        for codec in self._codecs(choice):
            if codec is None:
                plans["dense"] = Plan(choice.codec, "dense", False), all_reduce_estimate(self._flat, numel, size)
                continue
            asked = codec == choice.codec
            feedback = choice.feedback if asked else True
            speed = self._speeds[codec.timed_as, feedback]
            what = BucketSpec(codec, speed, numel, size, union if asked else 0, feedback)
            for estimate in compressed(what, self._flat, self._nodes, self.inline):
                name = estimate.name if asked else f"{estimate.name} in bfloat16"
                plans[name] = Plan(codec, estimate.name, feedback), replace(estimate, name=name)
        return plans

    def _codecs(self, choice: Choice) -> Sequence[Codec | None]:
        """What may serve a bucket in the way of a choice; None: an all-reduce of float32."""
        lossless, half = choice.codec.lossless, codecs_of(choice, self.fallback)[1:]
        compression = [] if lossless else [choice.codec]
        exact = [None] if lossless or self.fallback in (torch.float32, "auto") else []
        ways = {COMPRESSED: compression, HALF: half if exact else [], FALLBACK: exact or half}
        return ways.get(choice.way, [*compression, *half, *exact])

    @staticmethod
    def _way(choice: Choice, plan: Plan) -> str:
        if plan.exchange == "dense":
            return FALLBACK
        return COMPRESSED if plan.codec == choice.codec else HALF

    @staticmethod
    def _key(choice: Choice) -> tuple[Codec, bool]:
        return choice.codec.timed_as, choice.feedback


def default_exchange(codec: Codec, world_size: int) -> str:
    """Without a cost model: the fewest bytes received, and one pass where they are equal. A rank alone has nothing to
    send, so it loses nothing."""
    if codec.lossless or world_size == 1:
        return "dense"
    if codec.exchange:
        return codec.exchange
    return "gather" if not isinstance(codec, BlockCodec) or world_size <= 2 else "two_pass"
