"""One reduction of all gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..auto.planner import Choice
from ..comm.readback import Readback
from .bucket import Bucket
from .sparse_gradient import SparseGradient


class ClipFuture(torch.futures.Future[Tensor]):
    """Of a unit that waits for the norm of all gradients: a hook that waited for it would never give the others."""

    held = True

    def wait(self) -> Tensor:
        if self.held:
            raise RuntimeError(
                "gradwire: clip scales all gradients by their norm, so that no mean is there before the last bucket "
                "has been given to the hook: return the future, or what its then() gives, instead of waiting for it, "
                "or leave clip out"
            )
        return super().wait()


@dataclass(eq=False)
class StepCounters:
    """What a step's exchanges have counted, on its way to the host: rows of two, `Exchange.counts` of each unit, and
    how many means were not finite.

    Attributes:
        rows_finite: whether the means of sparse gradients were.
        seen: what each unit had counted before, and in how many rows it counts.
    """

    step: Step
    rows_finite: bool
    seen: list[tuple[list[int], int]]
    reading: Readback

    @classmethod
    def of(cls, step: Step, memory: Tensor | None) -> StepCounters:
        """Begin to read. Args: as of `Readback`."""
        buckets = [bucket for bucket, _ in step.reduced]
        counts = [bucket.exchange.counts() for bucket in buckets]
        rows = [row for found in counts for row in found]
        overflows = [bucket.overflow.long() for bucket in buckets if bucket.overflow is not None]
        if overflows:
            rows.append(torch.stack(overflows).sum().expand(2))
        numbers = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.int64, device="cpu")
        finite = all(gradient.finite for gradient in step.rows)
        seen = [(bucket.seen, len(found)) for bucket, found in zip(buckets, counts, strict=True)]
        return cls(step, finite, seen, Readback(numbers, memory))

    def read(self) -> tuple[int, bool]:
        """Entries skipped, and whether anything was not finite. Once."""
        numbers, skipped, broken, first = self.reading.read(), 0, 0, 0
        for seen, length in self.seen:
            now = [sum(column) for column in zip(*numbers[first : first + length], strict=True)]
            skipped, broken = skipped + now[0] - seen[0], broken + now[1] - seen[1]
            seen[:], first = now, first + length
        if len(numbers) > first:  # of the means themselves, which a scaler goes by
            broken = numbers[-1][0]
        return skipped, bool(broken) or not self.rows_finite


@dataclass(eq=False)
class Step:
    """One reduction of all gradients: its number, its choice, whose gradients have been submitted, and the units
    reduced so far, with the buffers that hold their means."""

    number: int
    choice: Choice
    #: What ranks must have done alike before it began, as `Session` has it, and what else must be equal.
    history: Mapping[str, str]
    names: set[str] = field(default_factory=set)
    reduced: list[tuple[Bucket, Tensor]] = field(default_factory=list)
    #: Sparse gradients reduced so far.
    rows: list[SparseGradient] = field(default_factory=list)
    #: Units that wait for the norm of all gradients, and the norms of theirs.
    held: list[tuple[Bucket, Tensor, torch.futures.Future[Tensor]]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    #: By what this rank's gradients have been multiplied to have a norm that is allowed; None: they have not been.
    factor: Tensor | None = None
    #: Whether gradients of this rank go in, and not zeros in the place of a rank that has joined.
    own: bool = True
    #: Whether means are of the ranks alone that have not joined, and how many ranks there are for each of those.
    of_present: bool = False
    share: float = 1.0
    #: Learns from the device whether the scaler will skip it, as long as that is not known.
    learn: Callable[[], None] | None = None
    #: Whether its owner has got all of its means, or never will.
    settled: bool = False
    began: float = 0.0
    _undone: bool = False

    def let_go(self) -> None:
        """Keep no buffers: the means have been taken."""
        self.reduced = [(bucket, buffer[:0].clone()) for bucket, buffer in self.reduced]

    @property
    def undone(self) -> bool:
        """Whether the scaler will skip it. Waits for the device where only that knows."""
        if self.learn is not None:
            self.learn()
        return self._undone

    @undone.setter
    def undone(self, undone: bool) -> None:
        self._undone, self.learn = undone, None
