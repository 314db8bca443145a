"""A parameter whose update is still due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

#: Attributes and methods of a tensor that do not depend on its elements.
_DESCRIPTION = {"shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "layout", "_version"}
_DESCRIPTION |= {"is_cuda", "is_sparse", "size", "dim", "stride", "numel", "is_contiguous", "is_floating_point"}


class AwaitedParameter:
    """A mixin for a parameter's class while its update is due. Functions of PyTorch that read or write its elements
    first take the update, whoever calls them: a layer, a hook that computes weights, a script that clamps them."""

    __slots__ = ()
    #: Takes the updates of these parameters, or all if it is given none, and releases them.
    _update: Callable[[list[Tensor]], None]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(function, "__self__", None), "__name__", "")
            name = attribute if name == "__get__" or attribute == "grad" else name
        if name not in _DESCRIPTION:
            cls._update([value for value in _tensors((*args, *kwargs.values())) if isinstance(value, cls)])
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        base: Any = type(self).__bases__[1]
        self._update([self])  # type: ignore[list-item]
        return base.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        base: Any = type(self).__bases__[1]
        self._update([self])  # type: ignore[list-item]
        return base.__reduce_ex__(self, protocol)


def awaited_class(base: type[Tensor], update: Callable[[list[Tensor]], None]) -> type[Tensor]:
    """The class of parameters of this base while their updates are due, which `update` takes."""
    inside = {"_update": staticmethod(update), "__module__": base.__module__, "__qualname__": base.__qualname__}
    kind: Any = type(base)
    made: type[Tensor] = kind(base.__name__, (AwaitedParameter, base), inside)
    return made


def release(parameter: Tensor) -> None:
    """Give a parameter its own class back."""
    if isinstance(parameter, AwaitedParameter):
        parameter.__class__ = type(parameter).__bases__[1]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
