"""An optimizer's parameters, and its state as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def values_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, the optimizer's `load_state_dict` takes each value as it is, with its dtype and on its device."""
    loaded: dict[Any, Any] = {}

    def before(_: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        of_number = dict(zip(numbers, parameters_of(optimizer), strict=False))
        loaded.update({of_number.get(key, key): value for key, value in state_dict["state"].items()})
        return {**state_dict, "state": {}}

    hooks = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(lambda _: optimizer.state.update(loaded), prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
