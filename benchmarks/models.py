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
    x, y = torch.randn(8, 2048), torch.randn(8, 2048)
    return step.linear_layers(2048, 6), lambda model: F.mse_loss(model(x), y)


def small() -> Built:
    """Eight linear layers, two million parameters, batch 8: little besides what it has to tell."""
    x, y = torch.randn(8, 512), torch.randn(8, 512)
    return step.linear_layers(512, 8), lambda model: F.mse_loss(model(x), y)


def language() -> Built:
    """The demo's: a byte-level transformer of 0.85 million parameters, batch 16."""
    model = LanguageModel()
    text = torch.randint(VOCABULARY, (16, 65))
    return model, lambda model: F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
