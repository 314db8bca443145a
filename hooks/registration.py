"""A state whose hook is not registered on some rank: the others would wait for it in their exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .comm.untraced import untraced

PROBLEM = (
    "backward ran without the hook of the CompressState made for this model: call "
    "model.register_comm_hook(state, compress_hook) on every rank, or state.close() to train without it"
)


def expect_hook(
    parameters: Iterable[nn.Parameter],
    model_of: Callable[[], DistributedDataParallel | None],
    refuse: Callable[[str], None],
) -> None:
    """In the first synchronised backward pass, look whether the model has a communication hook, and raise if not.

    Args:
        parameters: the model's; one gets a gradient.
        model_of: the model, while it lives.
        refuse: tells the other ranks why this one does not take part, before it raises RuntimeError here.
    """
    handles: list[Any] = []

    @untraced
    def look(grad: Tensor) -> None:
        model = model_of()
        if model is not None and not model.require_backward_grad_sync:
            return
        while handles:
            handles.pop().remove()
        if model is not None and not getattr(model, "_comm_hooks", True):
            refuse(PROBLEM)

    handles += [p.register_hook(look) for p in parameters]
