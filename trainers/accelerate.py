"""Accelerate: the hook of a prepared model, and its state beside the files of `save_state`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn

from ..hooks import CompressState
from . import files
from .registering import register_hook

#: The states that each accelerator saves, each in files of another name.
_states: WeakKeyDictionary[Accelerator, list[CompressState]] = WeakKeyDictionary()


def register_with_accelerator(
    accelerator: Accelerator, model: nn.Module, state: CompressState, *, strict: bool = True
) -> None:
    """Compress the gradients of a prepared model. `accelerator.save_state` then writes each rank's residuals to a file
    of its own, and `load_state` reads it; on another number of ranks, each rank gets the mean of all. With one process
    nothing is done. A collective.

    Args:
        accelerator: the one that prepared the model, without a `comm_hook` of its own. In "fp16" its GradScaler is
            followed.
        model: the return value of `prepare`.
        state: from `CompressState(codec)`.
        strict: `CompressState.load_state_dict`'s, for `load_state`.

    Raises:
        TypeError: `prepare` made no `DistributedDataParallel` of the model.
        RuntimeError: the model has another hook.
    """
    if accelerator.num_processes == 1:
        return
    register_hook(model, state, accelerator.scaler)
    states = _states.setdefault(accelerator, [])
    if any(known is state for known in states):  # the model has been prepared again
        return
    states.append(state)
    name = "gradwire" if len(states) == 1 else f"gradwire{len(states)}"

    def save(models: Sequence[nn.Module], weights: Any, folder: str) -> None:
        files.save(state, folder, name)

    def load(models: Sequence[nn.Module], folder: str) -> None:
        files.load(state, folder, name, strict)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
