"""Where a backward pass ends, and whether it did: autograd's word, of which DDP's hook hears nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

_queue = torch.autograd.Variable._execution_engine.queue_callback
#: The number of the backward pass that runs now on this thread, its own for one inside another; -1: none does.
current_pass: Callable[[], int] = torch._C._current_graph_task_id


def undisturbed() -> bool:
    """Whether torch computes on this thread, in a backward pass, as on one of our own: no autocast, no mode that gets
    to see what it does, or does it otherwise."""
    return not (torch._C._len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu"))


class AtEnd:
    """What to do when the backward pass that runs now has ended, and what if it raises instead.

    Autograd calls a callback when a pass has ended, in the order in which callbacks were queued; where the pass raises
    it drops them, which is when `raised` is called.

    Args:
        ended, raised: each called once at most, and only one of them.
    """

    __slots__ = ("_ended", "_pending", "_raised")

    def __init__(self, ended: Callable[[], None], raised: Callable[[], None]) -> None:
        self._ended, self._raised = ended, raised
        self._pending = True

    def queue(self) -> bool:
        """Returns False, and does nothing, where no backward pass runs on this thread, as in `DDP.join`."""
        self._pending = at_end(self)
        return self._pending

    def __call__(self) -> None:
        self._pending = False
        self._ended()

    def __del__(self) -> None:
        if self._pending:
            self._raised()


def at_end(callback: Callable[[], None]) -> bool:
    """Have autograd call `callback` when the backward pass that runs now has ended, after those queued before. Returns
    False where none runs on this thread."""
    try:
        _queue(callback)
    except RuntimeError:
        return False
    return True
