"""A gradient that is not there yet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AwaitedGradient(Tensor):
    """Stands where a parameter's gradient will be: any computation with it raises RuntimeError, as clipping by the
    global norm and a gradient scaler would else see no gradient, or this rank's alone."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> AwaitedGradient:
        made: AwaitedGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"gradwire: {function} asks for a gradient that is still on its way: under overlap_forward only the "
            "optimizer's step() may use gradients, and neither clipping nor a GradScaler, nor another backward pass "
            "before zero_grad(), with set_to_none=True. Leave that out, or overlap_forward"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)})"
