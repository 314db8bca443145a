"""One linear layer's weight gradient: the factors of it that passes have left, and their way to the mean."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from functools import reduce
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm.ports import Stages, WaitAll
from ..core.session import Announcement, Session

#: A rank's part in a step: it has not used the layer; it has factors; it has a gradient that it knows no factors of; or
#: its backward pass has raised.
UNUSED, FACTORS, DENSE, RAISED = range(4)
#: Words that ranks tell each other before they send: step, part, rows, dtype, and the digest of the last mean.
STEP, PART, ROWS, DTYPE, DIGEST = range(5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: Elements of a mean of which ranks compare a digest.
SAMPLES = 4096


class Factors(NamedTuple):
    """Factors of a weight's gradient, dyᵀ x: the layer's input [n, in], and its output's gradient [n, out]."""

    x: Tensor
    dy: Tensor

    def product(self, scale: float = 1.0) -> Tensor:
        """dyᵀ x times `scale`, [out, in]."""
        into = self.x.new_empty(self.dy.shape[1], self.x.shape[1])
        return torch.addmm(into, self.dy.t(), self.x, beta=0, alpha=scale, out=into)


def joined(parts: Sequence[Factors]) -> Factors | None:
    """Factors of the sum; None of nothing."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Factors(torch.cat([x for x, _ in parts]), torch.cat([dy for _, dy in parts]))


class Part(NamedTuple):
    """A rank's part of a step.

    Attributes:
        kind: one of the four above.
        new: factors that the step's pass has found.
        kept: factors of `grad`, from passes before it.
        grad: `weight.grad`.
        base: `grad` is a mean of earlier steps, which this one's is added to.
        ready: on a GPU, events of the streams that have made the factors.
    """

    kind: int
    new: list[Factors]
    kept: list[Factors]
    grad: Tensor | None
    base: bool
    ready: Sequence[torch.cuda.Event] = ()

    def use(self) -> None:
        """On a GPU: later kernels on the current stream may read these tensors."""
        for event in self.ready:
            event.wait()
        for used in (*chain(*self.new, *self.kept), *([] if self.grad is None else [self.grad])):
            if used.is_cuda:
                used.record_stream(torch.cuda.current_stream(used.device))


class Call:
    """A forward pass through a layer, while its backward pass may come.

    Args:
        syncs: the backward pass exchanges gradients.
    """

    def __init__(self, syncs: bool) -> None:
        self.syncs = syncs


class Seen:
    """A gradient at some time: `in` tells whether nobody has written to it since."""

    grad: Tensor | None = None
    version = 0

    def note(self, grad: Tensor | None) -> None:
        """Remember a gradient as it is now, or none."""
        self.grad, self.version = grad, 0 if grad is None else grad._version

    def __contains__(self, grad: Tensor | None) -> bool:
        return grad is not None and grad is self.grad and grad._version == self.version


class Layer:
    """A linear layer's weight [out, in], and what becomes of its gradient.

    Args:
        name: the weight's.
        weight: the weight.
        session: the ranks.

    Attributes:
        waiting: calls whose backward pass may come.
        found: factors of this step's pass so far; None once their exchange has begun.
        future: the mean on its way, in a step.
        lost: a rank whose pass has raised before it sent its part of the last step, if any.
        before: the gradient as of the begin of the step.
        how: the last exchange, for people.
        received, sent: bytes of it, as `Statistics` counts them.
    """

    def __init__(self, name: str, weight: nn.Parameter, session: Session) -> None:
        self.name, self.weight = name, weight
        self.waiting: weakref.WeakSet[Call] = weakref.WeakSet()
        self.found: list[Factors] | None = []
        self.future: torch.futures.Future[Tensor] | None = None
        self.how, self.received, self.sent = "", 0, 0
        self.lost: int | None = None
        self._group = session.group.channel(f"factors of {name}")
        self._announcement = Announcement(session.control.channel(f"rows of {name}"), 5)
        self.post_receives = self._announcement.post_receives
        self._mean: Tensor | None = None
        self._adds = False
        self._digest = 0
        self._ready: list[torch.cuda.Event] = []
        #: Factors of what passes without an exchange have left in `weight.grad`; None if it holds something else, too.
        self._kept: list[Factors] | None = []
        self._local, self._mean_left, self.before = Seen(), Seen(), Seen()

    # -- passes without an exchange ----------------------------------------------------------------------------------

    def begin_kept(self) -> None:
        """Begin a pass that adds to `weight.grad` and exchanges nothing."""
        grad = self.weight.grad
        if grad not in self._local:  # factors of a gradient that holds something else are not all of it
            self._kept = [] if grad is None else None

    def keep(self, factors: Factors) -> None:
        """Note factors of what this pass adds."""
        if self._kept is not None:  # their memory may be written to before the exchange
            self._kept.append(Factors(factors.x.clone(), factors.dy.clone()))
            self._made(factors)

    def end_kept(self) -> None:
        """Note the gradient as this pass has left it."""
        self._local.note(self.weight.grad if self._kept else None)

    def _made(self, factors: Factors) -> None:
        # Each call of the layer has a stream of its own, and another call or layer may start the exchange on its own.
        if factors.x.is_cuda:
            self._ready.append(torch.cuda.current_stream(factors.x.device).record_event())

    # -- a step ------------------------------------------------------------------------------------------------------

    def find(self, factors: Factors) -> None:
        """Note factors of this step."""
        if self.found is None:
            raise RuntimeError(
                f"{self.name!r}: its gradient is on its way, and this pass finds another part of it: call backward "
                "once for each forward pass"
            )
        self.found.append(factors)
        self._made(factors)

    def contribution(self, raised: bool = False) -> Part:
        """This rank's part of the step."""
        new, self.found = self.found or [], None
        ready, self._ready = self._ready, []
        kept, grad = self._kept or [], self.weight.grad
        known = grad in self._local
        self._kept = []
        self._local.note(None)
        if raised:
            return Part(RAISED, [], [], None, False)
        if known:
            return Part(FACTORS, new, kept, grad, False, ready)
        base = grad in self._mean_left
        if grad is not None and not base and bool(grad.any()):
            return Part(DENSE, new, [], grad, False, ready)
        return Part(FACTORS if new else UNUSED, new, [], grad, base, ready)

    def reduce(self, step: int, part: Part) -> Stages:
        """Stages from this rank's part to the mean: the factors' sum over all ranks, computed alike on each, or the
        gradients' where that takes fewer bytes."""
        self._mean, self._adds, group, size = None, part.base, self._group, self._group.size
        (out, width), parts = self.weight.shape, [*part.kept, *part.new]
        dtypes = [x.dtype for x, _ in parts]
        dtype = 1 + DTYPES.index(reduce(torch.promote_types, dtypes)) if parts else 0
        self._announcement.start(step, part.kind + 4 * part.base, sum(len(x) for x, _ in parts), dtype, self._digest)
        assert self._announcement.in_flight is not None
        yield self._announcement.in_flight
        part.use()  # nothing has read them before, on another stream
        words = self._announcement.words
        kinds, rows = {row[PART] % 4 for row in words}, [row[ROWS] for row in words]
        self.lost = next((rank for rank, row in zip(group.ranks, words, strict=True) if row[PART] == RAISED), None)
        if self.lost is not None:
            return
        self._check(words, group.ranks)
        self.how, self.received, self.sent = "unused", 0, 0
        if kinds == {UNUSED}:
            return
        travel = DTYPES[max(0, *(row[DTYPE] - 1 for row in words))]
        received = sum(rows) * (width + out) * travel.itemsize * (size - 1) // size
        dense = 2 * (size - 1) * self.weight.nbytes // size
        if DENSE in kinds or len({row[PART] // 4 for row in words}) > 1 or received > dense:
            self.how, self.received, self.sent = f"dense: {sum(rows)} rows", dense, dense
            self._adds = False
            mean = torch.zeros(self.weight.shape, dtype=self.weight.dtype, device=self.weight.device)
            if part.grad is not None:
                mean += part.grad
            if (new := joined(part.new)) is not None:
                mean += new.product()
            flat = mean.view(-1)
            yield from group.sum(flat, flat if flat.is_cuda else flat.new_empty(len(flat) + size))
            mean /= size
        else:
            self.how, self.received = f"factors: {sum(rows)} rows", received
            self.sent = rows[group.rank] * (width + out) * travel.itemsize
            own = joined(parts)
            mine = self._room(0, travel) if own is None else Factors(own.x.contiguous(), own.dy.contiguous())
            every = self._room(sum(rows), travel)
            yield WaitAll(
                [
                    group.all_gather_v(into.view(-1), row.view(-1), [n * into.shape[1] for n in rows])
                    for into, row in zip(every, mine, strict=True)
                ]
            )
            # One product of all rows, of equal memory on every rank: their bits agree.
            mean = every.product(1 / size).to(self.weight.dtype)
        self._mean, self._digest = mean, sampled_digest(mean)

    def _room(self, rows: int, dtype: torch.dtype) -> Factors:
        out, width = self.weight.shape
        return Factors(*(torch.empty(rows, n, dtype=dtype, device=self.weight.device) for n in (width, out)))

    def apply(self) -> None:
        """At the end of the pass: put the mean into `weight.grad`, in the place of what this rank had there."""
        mean, grad = self._mean, self.weight.grad
        self.forget()
        if mean is None:
            return
        if mean.is_cuda:
            mean.record_stream(torch.cuda.current_stream(mean.device))
        if grad is None:
            self.weight.grad = mean
        elif self._adds:
            grad += mean
        else:
            grad.copy_(mean)
        self._mean_left.note(self.weight.grad)

    def forget(self) -> None:
        """Forget the step: it has ended, or its pass has raised."""
        self.found, self.future, self._mean = [], None, None

    def _check(self, words: Sequence[Sequence[int]], ranks: Sequence[int]) -> None:
        """Raise on every rank alike where ranks cannot go on together."""
        where = f"the factors of {self.name!r}"
        for word, (what, remedy) in COMPARED.items():
            said = {row[word]: rank for rank, row in zip(ranks, words, strict=True) if word != DTYPE or row[word]}
            if len(said) > 1:
                (a, first), (b, second) = list(said.items())[:2]
                texts = (DTYPES[a - 1], DTYPES[b - 1]) if word == DTYPE else (a, b)
                raise ValueError(
                    f"ranks disagree on {what} of {where}: rank {first} has {texts[0]}, rank {second} has {texts[1]}. "
                    f"{remedy}"
                )


#: Names and remedies of the words that must be equal.
COMPARED = {
    STEP: ("the step", "Every rank must make the same synchronised backward passes"),
    DIGEST: ("the last mean", "Equal products need equal processors, libraries and numbers of threads on every rank"),
    DTYPE: ("the dtype", "Every rank must compute the layer in the same dtype: autocast on all or on none"),
}


def sampled_digest(mean: Tensor) -> int:
    """A digest of some elements' bits, equal where means are; 0 of a GPU's, which the host would have to wait for."""
    if mean.is_cuda:
        return 0
    sample = mean.view(-1)[:: max(1, mean.numel() // SAMPLES)].contiguous().view(torch.uint8)
    return int.from_bytes(hashlib.blake2b(sample.numpy().tobytes(), digest_size=7).digest(), "big")
