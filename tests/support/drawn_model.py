"""The model that drawn scripts train, and what happens to its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from drawn import Parameter
from torch import Tensor, nn


class Tables(nn.Embedding):
    """Where DDP expects gradients of rows."""

    def __init__(self) -> None:
        super().__init__(1, 1, sparse=True)
        del self.weight


class Linear(nn.Module):
    """The sum of every used parameter times data, whose gradients are the data, in reverse order."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        self.twins, self.tables = nn.Module(), Tables()
        generator = torch.Generator().manual_seed(7)
        for index, drawn in enumerate(parameters):
            value = torch.randn(drawn.shape, generator=generator).to(drawn.dtype)
            if drawn.channels_last:
                value = value.to(memory_format=torch.channels_last)
            parameter = nn.Parameter(value, requires_grad=drawn.use != "frozen")
            (self.tables if drawn.sparse else self).register_parameter(f"p{index}", parameter)
            if drawn.use == "tied":
                self.twins.register_parameter(f"p{index}", parameter)

    def forward(self, data: list[list[Tensor]]) -> Tensor:
        """`data`: for each parameter what it is multiplied with, once for each place where it is used; rows of a sparse
        one."""
        places = [(f"p{index}", factors) for index, factors in enumerate(data)]
        terms = [
            term((self.twins if twin else self.tables if factor.is_sparse else self).get_parameter(name), factor)
            for name, factors in places
            for twin, factor in enumerate(factors)
        ]
        return torch.stack(terms).sum()


def term(parameter: Tensor, factor: Tensor) -> Tensor:
    if not factor.is_sparse:
        return (parameter * factor).sum().float()
    rows = nn.functional.embedding(factor._indices()[0], parameter, sparse=True)
    return (rows * factor._values()).sum().float()


def factor_of(drawn: Parameter, number: int, generator: torch.Generator) -> Tensor:
    """The factor of a parameter, which is its gradient: of a sparse one rows, some of them twice."""
    if not drawn.sparse:
        return torch.randn(drawn.shape, generator=generator).to(drawn.dtype)
    among = max(1, drawn.shape[0] // (1 + 9 * (number % 2)))  # in every other pass most rows
    rows = torch.randint(among, (1, 4 + among // 2), generator=generator)
    values = torch.randn(rows.shape[1], *drawn.shape[1:], generator=generator).to(drawn.dtype)
    return torch.sparse_coo_tensor(rows, values, drawn.shape, check_invariants=True)


def wide(gradient: Tensor) -> Tensor:
    """In float64, dense."""
    return (gradient.to_dense() if gradient.is_sparse else gradient).double()


class Drawn(RuntimeError):
    """What a drawn backward pass raises."""


class Recorder(torch.optim.SGD):
    """Stochastic gradient descent that adds up what it applies."""

    def __init__(self, parameters: Mapping[str, Tensor], received: dict[str, Tensor], momentum: float = 0.0) -> None:
        super().__init__(list(parameters.values()), lr=2**-10)
        # For checks alone: ranks that leave `join` early would make other momenta.
        self.param_groups[0]["betas"] = momentum, 0.0
        self.named, self.received, self.steps = parameters, received, 0

    def step(self, closure: Any = None) -> Any:
        for name, parameter in self.named.items():
            if parameter.grad is not None:
                self.received[name] += wide(parameter.grad)
        self.steps += 1
        return super().step(closure)


def infinite(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    values = gradient._values() if gradient.is_sparse else gradient
    values.view(-1)[values.numel() // 2 :] = float("inf")
    return gradient


def fail(gradient: Tensor) -> None:
    raise Drawn("as drawn")
