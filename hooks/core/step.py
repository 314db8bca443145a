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
    """Future of a bucket that waits for the norm of all gradients: a hook that waited for it would deadlock."""

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
    """Counts of a step's exchanges on their way to the host: rows of two numbers, `Exchange.counts` of each bucket, and
    the number of means that were not finite.

    Attributes:
        sparse_finite: True if the means of sparse gradients were finite.
        seen: the earlier counts of each bucket, and its number of rows.
    """

    step: Step
    sparse_finite: bool
    seen: list[tuple[list[int], int]]
    reading: Readback

    @classmethod
    def of(cls, step: Step, memory: Tensor | None) -> StepCounters:
        """Start to read back. `memory` is `Readback`'s."""
        buckets = [bucket for bucket, _ in step.reduced]
        counts = [bucket.exchange.counts() for bucket in buckets]
        rows = [row for found in counts for row in found]
        overflows = [bucket.overflow.long() for bucket in buckets if bucket.overflow is not None]
        if overflows:
            rows.append(torch.stack(overflows).sum().expand(2))
        numbers = torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.int64, device="cpu")
        finite = all(gradient.finite for gradient in step.sparse)
        seen = [(bucket.seen, len(found)) for bucket, found in zip(buckets, counts, strict=True)]
        return cls(step, finite, seen, Readback(numbers, memory))

    def read(self) -> tuple[int, bool]:
        """The number of entries skipped, and True if anything was not finite. Called once."""
        numbers, skipped, broken, first = self.reading.read(), 0, 0, 0
        for seen, length in self.seen:
            now = [sum(column) for column in zip(*numbers[first : first + length], strict=True)]
            skipped, broken = skipped + now[0] - seen[0], broken + now[1] - seen[1]
            seen[:], first = now, first + length
        if len(numbers) > first:  # the means themselves decide for a scaler
            broken = numbers[-1][0]
        return skipped, bool(broken) or not self.sparse_finite


@dataclass(eq=False)
class Step:
    """One reduction of all gradients: its number and choice, the names of the parameters submitted so far, and the
    buckets reduced so far with the buffers of their means."""

    number: int
    choice: Choice
    #: What all ranks must have in common at its begin: `Session.history`, and what its owner adds.
    history: Mapping[str, str]
    names: set[str] = field(default_factory=set)
    reduced: list[tuple[Bucket, Tensor]] = field(default_factory=list)
    #: Sparse gradients reduced so far.
    sparse: list[SparseGradient] = field(default_factory=list)
    #: Buckets that wait for the norm of all gradients, and the norm of each.
    held: list[tuple[Bucket, Tensor, torch.futures.Future[Tensor]]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    #: Factor that has brought this rank's gradients to the largest norm allowed; None: not clipped.
    factor: Tensor | None = None
    #: True if this rank contributes gradients; False if it has joined and contributes zeros.
    own: bool = True
    #: True if means are over the ranks that have not joined, and the number of all ranks divided by that of these.
    of_present: bool = False
    share: float = 1.0
    #: Reads from the device whether the scaler will skip the step; None once that is known.
    learn: Callable[[], None] | None = None
    #: True if its owner has got all of its means, or never will.
    settled: bool = False
    began: float = 0.0
    _undone: bool = False

    def let_go(self) -> None:
        """Drop the buffers: the means have been used."""
        self.reduced = [(bucket, buffer[:0].clone()) for bucket, buffer in self.reduced]

    @property
    def undone(self) -> bool:
        """True if the scaler will skip the step. Waits for the device where only the device knows."""
        if self.learn is not None:
            self.learn()
        return self._undone

    @undone.setter
    def undone(self, undone: bool) -> None:
        self._undone, self.learn = undone, None
