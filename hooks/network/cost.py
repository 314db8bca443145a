"""What an exchange will take: latency, bytes and work, by a model that `probe` calibrates.

A stage of b received bytes takes α + β·b (Hockney 1994), with α and β of its own for each kind of message; what is done
to entries and elements takes so many seconds for each. Receives are announced ahead, so α is one way: the distance, and
what waking up takes. All buckets of a step are under way at once: they share the link and the processor, but wait for
the distance together. So of the buckets of a step, the α of each stage counts once (`Estimate.among`), but for what of
it the processor needs for messages (`Line.each`): with many ranks on few cores that is all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ...compress.codec import Codec
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

    # -- sparse gradients, by the algorithms of `hooks.sparse` ---------------------------------------------------------

    def gather(self, shape: Shape) -> Estimate:
        p, k, work = shape.world_size, shape.k, self.work
        decode = (work.unpack + work.merge) * p * k + work.sweep * shape.numel + work.scatter * shape.union
        moves = [self._gather(shape.entry_bytes(shape.numel, k), p)]
        return self._estimate("gather", moves, work.pack * k, decode, self.latency.gather)

    def union(self, shape: Shape) -> Estimate:
        p, k, u, work = shape.world_size, shape.k, shape.union, self.work
        decode = (work.unpack + work.merge) * p * k + work.merge * (u + k) + 2 * work.sweep * shape.numel
        decode += work.scatter * u
        moves = [self._gather(index_bytes(shape.numel, k), p), *2 * [(self.all_to_all, 4 * u * (p - 1) / p)]]
        return self._estimate("union", moves, work.pack * k, decode, self.latency.union)

    def split(self, shape: Shape) -> Estimate:
        """With everything that the union has."""
        return self._split(shape, shape.union, self.latency.split)

    def split_k(self, shape: Shape) -> Estimate:
        """With the k largest sums alone; ranges, and how many each owner has of those, are known from earlier steps."""
        return self._split(shape, min(shape.k, shape.union))

    def _split(self, shape: Shape, kept: int, latency: float | None = None) -> Estimate:
        p, k, work = shape.world_size, shape.k, self.work
        span, own, mine = max(1, shape.numel // p), -(-k // p), -(-kept // p)
        moves: list[tuple[Line, float]] = [
            (self.all_to_all, (p - 1) * shape.entry_bytes(span, own)),
            (self.all_to_all, (p - 1) * shape.entry_bytes(span, mine)),
        ]
        decode = work.pack * mine + (work.unpack + work.merge) * k + work.unpack * kept + work.sweep * span
        decode += work.scatter * kept
        return self._estimate("split", moves, work.pack * k, decode, latency)

    def padded_union(self, shape: Shape, capacity: int) -> Estimate:
        """With room for so many elements in the union."""
        p, k, work = shape.world_size, shape.k, self.work
        moves = [self._gather(index_bytes(shape.numel, k), p), (self.all_reduce, 8 * capacity * (p - 1) / p)]
        decode = (work.unpack + work.merge) * p * k + work.merge * (capacity + k) + work.scatter * 3 * capacity
        return self._estimate("union", moves, work.pack * k, decode)

    def padded_split(self, shape: Shape, span: int, capacity: int, speed: CodecSpeed) -> Estimate:
        """With rows of so many entries to the owners of `span` elements each, who select k/P of their sums."""
        p, k, work = shape.world_size, shape.k, self.work
        share = min(-(-k // p), span)
        moves = [
            (self.all_to_all, (p - 1) * shape.entry_bytes(span, capacity)),
            self._gather(shape.entry_bytes(span, share), p),
        ]
        encode = work.merge * k + work.pack * p * capacity
        decode = (speed.decode * p + speed.mean + speed.encode) * span + work.merge * k
        decode += (work.unpack + work.scatter) * p * share
        return self._estimate("split", moves, encode, decode)

    def dense(self, shape: Shape) -> Estimate:
        moves = [(self.all_reduce, 8 * shape.numel * (shape.world_size - 1) / shape.world_size)]
        whole = self._estimate("dense", moves, self.work.scatter * shape.k, self.work.dense * shape.numel)
        return replace(whole, at_once=min(self.at_once, GLOO_COLLECTIVES))

    # -- wires of codecs -----------------------------------------------------------------------------------------------

    def wires(self, codec: Codec, speed: CodecSpeed, numel: int, world_size: int) -> Estimate:
        """Every rank's wire to all."""
        decode = (speed.decode * world_size + speed.mean) * numel
        return self._estimate(
            "gather", [self._gather(codec.wire_bytes(numel), world_size)], speed.encode * numel, decode
        )

    def two_pass(self, codec: Codec, speed: CodecSpeed, numel: int, world_size: int) -> Estimate:
        slice_bytes = codec.wire_bytes(-(-numel // world_size))
        moves = [(self.all_to_all, (world_size - 1) * slice_bytes), self._gather(slice_bytes, world_size)]
        own = numel / world_size
        decode = speed.decode * 2 * numel + speed.mean * (own + numel)
        return self._estimate("two_pass", moves, speed.encode * (numel + own), decode)

    def factors(self, codec: Codec, speed: CodecSpeed, numel: int, world_size: int) -> Estimate:
        """Two means of float32 numbers, some half of the wire each: by owners above two ranks."""
        half = codec.wire_bytes(numel) / 2
        moves = [self._gather(half, world_size)]
        if world_size > 2:
            moves = [
                (self.all_to_all, half * (world_size - 1) / world_size),
                self._gather(half / world_size, world_size),
            ]
        return self._estimate("factors", 2 * moves, speed.encode * numel, (speed.decode + speed.mean) * numel)

    def around(self, inner: Estimate, name: str, numel: int, local_size: int) -> Estimate:
        """`inner` between nodes, and this calibration's collectives inside one, before and after it."""
        share = 4 * -(-numel // local_size)
        moves = [(self.all_to_all, (local_size - 1) * share), self._gather(share, local_size)]
        before, after = inner.encode + 2 * self.work.dense * numel, inner.decode + self.work.dense * numel
        whole = self._estimate(name, moves, before, after)
        return replace(
            whole,
            received=inner.received,
            inside=whole.received,
            latency=whole.latency + inner.latency,
            transfer=whole.transfer + inner.transfer,
            stages=whole.stages + inner.stages,
        )

    def selected(self, entries: Estimate, speed: CodecSpeed, numel: int) -> Estimate:
        """`entries`, with the codec's selection before, and the vector that they are written to after."""
        encode, decode = entries.encode + speed.encode * numel, entries.decode + self.work.dense * numel
        return replace(entries, encode=encode, decode=decode)

    # ------------------------------------------------------------------------------------------------------------------

    def _gather(self, row: float, world_size: int) -> tuple[Line, float]:
        return self.all_gather, (world_size - 1) * row

    def _estimate(
        self, name: str, moves: list[tuple[Line, float]], encode: float, decode: float, latency: float | None = None
    ) -> Estimate:
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
