"""Registration of the hook with a model, or with a trainer's wrapper of it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..hooks import CompressState, compress_hook
from ..hooks.ddp.model import ddp_of
from ..hooks.ddp.registration import check_free, has_hook


def register_hook(
    model: nn.Module, state: CompressState, grad_scaler: torch.amp.GradScaler | Literal["own"] | None = "own"
) -> None:
    """Bind a state to a model, and register `compress_hook`. A collective; a second call does nothing.

    Args:
        model: a `DistributedDataParallel` model, or a wrapper of it by Fabric's `setup` or `torch.compile`.
        state: from `CompressState(codec)`.
        grad_scaler: the GradScaler from now on: the trainer's, or None. By default the state keeps its own; with None,
            so does a state that has not trained yet.

    Raises:
        TypeError: there is no DDP model inside.
        ValueError: `CompressState.bind`'s; or DDP cannot call the hook; or the state has trained with a GradScaler and
            there is none now, or the reverse.
        RuntimeError: the model has another hook; or `CompressState.bind`'s.
    """
    if not isinstance(state, CompressState):
        raise TypeError(f"state={state!r}: expected a CompressState, as CompressState(TopK(density=0.01)) makes it")
    ddp = ddp_of(model)
    check_free(ddp)
    if not has_hook(ddp):
        ddp._comm_hooks.clear()  # those of the model that this one is a copy of
        if getattr(ddp, "_static_graph_delay_allreduce_enqueued", False):
            raise ValueError(
                "the model is a copy of one with static_graph=True, which torch never lets reduce anything: wrap its "
                "module in DistributedDataParallel again"
            )
    registered = any(known is state for _, known in ddp._comm_hooks)
    if ddp._comm_hooks and not registered:
        raise RuntimeError(
            f"the model has a communication hook already, {ddp._comm_hooks[0][0].__qualname__}: leave that out of the "
            "trainer's options, as a model has one hook only"
        )
    if grad_scaler == "own" or (grad_scaler is None and not state.bound):
        grad_scaler = state.grad_scaler
    state._follow(ddp, grad_scaler)  # each trainer has its own
    if not registered:
        ddp.register_comm_hook(state, compress_hook)
