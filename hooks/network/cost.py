"""The cost model: latency, bytes and work, of a network that `probe` measures. The cost of each exchange is its own
`estimate` (`hooks.exchanges`), and that of an algorithm for sparse gradients lies in `hooks.sparse.costs`.

A stage of b received bytes takes α + β·b (Hockney 1994), with an α and a β for each kind of message. Work on entries
and elements takes a fixed time for each. Receives are posted ahead, so α is one-way latency plus the time to wake up.
All buckets of a step are in flight at once: they share the link and the processor, and wait for the distance together.
So α counts once for each stage of a step (`Estimate.among`), except for the processor's part of it (`Line.each`), which
every bucket pays; with many ranks on few cores that is all of α.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ...compress.formats.entries import index_bytes, value_bytes

#: Precedes the name of the exchange between nodes.
HIERARCHICAL = "hierarchical"
#: Gloo's collectives in flight at once: it has as many threads.
GLOO_COLLECTIVES = 2
#: More than any step has.
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class Line:
    """One stage: `alpha` seconds, and `beta` for each byte that a rank receives. Up to the largest probed message the
    measured times count instead, as backends change algorithms with the size.

    Attributes:
        points: bytes received and seconds taken, ascending.
        window: bytes in flight at once; every further window waits for `alpha` again. None: no limit.
        each: the part of `alpha` that stages in flight together do not share: the processor's time for a message to
            each rank.
    """

    alpha: float
    beta: float
    points: tuple[tuple[float, float], ...] = ()
    window: float | None = None
    each: float = 0.0

    def transfer(self, size: float) -> float:
        """Seconds beyond `alpha` to receive `size` bytes."""
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
    """Entries of one exchange: N elements, at most k entries on each of P ranks, u in their union, and the dtype of
    values on the wire."""

    numel: int
    k: int
    world_size: int
    union: int
    values: torch.dtype = torch.float32

    def entry_bytes(self, numel: int, k: int) -> int:
        return index_bytes(numel, k) + value_bytes(k, self.values)


@dataclass(frozen=True)
class Estimate:
    """The predicted cost of one exchange.

    Attributes:
        name: of the exchange.
        received: bytes that each rank receives; of a hierarchical exchange, from other nodes.
        latency, transfer: seconds waiting, and moving bytes and messages.
        encode, decode: seconds computing, before the bytes move and after.
        inside: bytes that each rank receives from its own node.
        stages: times that it waits for messages.
        at_once: buckets whose exchanges of this kind wait together.
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
        """The cost of one bucket alone."""
        return self.among(1)

    def among(self, buckets: int) -> float:
        """Seconds added to a step of `buckets` alike: their common wait is divided among them."""
        return self.latency / min(buckets, self.at_once) + self.transfer + self.work

    def __str__(self) -> str:
        parts = f"{self.latency * 1e3:.3g} waiting, {self.transfer * 1e3:.3g} for {self.received / 1e6:.3g} MB"
        return f"{self.name} {self.seconds * 1e3:.3g} ms ({parts}, {self.work * 1e3:.3g} at work)"


@dataclass(frozen=True)
class Decision:
    """The choice for each of `buckets` alike, and its candidates."""

    name: str
    candidates: tuple[Estimate, ...]
    buckets: int = 1

    def kinds(self) -> dict[str, float]:
        """Seconds of the fastest candidate of each kind: "float32", half precision by its name, or "compressed"."""
        found = dict[str, float]()
        for candidate in self.candidates:
            kind = "float32" if candidate.name == "dense" else candidate.name.partition(" in ")[2] or "compressed"
            found[kind] = min(found.get(kind, math.inf), candidate.among(self.buckets))
        return found

    def __str__(self) -> str:
        among = f" of {self.buckets} buckets that wait together: " if self.buckets > 1 else ""
        ordered = sorted(self.candidates, key=lambda estimate: estimate.among(self.buckets))
        return among.lstrip() + "; ".join(map(str, ordered))


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds an element: to encode, to decode one rank's wire, and to write the mean of all ranks.

    Attributes:
        launch: seconds that each of the three takes besides, whatever the number of elements.
    """

    encode: float
    decode: float
    mean: float = 0.0
    launch: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), kw_only=True)

    def at(self, numel: int) -> CodecSpeed:
        """Seconds an element of a bucket of `numel`, with its share of the launches."""
        rates = zip((self.encode, self.decode, self.mean), self.launch, strict=True)
        return CodecSpeed(*(rate + launch / numel for rate, launch in rates))


@dataclass(frozen=True)
class Work:
    """Seconds per entry to pack, unpack, merge and write it to a vector; per element of the range over which lists are
    merged (`sweep`); and per element of a vector that is filled, scaled and read (`dense`)."""

    pack: float
    unpack: float
    merge: float
    scatter: float
    sweep: float
    dense: float


@dataclass(frozen=True)
class Latency:
    """Seconds of each algorithm for a handful of entries: its rounds, waking up, and overhead."""

    gather: float
    union: float
    split: float


@dataclass(frozen=True)
class Calibration:
    """The cost of a group's messages and of the ranks' kernels. Every rank holds the same numbers.

    Attributes:
        all_gather, all_to_all: a stage of messages whose receives are posted ahead.
        all_reduce: the backend's own.
        at_once: buckets whose exchanges wait together: all of them with point-to-point messages, one where a stream
            orders everything, as NCCL's does.
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
    """Nodes of `local_size` ranks: the calibration inside a node, and that between ranks of all nodes."""

    inside: Calibration
    between: Calibration
    local_size: int


def expected_union(numel: int, k: int, world_size: int) -> int:
    """Expected size of the union, if each rank selects k of `numel` elements independently."""
    return round(numel * -math.expm1(world_size * math.log1p(-min(k / numel, 1 - 1e-9))))


def decide(candidates: Iterable[Estimate], buckets: int = 1) -> Decision:
    """The fastest candidate for each of `buckets` alike in a step; the first of equals."""
    estimates = tuple(candidates)
    return Decision(min(estimates, key=lambda estimate: estimate.among(buckets)).name, estimates, buckets)
