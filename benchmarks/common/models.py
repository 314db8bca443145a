"""Models to time: linear layers, and those that come along for `gradwire-bench advise`.

For that, a model is a function without arguments that returns a model and a function from it to a loss on an example
batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .language_model import VOCABULARY, LanguageModel

Built = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def linear_layers(width: int, layers: int) -> nn.Module:
    """Square linear layers with ReLU between them."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def perceptron(width: int, layers: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, the same on every rank, and this rank's input and target."""
    torch.manual_seed(0)
    model = linear_layers(width, layers)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x, y = (torch.randn(batch, width, generator=generator) for _ in range(2))
    return model, x, y


def linear() -> Built:
    """`gradwire-bench step`'s: six linear layers, 25 million parameters, batch 8."""
    x, y = torch.randn(8, 2048), torch.randn(8, 2048)
    return linear_layers(2048, 6), lambda model: F.mse_loss(model(x), y)


def small() -> Built:
    """Eight linear layers, two million parameters, batch 8: little besides what it has to tell."""
    x, y = torch.randn(8, 512), torch.randn(8, 512)
    return linear_layers(512, 8), lambda model: F.mse_loss(model(x), y)


def language() -> Built:
    """The demo's: a byte-level transformer of 0.85 million parameters, batch 16."""
    model = LanguageModel()
    text = torch.randint(VOCABULARY, (16, 65))
    return model, lambda model: F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
