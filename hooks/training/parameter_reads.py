"""Which modules read which parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Attributes and methods of a tensor that do not depend on its elements.
_DESCRIPTION = {"shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "layout"}
_DESCRIPTION |= {"is_cuda", "is_sparse", "size", "dim", "stride", "numel", "is_contiguous", "is_floating_point", "type"}


class ParameterReads(TorchFunctionMode):
    """Records a forward pass: the parameters that each module reads by itself, whoever owns them. A module may use the
    weights of another, which is then not called (the output layer of `nn.MultiheadAttention`), or later.

    Args:
        root: the module whose pass is recorded.
        parameters: those to look for.

    Attributes:
        of: for each module of the root its own parameters, and those that it has read; the root's are also those that
            nobody has read or called.
        modes: for each module that was called whether it was training, and whether gradients were enabled.
    """

    def __init__(self, root: nn.Module, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._root, self._wanted = root, set(parameters)
        self.of: dict[nn.Module, set[Tensor]] = {
            module: self._wanted & set(module.parameters(recurse=False)) for module in root.modules()
        }
        self.modes: dict[nn.Module, tuple[bool, bool]] = {}
        self._active = [root]
        self._seen: set[Tensor] = set()
        self._hooks = [
            hook
            for module in root.modules()
            for hook in (
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def begin(self) -> None:
        """The root's pass begins."""
        self._note(self._root)
        self.__enter__()

    def end(self) -> None:
        """The root's pass has ended."""
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self.of[self._root] |= self._wanted - self._seen

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._active.append(module)
        self._note(module)

    def _note(self, module: nn.Module) -> None:
        self.modes[module] = mode_of(module)
        self._seen |= self.of[module]

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._active[-1] is module:
            self._active.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name not in _DESCRIPTION:
            for value in _tensors((*args, *(kwargs or {}).values())):
                if isinstance(value, nn.Parameter) and value in self._wanted:
                    self.of[self._active[-1]].add(value)
                    self._seen.add(value)
        return func(*args, **(kwargs or {}))


def mode_of(module: nn.Module) -> tuple[bool, bool]:
    """What a module may take another way for: whether it trains, and whether gradients are enabled."""
    return module.training, torch.is_grad_enabled()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
