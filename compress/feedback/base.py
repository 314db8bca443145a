"""What is kept between steps: error feedback, and its strategies.

A *strategy* is a frozen dataclass of options that says what compression is given, what becomes of what it leaves out,
and what is handed out as the result. It has no state: that lies in `Kept`, flat float32 vectors, one set for each
layout on each rank, which `compress.memory` keeps by parameter. So a strategy is one small file, and names, layouts,
owners of slices, undoing and checkpoints are there for all of them. A residual may be kept in fewer bytes
(`Residual.dtype`): then it is float32 while it is open, and what that rounds off is lost.

In every strategy the vector "residual" is what has still to be sent, in units of the gradient: what an exchange takes
from it or returns to it, and what owners of slices fold into it, needs no knowledge of the strategy. Owners themselves
keep plain residuals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends import Narrow, Workspace, entries_for, narrow_vector
from ..backends.low_precision import DTYPES as NARROW_DTYPES
from ..backends.places import add_at, is_among, used_places
from ..backends.sparse import EntryKernels
from ..codec import Codec
from ..formats.layout import Slot

RESIDUAL = "residual"
#: How a residual may be kept.
RESIDUAL_DTYPES = (torch.float32, *NARROW_DTYPES)
#: Flat, and float32, at least once it is open.
Vector = Tensor | Narrow


@dataclass(frozen=True)
class Feedback(ABC):
    """A strategy. Each method is given the memory of one layout on this rank, and tensors that are flat in it."""

    #: What is kept of a layout: names of float32 vectors as long as it is, zero at first.
    vectors: ClassVar[tuple[str, ...]] = (RESIDUAL,)

    @property
    def only_residual(self) -> bool:
        """Whether steps that send everything are as without a strategy, once the residual is empty."""
        return set(self.vectors) <= {RESIDUAL}

    def stored_as(self, vector: str) -> torch.dtype:
        """How a vector is kept: torch.float32, or what `backends.narrow` has."""
        return torch.float32

    @property
    def largest_norm(self) -> float | None:
        """The largest norm of a rank's own gradient, of all parameters together: it is scaled to that first."""
        return None

    @property
    def has_momentum(self) -> bool:
        """Whether what is handed out is a momentum already, so that an optimizer must not have one too."""
        return False

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError for an optimizer that has momentum of its own, where this strategy hands out momentum."""
        for group in optimizer.param_groups if self.has_momentum else ():
            for name, value in _momentum_of(group):
                raise ValueError(
                    f"{type(optimizer).__name__} has {name}={value!r}, and {self} hands out a momentum already: make "
                    "the optimizer without, as SGD(momentum=0) or AdamW(betas=(0.0, 0.99)), or take Residual()"
                )

    def check(self, codec: Codec) -> None:  # noqa: B027 - most take any codec
        """Raises ValueError for a codec around which this strategy does not work."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - may be nothing
        """Compile what it runs on tensors of a device, so that no step has to."""

    @abstractmethod
    def encode(
        self, kept: Kept, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        """Compress this rank's gradient: called once a step. Arguments and errors as in `Codec.encode_feedback`."""

    def send_all(self, kept: Kept, grad: Tensor) -> Tensor:
        """In the place of `encode` in a step that sends everything, or keeps nothing: what it sends.

        By default gradient and residual together; where that is not finite the residual stays.
        """
        residual = kept[RESIDUAL]
        total = grad.float() + residual
        residual.masked_fill_(total.isfinite(), 0.0)
        return total

    def deliver(self, kept: Kept, mean: Tensor) -> None:  # noqa: B027 - most hand out the mean
        """Turn the decoded mean over the ranks, equal on all of them, into what is handed out: in place."""

    def also_sent(  # noqa: B027 - most need not know
        self, kept: Kept, indices: Tensor, values: Tensor, count: Tensor | None = None
    ) -> None:
        """The exchange has sent all that was to be sent of some elements, where `values` is finite: `Kept.take_at`."""

    def not_sent(self, kept: Kept, indices: Tensor, later: Tensor) -> None:  # noqa: B027 - most need not know
        """Of the entries that `encode` has written those are sent `later` (bool): `Kept.not_sent`."""

    def thrown_away(self, kept: Kept, slot: Slot, mean: Tensor, gradient: Tensor | None) -> None:
        """What was handed out for one parameter has not been applied on any rank.

        Args:
            mean: that, float32 in the parameter's shape.
            gradient: what had gone in on this rank, float32, where it will go in again; else None.
        """
        part = mean if gradient is None else mean - gradient
        slot.view(kept[RESIDUAL]).add_(torch.where(part.isfinite(), part, 0.0))

    @abstractmethod
    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """What a step leaves at zero, to rounding, for one parameter: the strategy's law. For tests.

        Args:
            gradient: the mean over the ranks.
            before, after: the mean over the ranks of each vector, before the step and after it, with what slices'
                owners keep folded in.
            applied: what was handed out.
        """


class Kept:
    """What one rank keeps of some elements between steps, and the strategy that does: what an exchange is given.

    Args:
        strategy: what is done with it.
        vectors: flat float32, by the strategy's names; empty where nothing is kept. Those that are kept in fewer bytes
            are there, and float32, while they are open (`open`): whoever reads or changes them opens them.

    Attributes:
        lost: the sum of the magnitudes that the strategy has given up, float64 [] on the device; None: there are none.
        stash: what the strategy needs again before the step is over.
    """

    #: Whether to `remember` before a step changes anything, as it may have to be undone.
    remembers = False

    def __init__(self, strategy: Feedback, vectors: Mapping[str, Vector]) -> None:
        self.strategy = strategy
        self.vectors = {name: vector for name, vector in vectors.items() if isinstance(vector, Tensor)}
        #: Those that are kept in fewer bytes.
        self.narrow = {name: vector for name, vector in vectors.items() if isinstance(vector, Narrow)}
        self.lost: Tensor | None = None
        self.stash: Tensor | None = None
        self._entries: EntryKernels | None = None

    def __getitem__(self, vector: str) -> Tensor:
        return self.vectors[vector]

    @property
    def keeps(self) -> bool:
        """Whether what has still to be sent is kept."""
        return RESIDUAL in self.vectors or RESIDUAL in self.narrow

    @property
    def follows_entries(self) -> bool:
        """Whether the strategy has to know what an exchange has sent besides, or returned."""
        kind = type(self.strategy)
        return kind.also_sent is not Feedback.also_sent or kind.not_sent is not Feedback.not_sent

    @property
    def residual(self) -> Tensor | None:
        """What has still to be sent, once it is open; None where nothing is kept."""
        return self.vectors.get(RESIDUAL)

    def open(self) -> AbstractContextManager[Tensor | None]:
        """All vectors are float32 within the block, which may change them; gives `residual`. Blocks may be nested."""
        if not self.narrow or self.vectors.keys() >= self.narrow.keys():
            return nullcontext(self.residual)
        return self._opened()

    @contextmanager
    def _opened(self) -> Iterator[Tensor | None]:
        with ExitStack() as stack:
            self.vectors |= {name: stack.enter_context(vector.open()) for name, vector in self.narrow.items()}
            try:
                yield self.residual
            finally:
                for name in self.narrow:
                    del self.vectors[name]

    @property
    def held(self) -> dict[str, Vector]:
        """Every vector as it is kept."""
        return {**self.vectors, **self.narrow}

    def read(self, vector: str) -> Tensor:
        """One as it is now, float32; not to be changed."""
        return wide(self.vectors[vector] if vector in self.vectors else self.narrow[vector])

    def encode(self, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        """Compress this rank's gradient. Arguments and errors as in `Codec.encode_feedback`."""
        if self.remembers:
            self.remember()
        self.strategy.encode(self, codec, grad, wire, draw, workspace)

    def send_all(self, grad: Tensor) -> Tensor:
        """In the place of `encode`: what a step sends that sends everything, `grad` itself where nothing is kept."""
        if self.remembers:
            self.remember()
        with self.open():
            return self.strategy.send_all(self, grad)

    def remember(self) -> None:
        """Keep everything as it is."""

    def deliver(self, mean: Tensor) -> None:
        """Turn the decoded mean into what is handed out, in place."""
        self.strategy.deliver(self, mean)

    def take_at(self, indices: Tensor, values: Tensor, count: Tensor | None = None) -> None:
        """Add what is still to be sent of some elements to `values`, float32, which are to be sent now. It is kept no
        more, except where the sum is not finite.

        Args:
            indices: int32 or int64, none of them twice; no more than there are elements.
            count: how many of them are used, int32 [1] on the device; None: all.
        """
        with self.open() as residual:
            if residual is None:
                return
            at, used = indices.long(), None
            if count is not None:
                at, used = used_places(indices, count)
            rest = residual[at]
            values += rest if used is None else rest.masked_fill(~used, -0.0)
            stays = ~values.isfinite() if used is None else ~(values.isfinite() & used)
            # Added, so that what is not used changes nothing, wherever it points: not even the sign of a zero.
            residual.index_add_(0, at, (-rest).masked_fill_(stays, -0.0))
            self.strategy.also_sent(self, indices, values, count)

    def give_back(self, indices: Tensor, values: Tensor) -> None:
        """Parts of what was to be sent have not been: send them later. What is not finite is left out.

        Args:
            indices: int32 or int64; where one comes twice, all values but one are -0.0.
        """
        with self.open() as residual:
            add_at(residual, indices, values)

    def give_back_unless(self, indices: Tensor, values: Tensor, delivered: Tensor) -> None:
        """Of whole elements that were to be sent, those that are not among `delivered` have not been.

        Args:
            indices, values: int32, ascending, and float32: entries that a plain codec has selected here.
            delivered: int32, ascending: of which elements any rank's entries have reached the mean.
        """
        with self.open() as residual:
            if residual is None:
                return
            if self._entries is None:
                self._entries = entries_for(residual.device)
            self._entries.put_back((indices, values), delivered, residual)
            if self.stash is not None:
                self.not_sent(indices, values.isfinite() & ~is_among(indices, delivered))

    def not_sent(self, indices: Tensor, later: Tensor) -> None:
        """Of the entries that `encode` has written, in their order, those are sent `later` (bool), whole, and are in
        the residual again. Arguments as of `give_back`."""
        if self.keeps:
            with self.open():
                self.strategy.not_sent(self, indices, later)

    def replace(self, where: Tensor, values: Tensor) -> None:
        """Let what is still to be sent of some elements (bool) be these values, in all that this rank keeps."""
        with self.open():
            residual = self[RESIDUAL]
            residual.copy_(torch.where(where, values, residual))

    def give_up(self, magnitude: Tensor) -> None:
        """Count what is neither kept nor sent: the sum of its magnitudes, float64 []."""
        self.lost = magnitude if self.lost is None else self.lost + magnitude

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply everything, by a number or a tensor [] on the same device."""
        with self.open():
            for tensor in self.vectors.values():
                tensor.mul_(factor)
        if self.lost is not None:
            self.lost = self.lost * factor


@dataclass(frozen=True)
class Residual(Feedback):
    """Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): a = g + β·e is compressed, and
    e = a less what that decodes to.

    With β = 1 nothing is lost. Below it what decays is lost and counted (SparseLoCo, LoCo): a residual of which little
    is sent for long, as of coarse codes under Adam, then does not outlive the gradients that it comes from.

    A residual may be kept in fewer bytes than float32's 4 an element: 2 as torch.bfloat16, 1.02 as torch.int8, with a
    step for every 256 elements (as LoCo, Xie et al. 2024, and MicroAdam, Modoranu et al., NeurIPS 2024, keep theirs).
    What that rounds off, to the nearest, is lost: 2^-8 of an element at most, or half a step, 1/254 of the largest of
    the 256. An element whose gradients are smaller than that and always the same never adds up; where gradients are
    noisy the rounding averages out. Owners of slices, and copies for undoing, are kept likewise.

    Args:
        decay: β, in (0, 1].
        dtype: how the residual is kept.

    Raises:
        ValueError, TypeError: an argument is none of these.
    """

    decay: float = 1.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0.0 < self.decay <= 1.0:
            raise ValueError(f"decay={self.decay!r}: expected a number in (0, 1]")
        if self.dtype not in RESIDUAL_DTYPES:
            names = ", ".join(map(str, RESIDUAL_DTYPES))
            error = ValueError if isinstance(self.dtype, torch.dtype) else TypeError
            raise error(
                f"dtype={self.dtype!r}: a residual is kept as one of {names}; torch.bfloat16 has float32's range in "
                "half the memory, torch.int8 takes a quarter"
            )

    def stored_as(self, vector: str) -> torch.dtype:
        return self.dtype

    def prepare(self, device: torch.device) -> None:
        if self.dtype != torch.float32:
            vector = narrow_vector(1, self.dtype, device)
            vector.write(vector.read())

    def encode(
        self, kept: Kept, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        if self.decay == 1.0 and RESIDUAL not in kept.vectors:
            codec.encode_feedback(grad, kept.narrow[RESIDUAL], wire, draw, workspace)
            return
        with kept.open():
            self._decay(kept)
            codec.encode_feedback(grad, kept[RESIDUAL], wire, draw, workspace)

    def send_all(self, kept: Kept, grad: Tensor) -> Tensor:
        self._decay(kept)
        return super().send_all(kept, grad)

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """With β = 1, over any number of steps: `gradient` and `applied` are then their sums. Where the residual is not
        float32, what that has rounded off."""
        return gradient + self.decay * before[RESIDUAL] - applied - after[RESIDUAL]

    def _decay(self, kept: Kept) -> None:
        if self.decay != 1.0:
            residual = kept[RESIDUAL]
            kept.give_up((1.0 - self.decay) * residual.abs().sum(dtype=torch.float64))
            residual.mul_(self.decay)


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Nothing is kept: right for unbiased codes, whose errors average out."""

    vectors: ClassVar[tuple[str, ...]] = ()

    def encode(
        self, kept: Kept, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        codec.encode(grad, wire, draw, workspace)

    def send_all(self, kept: Kept, grad: Tensor) -> Tensor:
        return grad

    def thrown_away(self, kept: Kept, slot: Slot, mean: Tensor, gradient: Tensor | None) -> None:
        """It is gone, as without compression."""

    def invariant(
        self, gradient: Tensor, before: Mapping[str, Tensor], applied: Tensor, after: Mapping[str, Tensor]
    ) -> Tensor:
        """On average over many steps only."""
        return gradient - applied


#: What an exchange is given where nothing is kept.
NOTHING = Kept(NoFeedback(), {})


def wide(vector: Vector) -> Tensor:
    """As float32; not to be changed."""
    return vector.read() if isinstance(vector, Narrow) else vector


def plain(residual: Vector) -> Kept:
    """What the owner of a slice keeps, whatever the strategy."""
    return Kept(Residual(), {RESIDUAL: residual})


def total_lost(parts: Iterable[Kept]) -> float:
    """The sum of the magnitudes that have been given up. Waits for the device."""
    return float(sum(float(kept.lost) for kept in parts if kept.lost is not None))


def check_beta(beta: float) -> None:
    """Raises ValueError for what is no decay of a momentum."""
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0.0 <= beta < 1.0:
        raise ValueError(f"beta={beta!r}: expected a number in [0, 1)")


def check_clip(clip: float | None) -> None:
    """Raises ValueError for what is no largest norm."""
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not 0.0 < clip < 1e30):
        raise ValueError(f"clip={clip!r}: expected a positive number, the largest norm, or None")


def betas_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The β of an optimizer's group of parameters, if it has several; of optimizers that are not torch's too."""
    betas = group.get("betas")
    return tuple(betas) if isinstance(betas, tuple | list) else ()


def _momentum_of(group: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The options of a group of parameters by which one of torch's optimizers has a momentum."""
    momentum, betas = group.get("momentum"), betas_of(group)
    if momentum:
        yield "momentum", momentum
    if betas and betas[0]:
        yield "betas", betas
