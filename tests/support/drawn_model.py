"""The model that drawn scripts train, and what happens to its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from drawn import Parameter
from torch import Tensor, nn


class Linear(nn.Module):
    """The sum of every used parameter times data, whose gradients are the data, in reverse order."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        self.twins = nn.Module()
        generator = torch.Generator().manual_seed(7)
        for index, drawn in enumerate(parameters):
            value = torch.randn(drawn.shape, generator=generator).to(drawn.dtype)
            if drawn.channels_last:
                value = value.to(memory_format=torch.channels_last)
            parameter = nn.Parameter(value, requires_grad=drawn.use != "frozen")
            self.register_parameter(f"p{index}", parameter)
            if drawn.use == "tied":
                self.twins.register_parameter(f"p{index}", parameter)

    def forward(self, data: list[list[Tensor]]) -> Tensor:
        """`data`: for each parameter what it is multiplied with, once for each place where it is used."""
        places = [(f"p{index}", factors) for index, factors in enumerate(data)]
        terms = [
            ((self.twins if twin else self).get_parameter(name) * factor).sum().float()
            for name, factors in places
            for twin, factor in enumerate(factors)
        ]
        return torch.stack(terms).sum()


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
                self.received[name] += parameter.grad.double()
        self.steps += 1
        return super().step(closure)


def with_scale(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    scaler.scale(torch.zeros(()))  # only now it has one that can be changed
    return scaler


def infinite(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient.view(-1)[gradient.numel() // 2 :] = float("inf")
    return gradient


def fail(gradient: Tensor) -> None:
    raise Drawn("as drawn")
