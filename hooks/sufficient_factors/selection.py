"""The linear layers whose gradients travel as factors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ... import __version__
from ..core.options import check_whole
from ..training.names import matches
from .layer import DTYPES


def describe(chosen: dict[str, nn.Linear], device: torch.device) -> dict[str, Any]:
    """Values that must be equal on all ranks: the layers, and what decides the bits of a product."""
    cuda = device.type == "cuda"
    return {
        "version": __version__,
        "layers": [f"{name}: {m.weight.dtype}{list(m.weight.shape)}" for name, m in chosen.items()],
        "torch": torch.__version__,
        "processor": torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability(),
        "number of threads": 0 if cuda else torch.get_num_threads(),
    }


def chosen_modules(
    model: nn.Module, modules: Collection[str] | None, rows: int | None, world_size: int
) -> dict[str, nn.Linear]:
    """The linear layers that are meant, by name, in the model's order.

    Raises:
        TypeError, ValueError: `SufficientFactors`'s.
    """
    if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is a {type(model).__name__}, expected the module that DistributedDataParallel will wrap"
        )
    if (modules is None) == (rows is None):
        raise ValueError("SufficientFactors needs either modules, names such as ['head'], or rows, samples a rank")
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows={rows!r}: expected the number of samples a rank, at least 1")
    if modules is not None and (isinstance(modules, str) or not all(isinstance(name, str) for name in modules)):
        raise TypeError(f"modules={modules!r}: expected names of modules such as ['head'] or ['*.experts.*']")
    named = dict(model.named_modules())
    linear = {name: module for name, module in named.items() if type(module) is nn.Linear}
    matching: set[str] = set()
    for pattern in modules or ():
        names = matches(pattern, named)
        if not names:
            raise ValueError(f"modules: {pattern!r} matches none; among the linear layers are {list(linear)[:4]}")
        matching |= names
    for name in sorted(matching):
        if (problem := problem_of(model, name, named[name])) is not None:
            raise ValueError(f"module {name!r} {problem}")
    if rows is not None:
        paying = {name for name, module in linear.items() if pays(module.weight, rows, world_size)}
        matching = {name for name in paying if problem_of(model, name, named[name]) is None}
    if not matching:
        raise ValueError(f"modules={modules}, rows={rows}: no linear layer whose factors take half a gradient's bytes")
    chosen: dict[str, Any] = {name: module for name, module in named.items() if name in matching}
    devices = {p.device for p in [*model.parameters()][:1]} | {module.weight.device for module in chosen.values()}
    if len(devices) > 1:
        raise ValueError(f"the model is on several devices, {sorted(map(str, devices))}: SufficientFactors takes one")
    check_whole({f"{name}.weight": module.weight for name, module in chosen.items()}, "SufficientFactors")
    return chosen


def pays(weight: Tensor, rows: int, world_size: int) -> bool:
    """True if the factors of so many rows a rank take at most half the bytes of a dense ring all-reduce."""
    out, width = weight.shape
    return world_size * rows * (out + width) <= out * width


def problem_of(model: nn.Module, name: str, module: nn.Module) -> str | None:
    """The reason why a module cannot be taken, if any."""
    if type(module) is not nn.Linear:
        return f"is a {type(module).__name__}: SufficientFactors takes nn.Linear itself"
    weight = module.weight
    if weight.dtype not in DTYPES or not weight.requires_grad:
        return f"has a weight of {weight.dtype} that requires {'a' if weight.requires_grad else 'no'} gradient"
    if sum(p is weight for m in model.modules() for p in m._parameters.values()) > 1:
        return "shares its weight with another module, whose part of the gradient has no factors: leave it out"
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return "has hooks on its weight, which would see no gradient: remove them, or leave it out"
    return None
