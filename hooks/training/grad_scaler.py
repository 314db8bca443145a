"""GradScaler support for error feedback.

A scaler skips the optimizer's step if a gradient is not finite. The means of all backward passes since its last update
are then not applied: `backward()` may run several times before one `scaler.step(optimizer)`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...compress.feedback.store import FeedbackStore
from ..comm.readback import Readback

#: Remedy for scales that differ.
EQUAL_SCALES = (
    "Gradients of different scales have no mean. Give every rank's GradScaler the state_dict() of one rank: after a "
    "resume, and after an epoch in which ranks made different numbers of steps"
)


@dataclass(frozen=True)
class Scaling:
    """State of a loss scaler before a step.

    Attributes:
        scale: the gradients' scale now; on a GPU a tensor [], which is not read back.
        updated: True if the scaler has been updated since, so that earlier steps are final.
        known: the scale as a number; on a GPU that of the step before, None in the first step.
    """

    scale: float | Tensor
    updated: bool
    known: float | None = None

    def words(self) -> tuple[int, int]:
        """Two 64-bit integers: the kind of knowledge, and the scale."""
        if isinstance(self.scale, Tensor):
            return (0, 0) if self.known is None else (BEFORE, _bits(self.known))
        return 1 + self.updated, _bits(self.scale)

    @classmethod
    def of(cls, words: Sequence[int]) -> Scaling | None:
        """The inverse of `words`; None where the scaler's state is not known."""
        known, bits = words
        return cls(_number(bits), known == 2) if known in (1, 2) else None


#: First word of a scaling whose second word is the scale of the step before.
BEFORE = 3


def check_equal(scalings: Sequence[Sequence[int]]) -> None:
    """Compare the ranks' `Scaling.words`; a rank that has joined knows of no scale.

    Raises:
        ValueError: two ranks know of different scales. Given the same words, on every rank alike.
    """
    known = [(rank, bits) for rank, (kind, bits) in enumerate(scalings) if kind]
    for rank, bits in known:
        if bits != known[0][1]:
            first, scale = known[0]
            raise ValueError(
                f"ranks disagree on the loss scale: rank {first} has {_number(scale)}, rank {rank} has "
                f"{_number(bits)}. {EQUAL_SCALES}"
            )


