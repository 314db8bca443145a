"""Parameters that modules read in a forward pass are found, whoever owns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gradwire.hooks.training.parameter_reads import Reads, ReadsRecorder
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Borrows(nn.Module):
    """Calls `inner`, and reads `owner`'s weight by `how`, in its own forward pass or in that of the root."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.owner, self.inner = how, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.inner(x), self.owner.weight)


class Root(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.borrows, self.last = Borrows(how), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.last.weight.shape == (4, 4)  # says nothing of the elements
        assert self.last.weight.size(0) == self.last.weight.dim() * 2
        return self.last(self.borrows(x))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


def recorded(root: nn.Module, x: Tensor) -> Reads:
    recorder = ReadsRecorder(root, list(root.parameters()))
    recorder.begin()
    try:
        root(x)
    finally:
        reads = recorder.end()
    return reads


def penalised(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        return x * weight.data.norm()


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "operator": lambda x, weight: x @ weight,
    "method": lambda x, weight: weight.matmul(x.T).T,
    "keyword": lambda x, weight: F.linear(input=x, weight=weight),
    "list": lambda x, weight: torch.cat([x, weight]),
    "index": lambda x, weight: x + weight[0],
    "in place": lambda x, weight: x.clone().add_(weight.sum()),
    "no_grad": penalised,
    "function": Product.apply,
    "checkpoint": lambda x, weight: checkpoint(F.linear, x, weight, use_reentrant=False),
    "numpy": lambda x, weight: x * float(weight.detach().numpy().sum()),
    "type": lambda x, weight: (x.double() @ weight.type(torch.float64)).float(),
    "operation": torch.ops.aten.mm,
    "overload": torch.ops.aten.mm.default,
    "einsum": lambda x, weight: torch.einsum("ij,jk->ik", x, weight),
}


@pytest.mark.parametrize("how", WAYS)
def test_a_read_of_another_s_parameter_is_the_reader_s(how: str) -> None:
    root = Root(WAYS[how])
    reads = recorded(root, torch.randn(4, 4))
    owner, inner, last = root.borrows.owner, root.borrows.inner, root.last
    assert reads.of(root.borrows) == {owner.weight}
    assert reads.of(inner) == {inner.weight, inner.bias}
    assert reads.of(last) == {last.weight, last.bias}
    assert reads.of(root) == {owner.bias}  # which nobody has read
    assert reads.of(owner) is None


def test_what_does_not_train_is_not_known() -> None:
    root: Any = nn.Sequential(Root(F.linear), nn.Dropout())
    reads = recorded(root, torch.randn(4, 4))
    borrows, dropout = root[0].borrows, root[1]
    root.eval()
    assert reads.of(borrows) is None
    assert reads.of(dropout) == set()  # which has nothing to read
    root.train()
    assert reads.of(borrows) == {borrows.owner.weight}
    with torch.no_grad():
        assert reads.of(borrows) is None
    assert reads.of(nn.Linear(2, 2)) is None


def test_a_pass_that_raises_leaves_nothing_behind() -> None:
    root = Root(lambda x, weight: x / 0 + 1 // 0)
    with pytest.raises(ZeroDivisionError):
        recorded(root, torch.randn(4, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in root.modules())
    assert torch._C._len_torch_function_stack() == 0
