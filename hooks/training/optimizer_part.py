"""An optimizer's step, taken for some of its parameters at a time."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from numbers import Number
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class OptimizerStep:
    """A step of an optimizer that has found no gradients, as it is taken for parts of its parameters later.

    Each part begins with the optimizer's groups, its attributes and the entries of `state` that belong to no parameter
    as they were before the step, and must leave them as the step has. So an optimizer may count its steps there.

    Args:
        optimizer: right before its step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = _kept(optimizer)
        self._after: dict[str, Any] | None = None

    def ended(self) -> None:
        """The step has ended.

        Raises:
            RuntimeError: it has changed something that a part cannot find as it was.
        """
        self._after = _kept(self._optimizer)
        self._compare(self._before, self._after, shared=True)

    def take(self, parameters: Mapping[int, list[Tensor]], means: Mapping[Tensor, Tensor]) -> None:
        """Take the step, without hooks, for these parameters of the optimizer's groups, which have these gradients.

        Raises:
            RuntimeError: it has changed the optimizer otherwise than without gradients, or has drawn random numbers.
        """
        optimizer, step = self._optimizer, type(self._optimizer).step
        plain: Any = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        mine = [parameter for of_group in parameters.values() for parameter in of_group]
        found = [parameter.grad for parameter in mine]
        attributes, state = vars(optimizer), optimizer.state
        before, draws = _fresh(self._before), torch.get_rng_state()
        keys = before["state"].keys() | (before if self._after is None else self._after)["state"].keys()
        own, shared = dict(attributes), {key: state.pop(key) for key in keys & state.keys()}
        state.update(before["state"])
        size = len(state)
        for parameter in mine:
            parameter.grad = means[parameter]
        attributes.update(before["attributes"])
        optimizer.param_groups = [
            {**group, "params": parameters.get(number, [])} for number, group in enumerate(before["groups"])
        ]
        try:  # as outside of the forward pass
            with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
                plain(optimizer)
            # A dictionary's last keys are its newest ones; to look at all would take a time by the optimizer's size.
            keys |= {key for key in islice(reversed(state), len(state) - size) if not isinstance(key, Tensor)}
            if self._after is not None:
                self._compare(self._after, _kept(optimizer, keys & state.keys()))
            if not torch.equal(draws, torch.get_rng_state()):
                raise self._error("draws random numbers")
        finally:
            attributes.clear()
            attributes.update(own)
            for key in keys & state.keys():
                del state[key]
            state.update(shared)
            for parameter, grad in zip(mine, found, strict=True):
                parameter.grad = grad

    def _compare(self, wanted: dict[str, Any], found: dict[str, Any], *, shared: bool = False) -> None:
        if not _same(wanted["groups"], found["groups"], shared):
            raise self._error("changes its param_groups by the gradients")
        for part, what in (("attributes", "attribute"), ("state", "entry of state"), ("class", "function or value")):
            for name in wanted[part] | found[part]:
                if not _same(wanted[part].get(name), found[part].get(name), shared):
                    raise self._error(f"changes its {what} {name!r}")

    def _error(self, does: str) -> RuntimeError:
        return RuntimeError(
            f"gradwire: {type(self._optimizer).__name__} {does} in a step, which a step of a part of its parameters "
            "must not: train without overlap_forward"
        )


#: Objects whose attributes are not compared.
_WHOLE = (dict, nn.Module, torch.optim.Optimizer, type, ModuleType)


class _Shared(NamedTuple):
    """A value that all parts share, and what shows whether it has changed."""

    value: Any
    mark: Any = None


def _kept(optimizer: torch.optim.Optimizer, keys: Iterable[Any] | None = None) -> dict[str, Any]:
    """A copy of an optimizer without its parameters and their states. Of its `state` it has the entries by these keys,
    or all that belong to no parameter."""
    if keys is None:
        keys = [key for key in optimizer.state if not isinstance(key, Tensor)]
    of_class = {
        f"{base.__name__}.{name}": _Shared(None, _copied(value))
        for base in type(optimizer).__mro__
        if base.__module__.partition(".")[0] not in ("torch", "builtins", "typing")
        for name, value in vars(base).items()
        if not name.startswith("__")
    }
    return {
        "groups": [
            {key: _copied(v) for key, v in group.items() if key != "params"} for group in optimizer.param_groups
        ],
        "attributes": {
            name: _copied(value) for name, value in vars(optimizer).items() if name not in ("param_groups", "state")
        },
        "state": {key: _copied(optimizer.state[key]) for key in keys},
        "class": of_class,
    }


def _copied(value: Any, depth: int = 6) -> Any:
    if isinstance(value, Tensor):
        small = value.numel() <= 1024 and not isinstance(value, nn.Parameter)
        return value.detach().clone() if small else _Shared(value, value._version)
    if value is None or isinstance(value, Number | str):
        return value
    if type(value) in (set, deque):
        return copy.copy(value)
    if type(value) in (list, tuple):
        return type(value)([_copied(item, depth) for item in value])
    if type(value) is dict and not any(isinstance(key, Tensor) for key in value):
        return {key: _copied(item, depth) for key, item in value.items()}
    if isinstance(value, FunctionType) and depth:
        cells = [_contents(cell, depth - 1) for cell in value.__closure__ or ()]
        names = value.__code__.co_names if value.__globals__.get("__name__", "").partition(".")[0] != "torch" else ()
        globals_ = {name: value.__globals__.get(name) for name in names}
        counts = {name: _copied(v) for name, v in globals_.items() if isinstance(v, Number | list | Tensor)}
        return _Shared(value, (cells, counts))
    if isinstance(value, torch.Generator):
        return _Shared(value, value.get_state())
    if type(value).__module__ == "numpy":
        return _Shared(value, value.tobytes())
    if depth and hasattr(value, "__dict__") and not isinstance(value, _WHOLE):
        return _Shared(value, {name: _copied(item, 0) for name, item in vars(value).items()})
    return _Shared(value)


def _contents(cell: Any, depth: int) -> Any:
    try:
        return _copied(cell.cell_contents, depth)
    except ValueError:  # empty
        return None


def _fresh(kept: Any) -> Any:
    """A value as it was copied."""
    if isinstance(kept, _Shared):
        return kept.value
    if isinstance(kept, Tensor):
        return kept.clone()
    if isinstance(kept, dict):
        return {key: _fresh(item) for key, item in kept.items()}
    if isinstance(kept, list | tuple):
        return type(kept)([_fresh(item) for item in kept])
    return copy.copy(kept)


def _same(one: Any, other: Any, shared: bool) -> bool:
    """True if two copies are equal, or `shared`: equal in what parts share."""
    if isinstance(one, _Shared) and isinstance(other, _Shared):
        return shared if one.value is not other.value else _same(one.mark, other.mark, False)
    if type(one) is not type(other):
        return shared
    if isinstance(one, dict):
        if shared:
            return all(_same(one[key], other[key], True) for key in one.keys() & other.keys())
        return one.keys() == other.keys() and all(_same(one[key], other[key], False) for key in one)
    if isinstance(one, list | tuple):
        return (shared or len(one) == len(other)) and all(map(_same, one, other, [shared] * len(one)))
    if isinstance(one, Tensor):
        return shared or torch.equal(one, other)
    return shared or bool(one == other)
