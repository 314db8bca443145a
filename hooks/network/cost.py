"""The cost model: latency, bytes and work, of a network that `probe` measures. The cost of each exchange is its own
`estimate` (`hooks.exchanges`), and that of an algorithm for sparse gradients lies in `hooks.sparse.costs`.

A stage of b received bytes takes α + β·b (Hockney 1994), with α and β of its own for each kind of message; what is done
to entries and elements takes so many seconds for each. Receives are announced ahead, so α is one way: the distance, and
what waking up takes. All buckets of a step are under way at once: they share the link and the processor, but wait for
the distance together. So of the buckets of a step, the α of each stage counts once (`Estimate.among`), but for what of
it the processor needs for messages (`Line.each`): with many ranks on few cores that is all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ...compress.formats.entries import index_bytes, value_bytes

#: What precedes the name of an exchange between nodes.
HIERARCHICAL = "hierarchical"
#: How many of Gloo's collectives are under way at once: it has as many threads.
GLOO_COLLECTIVES = 2
#: More than any step has.
UNLIMITED = 1 << 30
#: Gloo's all-reduce goes round a ring by pieces of at most this, two under way at once (gloo/allreduce.cc).
GLOO_PIECE = 1 << 20


@dataclass(frozen=True)
class Line:
    """One stage: `alpha` seconds, and `beta` for each byte that a rank receives; up to the largest message that was
    probed, what was measured, as backends change their ways with the size.

    Attributes:
        points: bytes received and seconds taken, ascending.
        window: bytes for which `alpha` is waited once, and so again for as many more: what is under way at once;
            None: all of it.
        each: the part of `alpha` that every stage takes for itself, though others are under way: the processor's time
            for its messages, one to each rank, beside that of all ranks on the same machine.
    """

    alpha: float
    beta: float
    points: tuple[tuple[float, float], ...] = ()
    window: float | None = None
    each: float = 0.0

    def transfer(self, size: float) -> float:
        """Seconds for so many bytes received, beyond `alpha`."""
        if not self.points or size >= self.points[-1][0]:
            again = 0.0 if self.window is None else max(0.0, size / self.window - 1)
            return self.beta * size + self.alpha * again
        (before, fast), (after, slow) = next(
            pair for pair in pairwise(((0.0, self.alpha), *self.points)) if size < pair[1][0]
        )
        return max(0.0, fast + (slow - fast) * (size - before) / (after - before) - self.alpha)


#: A stage: its line, and the bytes that a rank receives.
Move = tuple[Line, float]


@dataclass(frozen=True)
class Shape:
    """One exchange: N elements, at most k entries on each of P ranks, u in their union, and how values travel."""

    numel: int
    k: int
    world_size: int
    union: int
    values: torch.dtype = torch.float32

    def entry_bytes(self, numel: int, k: int) -> int:
        return index_bytes(numel, k) + value_bytes(k, self.values)


@dataclass(frozen=True)
class Estimate:
    """What one exchange will take.

    Attributes:
        name: of the exchange.
        received: bytes that each rank receives; of a hierarchical exchange, from other nodes.
        latency, transfer: seconds waiting, and moving bytes and messages.
        encode, decode: seconds computing, before the bytes move and after.
        inside: bytes that each rank receives from its own node besides.
        stages: how often it waits.
        at_once: how many buckets' exchanges of this kind wait together.
    """

    name: str
    received: float
    latency: float
    transfer: float
    encode: float
    decode: float
    inside: float = 0.0
    stages: int = 1
    at_once: int = UNLIMITED

    @property
    def work(self) -> float:
        return self.encode + self.decode

    @property
    def seconds(self) -> float:
        """Of one bucket by itself."""
        return self.among(1)

    def among(self, buckets: int) -> float:
        """What it adds to a step that has so many buckets like this one: its share of what they wait together."""
        return self.latency / min(buckets, self.at_once) + self.transfer + self.work

    def __str__(self) -> str:
        parts = f"{self.latency * 1e3:.3g} waiting, {self.transfer * 1e3:.3g} for {self.received / 1e6:.3g} MB"
        return f"{self.name} {self.seconds * 1e3:.3g} ms ({parts}, {self.work * 1e3:.3g} at work)"


@dataclass(frozen=True)
class Decision:
    """What was chosen, and between what, for each of so many buckets."""

    name: str
    candidates: tuple[Estimate, ...]
    buckets: int = 1

    def __str__(self) -> str:
        among = f" of {self.buckets} buckets that wait together: " if self.buckets > 1 else ""
        ordered = sorted(self.candidates, key=lambda estimate: estimate.among(self.buckets))
        return among.lstrip() + "; ".join(map(str, ordered))


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds an element: to encode, to decode one rank's wire, and, once for all ranks, to write their mean."""

    encode: float
    decode: float
    mean: float = 0.0


@dataclass(frozen=True)
class Work:
    """Seconds to pack, unpack and merge an entry, and to write it into a vector; for each element over which lists are
    merged; and for each element of a vector that is filled, scaled and read."""

    pack: float
    unpack: float
    merge: float
    scatter: float
    sweep: float
    dense: float


@dataclass(frozen=True)
class Latency:
    """Seconds that the algorithms take for a handful of entries: rounds, waking up, and what surrounds them."""

    gather: float
    union: float
    split: float


@dataclass(frozen=True)
class Calibration:
    """What a group's messages and the ranks' kernels take. Every rank holds the same numbers.

    Attributes:
        all_gather, all_to_all: a stage of messages, announced ahead.
        all_reduce: the backend's own.
        work, latency: as their classes say.
        at_once: how many buckets' exchanges wait together: all of them where messages go by themselves, one where a
            stream orders everything, as NCCL's does.
    """

    all_gather: Line
    all_to_all: Line
    all_reduce: Line
    work: Work
    latency: Latency
    at_once: int = UNLIMITED

    def estimate(
        self, name: str, moves: Sequence[Move], encode: float, decode: float, latency: float | None = None
    ) -> Estimate:
        """The cost of stages that follow each other.

        Args:
            name: of the exchange.
            moves: each stage's line, and the bytes that a rank receives in it.
            encode, decode: seconds of computing before the messages, and after them.
            latency: seconds, where it was measured as a whole; None: the sum of the lines'.
        """
        if latency is None:
            latency = sum(line.alpha for line, _ in moves)
        messages = min(latency, sum(line.each for line, _ in moves))
        latency, transfer = latency - messages, messages + sum(line.transfer(size) for line, size in moves)
        received, stages = sum(size for _, size in moves), len(moves)
        return Estimate(name, received, latency, transfer, encode, decode, stages=stages, at_once=self.at_once)


@dataclass(frozen=True)
class Nodes:
    """Ranks that lie on nodes, `local_size` on each: what is known inside a node, and between ranks of all nodes."""

    inside: Calibration
    between: Calibration
    local_size: int


def expected_union(numel: int, k: int, world_size: int) -> int:
    """Elements that any rank selects, if each selected k of `numel` independently of the others."""
    return round(numel * -math.expm1(world_size * math.log1p(-min(k / numel, 1 - 1e-9))))


def decide(candidates: Iterable[Estimate], buckets: int = 1) -> Decision:
    """The fastest for each of so many buckets of a step that are alike; of equals, the first."""
    estimates = tuple(candidates)
    return Decision(min(estimates, key=lambda estimate: estimate.among(buckets)).name, estimates, buckets)