def _bits(scale: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", scale))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


class LossScale:
    """Observer of a GradScaler, asked at the first bucket of each step.

    Args:
        scaler: the GradScaler in use, or None.

    Raises:
        TypeError: `scaler` is neither.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"grad_scaler={scaler!r}: expected the torch.amp.GradScaler that training uses, or None without one"
            )
        self.scaler = scaler
        self._seen: Any = None
        self._reading: Readback | None = None

    @property
    def skips(self) -> bool:
        """True if the scaler can skip steps: there is one, and it is enabled."""
        return self.scaler is not None and self.scaler.is_enabled()

    def scaling(self, read: bool = False) -> Scaling | None:
        """The scaler's state now, compared with the last call; None where steps are never skipped.

        Args:
            read: return the scale as a number, for other ranks; waits for the device.
        """
        scale = self.read() if read else self.scale
        if read:  # others may have joined, and know of no step before
            self.forget()
        return None if scale is None else Scaling(scale, self.updated(), None if read else self.known())

    @property
    def scale(self) -> float | Tensor | None:
        """The gradients' scale now, on its own device; None where nothing scales them."""
        scale = getattr(self.scaler, "_scale", None) if self.skips else None
        return scale if isinstance(scale, Tensor) and scale.is_cuda else self.read()

    def known(self) -> float | None:
        """The scale as a number, for ranks to compare, without a wait: on a GPU the scale of the last call, and None in
        the first."""
        scale = self.scale
        if not isinstance(scale, Tensor):
            return scale
        before = self._reading
        self._reading = Readback(scale.double().view(1, 1))
        return None if before is None else float(before.read()[0][0])

    def forget(self) -> None:
        """Forget the scale of the last call: the next step is the first that all ranks make."""
        self._reading = None

    def read(self) -> float | None:
        """The gradients' scale now, as a number; None where nothing scales them. Waits for the device."""
        return float(self.scaler.get_scale()) if self.scaler is not None and self.skips else None

    def updated(self) -> bool:
        """True if the scaler has been updated since the last call, so that the steps before it are final."""
        # `update` replaces the scaler's record of each optimizer; for a scaler without one every step is final.
        now = getattr(self.scaler, "_per_optimizer_states", None)
        updated = now is None or now is not self._seen
        self._seen = now
        return updated

    def __getstate__(self) -> dict[str, Any]:
        return {"scaler": self.scaler, "_seen": None, "_reading": None}


class PeerScaling(Protocol):
    """Source of the other ranks' scalings."""

    def compare(self, choice: Any, history: Mapping[str, str]) -> None: ...
    def scaling(self) -> Scaling | None: ...


class ScalerSync:
    """Rescales residuals with the loss scale, and rolls them back if the scaler skips a step.

    Args:
        loss_scale: observes the scaler.
        feedback: the residuals.
    """

    def __init__(self, loss_scale: LossScale, feedback: FeedbackStore) -> None:
        self.loss_scale, self.feedback = loss_scale, feedback
        self._scale: float | Tensor | None = loss_scale.read()
        #: True if the last step had no gradients of this rank, so that its scaler does not know of the step.
        self.was_joined = False
        self._overflowed = False

    @property
    def scale(self) -> float | None:
        """The residuals' scale; None where nothing scales gradients. Waits for the device."""
        return None if self._scale is None else float(self._scale)

    @property
    def skips(self) -> bool:
        """True if the scaler can skip steps."""
        return self.loss_scale.skips

    def asks(self, step: Any) -> bool:
        """True if `follow` will wait for the other ranks: after a rank has joined, only theirs know the scale."""
        return self.skips and (self.was_joined or not step.own)

    def follow(self, others: PeerScaling, step: Any, scaling: Scaling | None) -> bool:
        """Bring residuals to the scale of the step that begins. Returns True if that took a wait for the other ranks.

        Args:
            others: the ranks that have announced this step.
            step: has `own`, `choice` and `history`.
            scaling: the scaler's state as this rank knows it.
        """
        if not self.skips:
            return False
        was_joined, self.was_joined = self.asks(step), not step.own
        if was_joined:
            others.compare(step.choice, step.history)
            scaling = others.scaling() or scaling
        if scaling is None:
            return was_joined
        if scaling.updated:
            self.feedback.commit()
            self._overflowed = False
        self._rescale(scaling.scale)
        return was_joined

    def _rescale(self, scale: float | Tensor) -> None:
        """Bring residuals to this scale."""
        if isinstance(scale, Tensor):  # the scaler will change it in place
            scale.record_stream(torch.cuda.current_stream(scale.device))
            scale = scale.clone()
        known = not (isinstance(scale, Tensor) or isinstance(self._scale, Tensor))
        if self._scale is not None and not (known and scale == self._scale):
            self.feedback.rescale(scale / self._scale)
        self._scale = scale

    def ended(self, not_finite: bool) -> bool:
        """After a step: roll residuals back if the scaler will skip it, and return True then. The scaler also skips all
        other backward passes that add to the same gradients, earlier and later ones."""
        self._overflowed |= self.skips and not_finite
        if self._overflowed:
            self.feedback.rollback()
        return self._overflowed

    def loaded(self, scale: float | None) -> None:
        """Take over residuals of a checkpoint, which have this scale."""
        self._overflowed = False
        self._scale = scale or 1.0 if self.skips else None
        if self._scale is None:
            self.feedback.rescale(1 / (scale or 1.0))

    def disconnected(self) -> None:
        """Forget the last step: the next one follows no step of this session."""
        self._overflowed = False
