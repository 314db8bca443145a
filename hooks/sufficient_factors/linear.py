"""Linear layers whose weight's gradient is left as its factors."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..comm.untraced import untraced
from .layer import Call, Factors, Layer


class Owner(Protocol):
    """Takes the factors of its layers' gradients."""

    def call(self, layer: Layer) -> Call: ...
    def take(self, layer: Layer, call: Call, factors: Factors) -> bool: ...


#: The layers that have owners. Copies of a module, and pickled ones, have none, and compute as `nn.Linear`.
owners: weakref.WeakKeyDictionary[nn.Module, tuple[Layer, Owner]] = weakref.WeakKeyDictionary()


class FactorLinear(nn.Linear):
    """`nn.Linear`, whose weight's gradient travels as factors while `SufficientFactors` takes them."""

    @untraced
    def forward(self, input: Tensor) -> Tensor:
        """Of [..., in]; returns [..., out]."""
        if (found := owners.get(self)) is None or not torch.is_grad_enabled():
            return super().forward(input)
        layer, owner = found
        if self.weight is not layer.weight:
            raise RuntimeError(
                f"{layer.name!r} is another tensor than SufficientFactors was made for, and nobody would exchange its "
                "gradient: close() it before the weight is replaced, and make another one afterwards"
            )
        if not self.weight.requires_grad:
            return super().forward(input)
        result: Tensor = _Linear.apply(input, self.weight, self.bias, layer, owner, owner.call(layer))
        return result


class _Linear(torch.autograd.Function):
    """`F.linear`; backward hands the factors of the weight's gradient to their owner."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, owner: Owner, call: Call
    ) -> Tensor:
        ctx.layer, ctx.owner, ctx.call, kind = layer, owner, call, input.device.type
        x, w, b = input, weight, bias
        if torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
            to = torch.get_autocast_dtype(kind)
            x, w, b = input.to(to), weight.to(to), None if bias is None else bias.to(to)
        ctx.save_for_backward(x, w)
        ctx.dtypes = input.dtype, None if bias is None else bias.dtype
        with torch.autocast(kind, enabled=False):
            return F.linear(x, w, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        of_input, of_bias = None, None
        if ctx.needs_input_grad[0]:
            of_input = (grad @ w).to(ctx.dtypes[0])
        factors = Factors(x.detach().reshape(-1, x.shape[-1]), grad.detach().reshape(-1, grad.shape[-1]))
        if ctx.needs_input_grad[2]:
            of_bias = factors.dy.sum(0).to(ctx.dtypes[1])
        of_weight = None
        wanted = _wanted(ctx.layer.weight)
        if wanted is None or (wanted and not ctx.owner.take(ctx.layer, ctx.call, factors)):
            of_weight = factors.product().to(ctx.layer.weight.dtype)
        return of_input, of_weight, of_bias, None, None, None


def _wanted(weight: Tensor) -> bool | None:
    """True if this pass adds to `weight.grad`, False if it does not, None if `torch.autograd.grad` returns the
    gradient."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:
        return None
