"""A gradient that is not there yet."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class AwaitedGradient(Tensor):
    """Stands where a parameter's gradient will be: any computation with it raises RuntimeError, as clipping by the
    global norm and a gradient scaler would else see no gradient, or this rank's alone. Zeroing it puts zeros there."""

    parameter: weakref.ref[Tensor]

    @staticmethod
    def __new__(cls, parameter: Tensor) -> AwaitedGradient:
        made: AwaitedGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.parameter = weakref.ref(parameter)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:  # of `grad.data` and `grad.detach()`
            return args[0]
        if function in (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default):
            for gradient in args[0] if isinstance(args[0], list | tuple) else args:
                if not isinstance(gradient, cls):
                    gradient.zero_()
                elif (parameter := gradient.parameter()) is not None and parameter.grad is gradient:
                    zeros = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype)
                    parameter.grad = zeros.zero_()
            return args[0] if function is torch.ops.aten.zero_.default else None
        raise RuntimeError(
            f"gradwire: {function} asks for a gradient that is still on its way: under overlap_forward only the "
            "optimizer's step() may use gradients, and neither clipping nor a GradScaler, nor another backward pass "
            "before zero_grad(). Leave that out, or overlap_forward"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)})"
