"""Passes that the caller finalizes outside of autograd: `FSDPModule.set_manual_backward_finalization`, torch 2.15's.

FSDP then reduces the remaining gradients in `finalize_backward`, and waits for them there, or in the handle's `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..comm.untraced import untraced


class ByHand:
    """Observer of the ends of such passes.

    Args:
        model: a model with FSDP modules.
        ended: called when FSDP has waited for the gradients of such a pass.
        discarded: called when a pass is given up, by `reset_iter_state`.
    """

    def __init__(self, model: nn.Module, ended: Callable[[], None], discarded: Callable[[], None]) -> None:
        states: dict[Any, None] = {m._get_fsdp_state(): None for m in model.modules() if isinstance(m, FSDPModule)}
        self._states = [state for state in states if hasattr(state, "wait_for_gradient_reduction")]
        self._ended, self._discarded = ended, discarded
        for state in self._states:  # the root is not known before the first forward pass
            self._watch(state)

    @property
    def active(self) -> bool:
        """True if such a pass runs now, or is finalized."""
        return any(state._state_ctx.manual_backward_finalization_active for state in self._states)

    def detach(self) -> None:
        """Stop observing."""
        for state in self._states:
            del state.wait_for_gradient_reduction, state._reset_iter_state
        self._states = []

    def _watch(self, state: Any) -> None:
        wait, reset = state.wait_for_gradient_reduction, state._reset_iter_state

        def waited(*arguments: Any) -> None:
            by_hand = self.active
            wait(*arguments)
            if by_hand:
                self._ended()

        def discarded() -> None:
            self._discarded()
            reset()

        state.wait_for_gradient_reduction, state._reset_iter_state = untraced(waited), untraced(discarded)
