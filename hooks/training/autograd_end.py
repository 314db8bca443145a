"""The end of a backward pass, or its failure, as autograd reports it; DDP's hook hears of neither."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..comm.between_steps import Reentered
from ..comm.untraced import untraced

_queue = torch.autograd.Variable._execution_engine.queue_callback
#: The number of the backward pass that runs now on this thread, its own for one inside another; -1: none does.
current_pass: Callable[[], int] = torch._C._current_graph_task_id


class AtEnd:
    """Two callbacks of the backward pass that runs now: one for its end, one for the case that it raises.

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

    @untraced
    def __del__(self) -> None:
        if self._pending:
            self._raised()


def waited(wait: Callable[[], object], failed: Callable[[BaseException], bool]) -> BaseException | None:
    """Wait for a result of all ranks: a rank that leaves the wait diverges from the others. An exception from a signal
    handler is returned, for the caller to raise once the result is used; a second one is raised at once.

    Args:
        wait: raises the failure of the result; may be called again.
        failed: True of an exception that is such a failure, where it is none of a call that a handler made.
    """
    try:
        wait()
    except BaseException as error:
        if failed(error) and not isinstance(error, Reentered):
            raise
        wait()
        return error
    return None


def raise_at_end(error: BaseException) -> None:
    """Raise at the end of the backward pass that runs now, after all queued callbacks; at once where none runs."""

    def tell() -> None:
        raise error

    if not at_end(tell):
        raise error


#: As `_in_step` of a class whose steps are backward passes, for `between_steps`.
in_backward = property(lambda _: current_pass() != -1)


def at_end(callback: Callable[[], None]) -> bool:
    """Have autograd call `callback` when the backward pass that runs now has ended, after those queued before. Returns
    False where none runs on this thread."""
    try:
        _queue(partial(_call, callback))
    except RuntimeError:
        return False
    return True


@untraced
def _call(callback: Callable[[], None]) -> None:
    callback()
