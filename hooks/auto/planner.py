"""Which exchange serves a bucket: as the user says, or by what the cost model predicts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ...compress.cast import Cast
from ...compress.codec import BlockCodec, Codec
from ...compress.layout import Layout, layout_numel
from ..comm.topology import Topology
from ..exchanges import EXCHANGES, Bucketful, Dense, Exchange, Hierarchical, TwoPass, possible, serving
from . import cost, probe
from .cost import HIERARCHICAL
from .trial import COMPRESSED, FALLBACK, PLANNED

#: Steps after which "auto" looks again at how much the ranks' selections overlap.
REVIEW_EVERY = 256


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
    what: Bucketful, flat: cost.Calibration, nodes: cost.Nodes | None, inline: bool = False
) -> list[cost.Estimate]:
    """Every exchange that can carry a bucket in its codec's wire, or the one made for that: among all ranks, and
    where they lie on nodes, between those.

    Args:
        inline: leave out what makes the host wait for the device.
    """
    names = (what.codec.exchange,) if what.codec.exchange else possible(what.codec)
    able = [serving(name, inline) for name in names if name != Dense.name]
    able = [exchange for exchange in able if not (exchange.host_reads and inline)]
    estimates = [exchange.estimate(flat, what) for exchange in able]
    if nodes is not None:
        estimates += [Hierarchical.estimate_around(exchange, nodes, what) for exchange in able]
    return estimates


@dataclass
class Planner:
    """Turns choices into plans, the same on every rank.

    Args:
        topology: the ranks.
        device: where gradients are.
        fallback: what to send where compression does not pay: float32, bfloat16, or None: compress always.
        inline: whether the host does not wait for exchanges, as over NCCL.
    """

    topology: Topology
    device: torch.device
    fallback: torch.dtype | None
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
        codec, feedback = self._key(choice)
        group, device = self.topology.all, self.device
        self._speeds[codec, feedback] = probe.codec_speed(codec, feedback, numel, group, device)
        if self.fallback == torch.bfloat16 and (BF16, True) not in self._speeds:
            self._speeds[BF16, True] = probe.codec_speed(BF16, True, numel, group, device)

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

    def undecided(self, choice: Choice) -> bool:
        """Whether the cost model chooses between compression and something else."""
        return (
            choice.exchange == "auto"
            and self._flat is not None
            and self.fallback is not None
            and not choice.codec.lossless
        )

    def rival(self, choice: Choice, buckets: Sequence[tuple[int, int, Plan]]) -> tuple[str, float]:
        """What a trial should hold against what is planned, and the seconds in which the network carries its bytes.

        Args:
            choice: an `undecided` one, as planned.
            buckets: of each, elements, union, and what serves it now.
        """
        compresses = any(plan.codec == choice.codec and plan.exchange != "dense" for numel, _, plan in buckets if numel)
        rival = replace(choice, way=FALLBACK if compresses else COMPRESSED)
        candidates = [self._candidates(rival, numel, union).values() for numel, union, _ in buckets if numel]
        received = sum(min(estimate.received for _, estimate in plans) for plans in candidates)
        assert self._flat is not None
        lines = self._flat.all_gather, self._flat.all_to_all, self._flat.all_reduce
        return rival.way, received * min(line.beta for line in lines)

    def _candidates(self, choice: Choice, numel: int, union: int) -> dict[str, tuple[Plan, cost.Estimate]]:
        codec, feedback, size = choice.codec, choice.feedback, self.topology.all.size
        assert self._flat is not None
        plans: dict[str, tuple[Plan, cost.Estimate]] = {}

        def add(plan: Plan, estimate: cost.Estimate) -> None:
            plans[estimate.name] = plan, estimate

        if not codec.lossless and choice.way != FALLBACK:
            what = Bucketful(codec, self._speeds[self._key(choice)], numel, size, union, feedback)
            for estimate in compressed(what, self._flat, self._nodes, self.inline):
                add(Plan(codec, estimate.name, feedback), estimate)
        if choice.way == COMPRESSED:
            return plans
        if codec.lossless or self.fallback == torch.float32:
            add(Plan(codec, "dense", False), self._flat.dense(cost.Shape(numel, 0, size, 0)))
        if self.fallback == torch.bfloat16:
            speed = self._speeds[BF16, True]
            estimate = replace(TwoPass.estimate(self._flat, Bucketful(BF16, speed, numel, size)), name="bfloat16")
            add(Plan(BF16, "two_pass", True), estimate)
        return plans

    @staticmethod
    def _key(choice: Choice) -> tuple[Codec, bool]:
        return choice.codec.timed_as, choice.feedback


BF16 = Cast(torch.bfloat16)


def default_exchange(codec: Codec, world_size: int) -> str:
    """Without a cost model: the fewest bytes received, and one pass where they are equal."""
    if codec.lossless:
        return "dense"
    if codec.exchange:
        return codec.exchange
    return "gather" if not isinstance(codec, BlockCodec) or world_size <= 2 else "two_pass"
