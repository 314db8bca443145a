"""Checks that DDP calls a state's hook: a model may have another hook, or none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..comm.untraced import untraced
from ..training.autograd_end import at_end, current_pass

PROBLEM = (
    "backward ran without the hook of the CompressState made for this model: call "
    "model.register_comm_hook(state, compress_hook) on every rank, or state.close() to train without it"
)


def has_hook(model: DistributedDataParallel) -> bool:
    """True if DDP calls a hook. A copied or unpickled model lists the original's hook, and calls none."""
    return bool(model._get_ddp_logging_data().get("comm_hook"))


def check_free(model: DistributedDataParallel) -> None:
    """Raise ValueError if DDP has a hook of its own, or makes one at the first forward pass."""
    own = None
    if getattr(model, "mixed_precision", None) is not None:
        own = "mixed_precision=…", "use torch.autocast, or a model in bfloat16"
    elif any(hasattr(p, "_in_backward_optimizers") for p in model.module.parameters()):
        own = "_apply_optimizer_in_backward", "step an optimizer after backward"
    if own is not None:
        raise ValueError(
            f"DistributedDataParallel has a communication hook of its own for {own[0]}, and takes one only, so that "
            f"gradwire's cannot be registered: leave that out, and {own[1]}"
        )


def expect_hook(
    parameters: Iterable[nn.Parameter],
    find: Callable[[Tensor], DistributedDataParallel | None],
    refuse: Callable[[str], None],
) -> None:
    """In the first synchronised backward pass, check that the model has a communication hook.

    Args:
        parameters: the model's; one gets a gradient.
        find: returns the model that has a parameter; None: these are trained without DDP.
        refuse: called if there is no hook: reports to the other ranks that this one takes no part, then raises
            RuntimeError here.
    """
    handles: list[Any] = []
    found: list[Callable[[], DistributedDataParallel | None]] = []
    last_pass = -1

    @untraced
    def look(parameter: Tensor, grad: Tensor) -> None:
        nonlocal last_pass
        if not found:
            owner = find(parameter)
            found.append((lambda: None) if owner is None else weakref.ref(owner))
        model = found[0]()
        if model is None:
            forget()
        elif model.require_backward_grad_sync and last_pass != current_pass():
            last_pass = current_pass()
            at_end(ended)  # before DDP's own, which it queues at its last bucket

    def ended() -> None:
        model = found[0]()
        if model is None or not _awaits_its_end(model):
            return
        forget()
        if not has_hook(model):
            try:
                refuse(PROBLEM)
            except Exception:
                model.reducer._reset_state()  # else DDP would complain of this pass at the next one
                raise

    def forget() -> None:
        while handles:
            handles.pop().remove()

    handles += [p.register_hook(partial(look, p)) for p in parameters if p.requires_grad]


def _awaits_its_end(model: DistributedDataParallel) -> bool:
    """True if DDP reduces the gradients of the backward pass that runs now."""
    try:
        model.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False
