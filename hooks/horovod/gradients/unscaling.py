"""Changes of gradients while ranks reduce them: a GradScaler's, which has to come after, and a script's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ....compress.backends import all_finite
from ...training.grad_scaler import LossScale
from ...training.living import living

#: The right way to change gradients that ranks reduce.
REMEDY = (
    "call optimizer.synchronize() before what changes gradients, such as clipping or scaler.unscale_(optimizer), and "
    "then step inside `with optimizer.skip_synchronize():`"
)


class Unscaling:
    """Notices that a GradScaler has come to an optimizer, by the entry that the scaler keeps of it until `update`.

    Every rank notices, whatever its gradients are.

    Attributes:
        loss_scale: of the scaler, once it is known: the user has named it, or it is expected, or has come.
    """

    def __init__(self) -> None:
        self.loss_scale = LossScale(None)
        self._found: list[weakref.ref[torch.amp.GradScaler]] | None = None
        #: The scaler's entry of an optimizer whose gradients were reduced for it.
        self._reduced: Any = None
        #: The scalers' entries when gradients were reduced last.
        self._since: list[Any] = []

    def use(self, scaler: torch.amp.GradScaler) -> None:
        """The user names the scaler."""
        self.loss_scale = LossScale(scaler)
        self._found = [weakref.ref(scaler)]

    def look(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Look for scalers that may come, once, and for the one that has come to this optimizer; true if there are new
        ones."""
        if self._found is None or (optimizer is not None and not any(self._entries(optimizer))):
            self._found = [weakref.ref(scaler) for scaler in living(torch.amp.GradScaler) if scaler.is_enabled()]
            return bool(self._found)
        return False

    def expect(self, scale: float) -> None:
        """Residuals are in units of this `scale`, of a scaler before a checkpoint or a copy. Where no scaler is known
        yet, one that has scaled something is taken for the one that will come; of several, one with this scale."""
        if scale != 1.0 and self.loss_scale.scaler is None:
            scalers = [s for found in self._found or () if (s := found()) is not None and s._scale is not None]
            self.loss_scale = LossScale(max(scalers, key=lambda s: s.get_scale() == scale, default=None))

    def _entries(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.amp.GradScaler, dict[str, Any]]]:
        """The scalers that have come to it, and their entries of it."""
        for reference in self._found or ():
            scaler = reference()
            entry = _states_of(scaler).get(id(optimizer))
            if scaler is not None and entry is not None:
                yield scaler, entry

    def begins(self, optimizer: torch.optim.Optimizer, started: bool) -> bool:
        """True if a scaler is about to unscale gradients that have not been reduced. Says so once.

        Args:
            started: gradients were made since the last reduction.

        Raises:
            RuntimeError: it has unscaled these already.
        """
        for scaler, entry in self._entries(optimizer):
            if entry is self._reduced:
                continue
            if entry["stage"] is OptState.UNSCALED and started:
                raise RuntimeError(
                    "scaler.unscale_(optimizer) has unscaled gradients while ranks reduce them: tell the optimizer of "
                    f"this scaler before the first backward pass, by optimizer.use_grad_scaler(scaler), or {REMEDY}"
                )
            if entry["stage"] is OptState.READY:
                self._reduced = entry
                if self.loss_scale.scaler is not scaler:
                    self.loss_scale = LossScale(scaler)
                return started or not any(_states_of(scaler) is before for before in self._since)
        return False

    def has_begun(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the gradients were reduced for the scaler that is at this optimizer."""
        scaler = self.loss_scale.scaler
        return self._reduced is not None and _states_of(scaler).get(id(optimizer)) is self._reduced

    def reduced(self) -> None:
        """The gradients have been reduced."""
        self._since = [_states_of(reference()) for reference in self._found or ()]


def _states_of(scaler: torch.amp.GradScaler | None) -> dict[int, dict[str, Any]]:
    """The scaler's entries, by optimizer; `update` begins anew with another dictionary."""
    states: dict[int, dict[str, Any]] | None = getattr(scaler, "_per_optimizer_states", None)
    return {} if states is None else states


def version(grad: Tensor | None) -> int:
    """Number of writes to a gradient, if that is counted."""
    return -1 if grad is None or grad.is_inference() else grad._version


def are_finite(grads: Iterable[Tensor]) -> bool:
    """True if all reduced gradients are finite, alike on all ranks. Waits for the device, as a scaler does."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        finite = all_finite(grad._values() if grad.is_sparse else grad)
        by_device.setdefault(grad.device, []).append(finite)
    return all(bool(torch.stack(found).all()) for found in by_device.values())
