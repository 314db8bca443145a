"""Error feedback: the interface of its strategies, and the state that they keep between steps.

A *strategy* is a frozen dataclass of options. It says what is compressed, what becomes of what compression drops, and
what every rank hands out as the result. It has no state: `FeedbackState` holds flat float32 vectors, one set for each
layout on each rank, and `feedback.store` keeps them by parameter. So a strategy is one small file; names, layouts,
owners of slices, rollback and checkpoints work for all of them. A residual may be stored in fewer bytes
(`Residual.dtype`): it is float32 while it is open, and closing it loses what rounding takes.

In every strategy the vector "residual" is what has still to be sent, in units of the gradient. Exchanges take from it
and return to it, and owners of slices fold into it, without knowledge of the strategy. Owners themselves keep plain
residuals (`server_state`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends import LowPrecisionVector, Workspace, entries_for
from ..backends.places import is_among
from ..backends.sparse import EntryKernels
from ..codec import Codec
from ..deprecated import Renamed
from ..formats.layout import Slot

RESIDUAL = "residual"
#: Flat, and float32, at least once it is open.
Vector = Tensor | LowPrecisionVector


#: Names in the releases up to 0.2.
OLD_NAMES = {
    "vectors": "state_names",
    "stored_as": "storage_dtype",
    "send_all": "flush",
    "also_sent": "on_extra_sent",
    "not_sent": "on_unsent",
    "thrown_away": "on_discarded",
}


@dataclass(frozen=True)
class Feedback(Renamed, ABC, renamed=OLD_NAMES):
    """A strategy. Each method gets the state of one layout on this rank, and tensors that are flat in it."""

    #: Names of the state: float32 vectors as long as the layout, zero at first.
    state_names: ClassVar[tuple[str, ...]] = (RESIDUAL,)

    @property
    def only_residual(self) -> bool:
        """True if a step that sends everything works as without a strategy, once the residual is empty."""
        return set(self.state_names) <= {RESIDUAL}

    def storage_dtype(self, vector: str) -> torch.dtype:
        """The dtype in which a vector is stored: torch.float32, or one of `backends.low_precision`."""
        return torch.float32

    @property
    def largest_norm(self) -> float | None:
        """The largest norm of a rank's own gradient, of all parameters together: it is scaled to that first."""
        return None

    @property
    def has_momentum(self) -> bool:
        """True if the result is a momentum already: then the optimizer must have none."""
        return False

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError for an optimizer that has momentum of its own, where this strategy hands out momentum."""
        for group in optimizer.param_groups if self.has_momentum else ():
            for name, value in _momentum_of(group):
                raise ValueError(
                    f"{type(optimizer).__name__} has {name}={value!r}, and {self} hands out a momentum already: make "
                    "the optimizer without, as SGD(momentum=0) or AdamW(betas=(0.0, 0.99)), or take Residual()"
                )

    def check(self, codec: Codec) -> None:
        """Raises ValueError for a codec around which this strategy does not work."""

    def codec_for(self, codec: Codec) -> Codec:
        """The form of the user's codec that this strategy goes around. Raises as `check`."""
        codec = codec.with_feedback()
        self.check(codec)
        return codec

    def prepare(self, device: torch.device) -> None:
        """Compile what it runs on tensors of a device, so that no step has to."""

    @abstractmethod
    def encode(
        self, kept: FeedbackState, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace
    ) -> None:
        """Compress this rank's gradient: called once a step. Arguments and errors as in `Codec.encode_feedback`."""

    def flush(self, kept: FeedbackState, grad: Tensor) -> Tensor:
        """Called instead of `encode` in a step that sends everything: returns what it sends.

        By default gradient and residual together; where that is not finite the residual stays.
        """
        residual = kept[RESIDUAL]
        total = grad.float() + residual
        residual.masked_fill_(total.isfinite(), 0.0)
        return total

    def deliver(self, kept: FeedbackState, mean: Tensor) -> None:
        """Turn the decoded mean over the ranks, equal on all of them, into what is handed out: in place."""

    def on_extra_sent(self, kept: FeedbackState, indices: Tensor, values: Tensor, count: Tensor | None = None) -> None:
        """Called after an exchange has sent all of some elements, where `values` is finite: `FeedbackState.take_at`."""

    def on_unsent(self, kept: FeedbackState, indices: Tensor, later: Tensor) -> None:
        """Called for entries that `encode` has written and that are sent `later` (bool): `FeedbackState.on_unsent`."""

    def on_discarded(self, kept: FeedbackState, slot: Slot, mean: Tensor, gradient: Tensor | None) -> None:
        """Called when no rank has applied the result of one parameter.

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
        """The strategy's law: an expression that every step leaves at zero, to rounding, for one parameter. For tests.

        Args:
            gradient: the mean over the ranks.
            before, after: the mean over the ranks of each vector, before the step and after it, with what slices'
                owners keep folded in.
            applied: what was handed out.
        """


class FeedbackState:
    """A strategy and its state for some elements on one rank: an exchange gets one.

    Args:
        strategy: what is done with it.
        vectors: flat float32, by the strategy's names; empty where nothing is kept. Those that are kept in fewer bytes
            are there, and float32, while they are open (`open`): whoever reads or changes them opens them.

    Attributes:
        dropped_l1: the sum of the magnitudes that the strategy has dropped, float64 [] on the device; None: none.
        masked_momentum: the momentum of masked entries, which a strategy may need again in the same step.
    """

    #: True if each step takes a `snapshot` first, so that it can be rolled back.
    snapshots = False

    def __init__(self, strategy: Feedback, vectors: Mapping[str, Vector]) -> None:
        self.strategy = strategy
        self.vectors = {name: vector for name, vector in vectors.items() if isinstance(vector, Tensor)}
        #: Those that are kept in fewer bytes.
        self.low_precision = {
            name: vector for name, vector in vectors.items() if isinstance(vector, LowPrecisionVector)
        }
        self.dropped_l1: Tensor | None = None
        self.masked_momentum: Tensor | None = None
        self._entries: EntryKernels | None = None

    def __getitem__(self, vector: str) -> Tensor:
        return self.vectors[vector]

    @property
    def keeps(self) -> bool:
        """True if there is a residual."""
        return RESIDUAL in self.vectors or RESIDUAL in self.low_precision

    @property
    def follows_entries(self) -> bool:
        """True if the strategy has to know which entries an exchange has sent besides, or returned."""
        kind = type(self.strategy)
        return kind.on_extra_sent is not Feedback.on_extra_sent or kind.on_unsent is not Feedback.on_unsent

    @property
    def residual(self) -> Tensor | None:
        """The residual, once it is open; None if there is none."""
        return self.vectors.get(RESIDUAL)

    def open(self) -> AbstractContextManager[Tensor | None]:
        """All vectors are float32 within the block, which may change them; gives `residual`. Blocks may be nested."""
        if not self.low_precision or self.vectors.keys() >= self.low_precision.keys():
            return nullcontext(self.residual)
        return self._opened()

    @contextmanager
    def _opened(self) -> Iterator[Tensor | None]:
        with ExitStack() as stack:
            self.vectors |= {name: stack.enter_context(vector.open()) for name, vector in self.low_precision.items()}
            try:
                yield self.residual
            finally:
                for name in self.low_precision:
                    del self.vectors[name]

    @property
    def held(self) -> dict[str, Vector]:
        """Every vector as it is kept."""
        return {**self.vectors, **self.low_precision}

    def read(self, vector: str) -> Tensor:
        """One as it is now, float32; not to be changed."""
        return wide(self.vectors[vector] if vector in self.vectors else self.low_precision[vector])

    def encode(self, codec: Codec, grad: Tensor, wire: Tensor, draw: Tensor | None, workspace: Workspace) -> None:
        """Compress this rank's gradient. Arguments and errors as in `Codec.encode_feedback`."""
        if self.snapshots:
            self.snapshot()
        self.strategy.encode(self, codec, grad, wire, draw, workspace)

    def flush(self, grad: Tensor) -> Tensor:
        """Called instead of `encode` in a step that sends everything: returns what it sends."""
        if self.snapshots:
            self.snapshot()
        with self.open():
            return self.strategy.flush(self, grad)

    def snapshot(self) -> None:
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
            self.entries(residual).take(residual, indices, values, count)
            self.strategy.on_extra_sent(self, indices, values, count)

    def restore(self, indices: Tensor, values: Tensor) -> None:
        """Parts of what was to be sent have not been: send them later. What is not finite is left out.

        Args:
            indices: int32 or int64; where one comes twice, all values but one are -0.0.
        """
        with self.open() as residual:
            if residual is not None:
                self.entries(residual).add(residual, indices, values)

    def entries(self, residual: Tensor) -> EntryKernels:
        """The kernels that add entries to the residual."""
        if self._entries is None:
            self._entries = entries_for(residual.device)
        return self._entries

    def restore_unless(self, indices: Tensor, values: Tensor, delivered: Tensor) -> None:
        """Of whole elements that were to be sent, those that are not among `delivered` have not been.

        Args:
            indices, values: int32, ascending, and float32: entries that a plain codec has selected here.
            delivered: int32, ascending: of which elements any rank's entries have reached the mean.
        """
        with self.open() as residual:
            if residual is None:
                return
            self.entries(residual).put_back((indices, values), delivered, residual)
            if self.masked_momentum is not None:
                self.on_unsent(indices, values.isfinite() & ~is_among(indices, delivered))

    def on_unsent(self, indices: Tensor, later: Tensor) -> None:
        """Of the entries that `encode` has written, in their order, those are sent `later` (bool), whole, and are in
        the residual again. Arguments as of `restore`."""
        if self.keeps:
            with self.open():
                self.strategy.on_unsent(self, indices, later)

    def replace(self, where: Tensor, values: Tensor) -> None:
        """Let what is still to be sent of some elements (bool) be these values, in all that this rank keeps."""
        with self.open():
            residual = self[RESIDUAL]
            residual.copy_(torch.where(where, values, residual))

    def give_up(self, magnitude: Tensor) -> None:
        """Count what is neither kept nor sent: the sum of its magnitudes, float64 []."""
        self.dropped_l1 = magnitude if self.dropped_l1 is None else self.dropped_l1 + magnitude

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply everything, by a number or a tensor [] on the same device."""
        with self.open():
            for tensor in self.vectors.values():
                tensor.mul_(factor)
        if self.dropped_l1 is not None:
            self.dropped_l1 = self.dropped_l1 * factor


def wide(vector: Vector) -> Tensor:
    """As float32; not to be changed."""
    return vector.read() if isinstance(vector, LowPrecisionVector) else vector


def total_dropped(parts: Iterable[FeedbackState]) -> float:
    """The sum of the magnitudes that have been dropped. Waits for the device."""
    return float(sum(float(kept.dropped_l1) for kept in parts if kept.dropped_l1 is not None))


def check_beta(beta: float, name: str = "beta") -> None:
    """Raises ValueError, naming the argument, unless beta is the decay of a momentum."""
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0.0 <= beta < 1.0:
        raise ValueError(f"{name}={beta!r}: expected a number in [0, 1)")


def check_clip(clip: float | None) -> None:
    """Raises ValueError unless clip is a largest norm or None."""
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
