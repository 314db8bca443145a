"""Which modules read which parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Attributes and methods of a tensor that do not depend on its elements.
_DESCRIPTION = {"shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "layout"}
_DESCRIPTION |= {"is_cuda", "is_sparse", "size", "dim", "stride", "numel", "is_contiguous", "is_floating_point"}


class Reads:
    """The parameters that modules read in a forward pass.

    Args:
        root: the outermost module.
        wanted: the parameters to look for.
    """

    def __init__(self, root: nn.Module, wanted: set[Tensor]) -> None:
        # By address, so that modules do not refer to themselves.
        self._of = {id(module): wanted & set(module.parameters(recurse=False)) for module in root.modules()}
        self._idle = {id(module) for module in root.modules() if wanted.isdisjoint(module.parameters())}
        self._called: set[int] = set()

    def of(self, module: nn.Module) -> set[Tensor] | None:
        """A module's own parameters, and those that it has read; the root's are also those that nobody has read or
        called. None: what it reads is not known, as it was not called, or does not train now."""
        if id(module) in self._called and (trains(module) or id(module) in self._idle):
            return self._of[id(module)]
        return None

    def call(self, module: nn.Module) -> set[Tensor]:
        """Note that a module is called; returns its own parameters."""
        self._called.add(id(module))
        return self._of[id(module)]

    def add(self, module: nn.Module, parameters: Iterable[Tensor]) -> None:
        """Note that a module has read these."""
        self._of[id(module)].update(parameters)


class ReadsRecorder(TorchFunctionMode):
    """Records a forward pass: the parameters that each module reads by itself, whoever owns them. A module may use the
    weights of another, which is then not called (the output layer of `nn.MultiheadAttention`), or later.

    Args:
        root: the module whose pass is recorded.
        parameters: those to look for.
    """

    def __init__(self, root: nn.Module, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._wanted = set(parameters)
        self._reads = Reads(root, self._wanted)
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
        self._seen |= self._reads.call(self._active[0])
        self.__enter__()

    def end(self) -> Reads:
        """The root's pass has ended."""
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._reads.add(self._active[0], self._wanted - self._seen)
        return self._reads

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._active.append(module)
        self._seen |= self._reads.call(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._active[-1] is module and len(self._active) > 1:
            self._active.pop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name not in _DESCRIPTION:
            for value in _tensors((*args, *(kwargs or {}).values())):
                if isinstance(value, nn.Parameter) and value in self._wanted:
                    self._reads.add(self._active[-1], [value])
                    self._seen.add(value)
        return func(*args, **(kwargs or {}))


def trains(module: nn.Module) -> bool:
    """True if a module is called for training. Else it may read other parameters, and not those that a recorder has it
    read: fused kernels of `torch.nn` step aside for those."""
    return module.training and torch.is_grad_enabled()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
