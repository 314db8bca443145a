"""A parameter whose update is due takes it before anything reads or writes its elements."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradwire.hooks.training.awaited_parameter import AwaitedParameter, awaited_class, release
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


def replaced(x: Tensor, weight: Tensor) -> Tensor:
    weight.data = weight.data * 2
    return weight.detach()


#: Uses of a parameter; the results depend on its elements.
WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": F.linear,
    "operator": lambda x, weight: x @ weight,
    "keyword": lambda x, weight: F.linear(input=x, weight=weight),
    "list": lambda x, weight: torch.cat([x, weight]),
    "index": lambda x, weight: x + weight[0],
    "in place": lambda x, weight: x.clone().add_(weight.sum()),
    "data": lambda x, weight: x * weight.data.norm(),
    "function": Product.apply,
    "checkpoint": lambda x, weight: checkpoint(F.linear, x, weight, use_reentrant=False),
    "numpy": lambda x, weight: float(weight.detach().numpy().sum()),
    "item": lambda x, weight: weight.tolist(),
    "operation": torch.ops.aten.mm,
    "overload": torch.ops.aten.mm.default,
    "einsum": lambda x, weight: torch.einsum("ij,jk->ik", x, weight),
    "foreach": lambda x, weight: torch._foreach_add([x], [weight])[0],
    "dictionary": lambda x, weight: torch.func.functional_call(nn.Linear(4, 4, bias=False), {"weight": weight}, x),
    "vmap": torch.func.vmap(torch.matmul, in_dims=(0, None)),
    "recurrent": lambda x, weight: torch._VF.rnn_tanh_cell(x, x, weight, torch.ones(4, 4)),
    "write": lambda x, weight: weight.detach().clamp_(0.5, 1.5).clone(),
    "replace": replaced,
    "flat": lambda x, weight: nn.utils.parameters_to_vector([weight]),
    "deepcopy": lambda x, weight: copy.deepcopy(weight),
    "pickle": lambda x, weight: pickle.loads(pickle.dumps(weight)),
    "repr": lambda x, weight: repr(weight),
    "compiled": lambda *both: torch.compile(torch.mm, backend="eager")(*both),  # noqa: PLW0108 - which takes seconds
}


class Special(nn.Parameter):
    """A class of a script's own."""


@pytest.mark.parametrize(
    ("how", "base"),
    [*((how, nn.Parameter) for how in WAYS), ("linear", Special), ("deepcopy", Special), ("pickle", Special)],
)
def test_a_use_takes_the_update_first(how: str, base: type[nn.Parameter]) -> None:
    calls = list[Any]()

    def update(parameters: list[Tensor]) -> None:
        assert parameters == [awaited]
        release(awaited)
        awaited.detach().mul_(3)
        calls.append(parameters)

    torch.manual_seed(0)
    x = torch.randn(4, 4)
    awaited, plain = base(torch.eye(4)), base(torch.eye(4) * 3)
    awaited.__class__ = awaited_class(base, update)  # type: ignore[assignment]
    assert isinstance(awaited, nn.Parameter)
    assert awaited.shape == (4, 4)
    assert awaited.size(0) == awaited.dim() * 2
    awaited.grad = None
    assert awaited.grad is None
    assert awaited._version == 0
    assert not calls  # as these say nothing of the elements
    found, wanted = WAYS[how](x, awaited), WAYS[how](x, plain)
    assert torch.equal(found, wanted) if isinstance(found, Tensor) else found == wanted
    assert type(found) is type(wanted)
    assert torch.equal(awaited, plain)
    assert len(calls) == 1
    assert type(awaited) is base
    assert not isinstance(awaited, AwaitedParameter)
