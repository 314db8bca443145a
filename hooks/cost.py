"""What an exchange will take: latency, bytes and work, by a model that `probe` calibrates.

A collective of b received bytes takes α + β·b (Hockney 1994), with α and β of its own for each kind of collective; what
is done to entries and elements takes so many seconds for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ..compress.codec import Codec
from ..compress.entries import index_bytes, value_bytes
from .entries import CENSUS_BYTES, census_is_shared
from .group import SMALL_GATHER


@dataclass(frozen=True)
class Line:
    """A collective: `alpha` seconds, and `beta` for each byte that a rank receives; up to the largest message that was
    probed, what was measured, as backends change their ways with the size.

    Attributes:
        points: bytes received and seconds taken, ascending.
    """

    alpha: float
    beta: float
    points: tuple[tuple[float, float], ...] = ()

    def transfer(self, size: float) -> float:
        """Seconds for so many bytes received, beyond `alpha`."""
        if not self.points or size >= self.points[-1][0]:
            return self.beta * size
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
        received: bytes that each rank receives.
        latency, transfer, work: seconds waiting, moving bytes, and computing.
    """

    name: str
    received: float
    latency: float
    transfer: float
    work: float

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer + self.work

    def __str__(self) -> str:
        parts = f"{self.latency * 1e3:.3g} waiting, {self.transfer * 1e3:.3g} for {self.received / 1e6:.3g} MB"
        return f"{self.name} {self.seconds * 1e3:.3g} ms ({parts}, {self.work * 1e3:.3g} at work)"


@dataclass(frozen=True)
class Decision:
    """What was chosen, and between what."""

    name: str
    candidates: tuple[Estimate, ...]

    def __str__(self) -> str:
        return "; ".join(str(estimate) for estimate in sorted(self.candidates, key=lambda e: e.seconds))


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds an element: to encode, and to decode one rank's wire."""

    encode: float
    decode: float


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
    """What a group's collectives and the ranks' kernels take. Every rank holds the same numbers."""

    all_gather: Line
    all_to_all: Line
    all_reduce: Line
    work: Work
    latency: Latency

    # -- sparse gradients, by the algorithms of `hooks.sparse` ---------------------------------------------------------

    def gather(self, shape: Shape) -> Estimate:
        p, k, work = shape.world_size, shape.k, self.work
        spent = work.pack * k + (work.unpack + work.merge) * p * k + work.sweep * shape.numel
        spent += work.scatter * shape.union
        moves = [self._gather(shape.entry_bytes(shape.numel, k), p)]
        return self._estimate("gather", moves, spent, self.latency.gather)

    def union(self, shape: Shape) -> Estimate:
        p, k, u, work = shape.world_size, shape.k, shape.union, self.work
        spent = work.pack * k + (work.unpack + work.merge) * p * k + work.merge * (u + k) + 2 * work.sweep * shape.numel
        spent += work.scatter * u
        moves = [self._gather(index_bytes(shape.numel, k), p), (self.all_reduce, 8 * u * (p - 1) / p)]
        return self._estimate("union", moves, spent, self.latency.union)

    def split(self, shape: Shape) -> Estimate:
        """With everything that the union has."""
        return self._split(shape, shape.union, [self._gather(4, shape.world_size)])

    def split_k(self, shape: Shape) -> Estimate:
        """With the k largest sums alone; ranges and the cut are known from earlier steps."""
        p = shape.world_size
        moves = [self._gather(CENSUS_BYTES, p)]
        if not census_is_shared(shape.k, p):
            moves = [(self.all_reduce, 2 * CENSUS_BYTES * (p - 1) / p), self._gather(8, p)]
        return self._split(shape, min(shape.k, shape.union), moves)

    def _split(self, shape: Shape, kept: int, moves: list[tuple[Line, float]]) -> Estimate:
        p, k, work = shape.world_size, shape.k, self.work
        span, own, mine = max(1, shape.numel // p), -(-k // p), -(-kept // p)
        moves = [
            *moves,
            (self.all_to_all, 4 * (p - 1)),
            (self.all_to_all, (p - 1) * shape.entry_bytes(span, own)),
            (self.all_to_all, (p - 1) * shape.entry_bytes(span, mine)),
        ]
        spent = work.pack * (k + mine) + (work.unpack + work.merge) * k + work.unpack * kept + work.sweep * span
        spent += work.scatter * kept
        return self._estimate("split", moves, spent, self.latency.split)

    def dense(self, shape: Shape) -> Estimate:
        moves = [(self.all_reduce, 8 * shape.numel * (shape.world_size - 1) / shape.world_size)]
        return self._estimate("dense", moves, self.work.dense * shape.numel + self.work.scatter * shape.k)

    # -- wires of codecs -----------------------------------------------------------------------------------------------

    def wires(self, codec: Codec, speed: CodecSpeed, numel: int, world_size: int) -> Estimate:
        """Every rank's wire to all."""
        spent = (speed.encode + speed.decode * world_size) * numel
        return self._estimate("gather", [self._gather(codec.wire_bytes(numel), world_size)], spent)

    def two_pass(self, codec: Codec, speed: CodecSpeed, numel: int, world_size: int) -> Estimate:
        slice_bytes = codec.wire_bytes(-(-numel // world_size))
        moves = [(self.all_to_all, (world_size - 1) * slice_bytes), self._gather(slice_bytes, world_size)]
        spent = speed.encode * (numel + numel / world_size) + speed.decode * 2 * numel
        return self._estimate("two_pass", moves, spent)

    def around(self, inner: Estimate, name: str, numel: int, local_size: int) -> Estimate:
        """`inner` between nodes, and this calibration's collectives inside one, before and after it."""
        share = 4 * -(-numel // local_size)
        moves = [(self.all_to_all, (local_size - 1) * share), self._gather(share, local_size)]
        whole = self._estimate(name, moves, inner.work + 3 * self.work.dense * numel)
        return replace(
            whole,
            received=inner.received,
            latency=whole.latency + inner.latency,
            transfer=whole.transfer + inner.transfer,
        )

    # ------------------------------------------------------------------------------------------------------------------

    def _gather(self, row: int, world_size: int) -> tuple[Line, float]:
        """An all-gather, as `Group` does it."""
        return (self.all_to_all if row * world_size <= SMALL_GATHER else self.all_gather), (world_size - 1) * row

    @staticmethod
    def _estimate(name: str, moves: list[tuple[Line, float]], work: float, latency: float | None = None) -> Estimate:
        if latency is None:
            latency = sum(line.alpha for line, _ in moves)
        transfer = sum(line.transfer(size) for line, size in moves)
        return Estimate(name, sum(size for _, size in moves), latency, transfer, work)


def decide(candidates: Iterable[Estimate]) -> Decision:
    """The fastest; of equals, the first."""
    estimates = tuple(candidates)
    return Decision(min(estimates, key=lambda estimate: estimate.seconds).name, estimates)
