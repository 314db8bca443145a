"""Models to try `gradwire-bench advise` with, and what one looks like: a function without arguments that returns a
model and a function from the model to a loss on an example batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import step
from .language_model import VOCABULARY, LanguageModel

Built = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def linear() -> Built:
    """`gradwire-bench step`'s: six linear layers, 25 million parameters, batch 8."""
    return perceptron(2048, 6, 8)


def perceptron(width: int, layers: int, batch: int) -> Built:
    """`gradwire-bench step`'s model, of any size."""
    x, y = torch.randn(batch, width), torch.randn(batch, width)
    return step.linear_layers(width, layers), lambda model: F.mse_loss(model(x), y)


def language() -> Built:
    """The demo's: a byte-level transformer of 0.9 million parameters, batch 16."""
    model = LanguageModel()
    text = torch.randint(VOCABULARY, (16, 65))
    return model, lambda model: F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
