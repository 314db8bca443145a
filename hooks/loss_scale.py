"""A GradScaler, as far as error feedback has to follow it.

A scaler skips the optimizer's step where a gradient is not finite. What was sent for the steps since its last update
has then not been delivered: `backward()` may run several times before one `scaler.step(optimizer)`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..compress.memory import Memory


@dataclass(frozen=True)
class Scaling:
    """What a scaler has done before a step.

    Attributes:
        scale: that gradients have now; on a GPU a tensor [], for which nobody has to wait.
        updated: whether the steps before are settled.
    """

    scale: float | Tensor
    updated: bool

    def words(self) -> tuple[int, int]:
        """As whole numbers of 64 bits, which `of` reads; what is on a GPU is not known here."""
        if isinstance(self.scale, Tensor):
            return 0, 0
        return 1 + self.updated, struct.unpack("<q", struct.pack("<d", self.scale))[0]

    @classmethod
    def of(cls, words: Sequence[int]) -> Scaling | None:
        """None where nothing is known."""
        known, bits = words
        return cls(struct.unpack("<d", struct.pack("<q", bits))[0], known == 2) if known else None


class LossScale:
    """What a GradScaler does, seen at the first bucket of each step.

    Args:
        scaler: the GradScaler in use, or None.

    Raises:
        TypeError: it is something else.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise TypeError(
                f"grad_scaler={scaler!r}: expected the torch.amp.GradScaler that training uses, or None without one"
            )
        self.scaler = scaler
        self._seen: Any = None

    @property
    def skips(self) -> bool:
        """Whether steps can be skipped: not by a scaler that is disabled."""
        return self.scaler is not None and self.scaler.is_enabled()

    def scaling(self, read: bool = False) -> Scaling | None:
        """What the scaler has done since the last call; None where steps are never skipped.

        Args:
            read: have the scale as a number, so that other ranks can be told; waits for the device.
        """
        scale = self.read() if read else self.scale
        return None if scale is None else Scaling(scale, self.updated())

    @property
    def scale(self) -> float | Tensor | None:
        """The scale that gradients have now, where it lies; None where nothing scales them."""
        scale = getattr(self.scaler, "_scale", None) if self.skips else None
        return scale if isinstance(scale, Tensor) and scale.is_cuda else self.read()

    def read(self) -> float | None:
        """The scale that gradients have now, as a number: waits for the device. None where nothing scales them."""
        return float(self.scaler.get_scale()) if self.scaler is not None and self.skips else None

    def updated(self) -> bool:
        """Whether the scaler has been updated since the last call, so that the steps before it are settled."""
        # `update` replaces what the scaler keeps of each optimizer; a scaler that keeps nothing settles every step.
        now = getattr(self.scaler, "_per_optimizer_states", None)
        updated = now is None or now is not self._seen
        self._seen = now
        return updated

    def __getstate__(self) -> dict[str, Any]:
        return {"scaler": self.scaler, "_seen": None}


class Told(Protocol):
    """Where the other ranks say what their scalers have done."""

    def compare(self, choice: Any, past: Mapping[str, str]) -> None: ...
    def scaling(self) -> Scaling | None: ...


class Tracker:
    """Keeps residuals in the units of a loss scale, and takes back what a scaler has thrown away.

    Args:
        loss_scale: what the scaler does.
        feedback: the residuals.
    """

    def __init__(self, loss_scale: LossScale, feedback: Memory) -> None:
        self.loss_scale, self.feedback = loss_scale, feedback
        self._scale: float | Tensor | None = loss_scale.read()
        #: Whether the last step was made without this rank's gradients, so that its scaler does not know of it.
        self.astray = False
        self._overflowed = False

    @property
    def scale(self) -> float | None:
        """That residuals have; None where nothing scales gradients. Waits for the device."""
        return None if self._scale is None else float(self._scale)

    @property
    def skips(self) -> bool:
        """Whether steps can be skipped."""
        return self.loss_scale.skips

    def asks(self, step: Any) -> bool:
        """Whether `follow` will wait for the others: where this rank has joined, its own scaler does not know what
        theirs do; they say so."""
        return self.skips and (self.astray or not step.own)

    def follow(self, others: Told, step: Any, scaling: Scaling | None) -> bool:
        """Before a step: what the scaler has done since the last one. Returns whether that took to ask the others.

        Args:
            others: who have announced the same.
            step: with `own`, `choice` and `past`.
            scaling: as this rank knows it.
        """
        if not self.skips:
            return False
        astray, self.astray = self.asks(step), not step.own
        if astray:
            others.compare(step.choice, step.past)
            scaling = others.scaling() or scaling
        if scaling is None:
            return astray
        if scaling.updated:
            self.feedback.commit()
            self._overflowed = False
        self._rescale(scaling.scale)
        return astray

    def _rescale(self, scale: float | Tensor) -> None:
        """Gradients have this scale from now on."""
        if isinstance(scale, Tensor):  # the scaler will change it in place
            scale.record_stream(torch.cuda.current_stream(scale.device))
            scale = scale.clone()
        known = not (isinstance(scale, Tensor) or isinstance(self._scale, Tensor))
        if self._scale is not None and not (known and scale == self._scale):
            self.feedback.rescale(scale / self._scale)
        self._scale = scale

    def ended(self, not_finite: bool) -> bool:
        """After a step: whether the scaler will skip it, which is undone here. What came before in the same gradients
        is skipped with it, and so is what will yet be added to them."""
        self._overflowed |= self.skips and not_finite
        if self._overflowed:
            self.feedback.undo()
        return self._overflowed

    def loaded(self, scale: float | None) -> None:
        """The residuals are from a checkpoint, in units of this scale."""
        self._overflowed = False
        self._scale = scale or 1.0 if self.skips else None
        if self._scale is None:
            self.feedback.rescale(1 / (scale or 1.0))

    def disconnected(self) -> None:
        """What comes next has nothing to do with the last step."""
        self._overflowed = False
