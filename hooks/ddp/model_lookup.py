"""The DDP model of a state, and the names of its parameters."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..training.names import names_of


def ddp_of(model: Any) -> DistributedDataParallel:
    """The DDP model itself, or the one inside a wrapper of `torch.compile` or Fabric.

    Raises:
        TypeError: there is none.
    """
    inner = model
    for attribute in ("_forward_module", "_orig_mod"):  # Fabric's; torch.compile's
        inner = getattr(inner, attribute, inner)
    if isinstance(inner, DistributedDataParallel):
        return inner
    if isinstance(model, nn.Module):
        remedy = (
            "wrap the model in it first "
            "(FSDP2 reduces its gradients by itself: for replicas of shards call gradwire.compress_fsdp)"
        )
    else:
        remedy = "the model is the first argument, as in CompressState(model, TopK(density=0.01))"
    raise TypeError(f"model is a {type(model).__name__}, expected DistributedDataParallel: {remedy}")


def find_owner(state: object, parameter: Tensor) -> DistributedDataParallel | None:
    """The DDP model that has this parameter and a hook; preferred is one whose hook has this state.

    A bucket does not know its model, and neither does a state that was made before the model, or was pickled. None if
    there is no such model, or more than one.
    """
    registered, hooked = [], []
    for found in gc.get_objects():
        # No `isinstance`: it asks each object for its class, and some proxies raise.
        if DistributedDataParallel not in type(found).__mro__ or not found.__dict__.get("_comm_hooks"):
            continue
        if any(p is parameter for p in found.module.parameters()):
            hooked.append(found)
            if any(s is state for _, s in found._comm_hooks):
                registered.append(found)
    candidates = registered or hooked
    return candidates[0] if len(candidates) == 1 else None


def module_of(model: DistributedDataParallel) -> nn.Module:
    """The module that names the parameters: the one that DDP wraps. After torch's `replicate(module)`, DDP wraps a
    list of parameters, and this is `module`."""
    if type(model.module) is nn.ParameterList:
        for found in gc.get_objects():
            if type(found).__name__ == "_ReplicateState" and getattr(found, "_ddp", None) is model:
                module: nn.Module = found.module
                return module
    return model.module


def parameters_of(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, by the names that their module gives them, in the order of DDP's counts."""
    ignored, names = model.parameters_to_ignore, names_of(module_of(model))
    named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]
    return {names.get(id(p), name): p for name, p in named}


def begins_anew(old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]) -> bool:
    """True if a state of the parameters `old` meets another model of equal names and shapes; False if it meets its own,
    wrapped again, maybe with parameters that were frozen before.

    Raises:
        ValueError: it meets another model of other names or shapes, or one that shares some parameters only.
    """
    if all(new.get(name) is p for name, p in old.items()):
        return False
    equal = {name: p.shape for name, p in old.items()} == {name: p.shape for name, p in new.items()}
    if equal and set(map(id, old.values())).isdisjoint(map(id, new.values())):
        return True
    names = sorted(old.keys() ^ new.keys()) or [name for name in old if old[name] is not new[name]]
    raise ValueError(
        f"the state belongs to another model: they differ in {', '.join(map(repr, names[:4]))}; make a CompressState "
        "for each model"
    )
