"""Models to time: linear layers, those that come along, and a user's own.

For `gradwire-bench advise` a model is a function without arguments that returns a model and a function from it to a
loss on an example batch."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...compress.codec import DTYPES
from .language_model import GPT2, VOCABULARY, LanguageModel

Built = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def linear_layers(width: int, layers: int) -> nn.Module:
    """Square linear layers with ReLU between them."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def perceptron(width: int, layers: int, batch: int) -> Built:
    """Linear layers, the same on every rank, and their loss on this rank's batch."""
    torch.manual_seed(0)
    model = linear_layers(width, layers)
    seed_by_rank()
    x, y = torch.randn(batch, width), torch.randn(batch, width)
    return model, lambda model: F.mse_loss(model(x), y)


def seed_by_rank() -> None:
    """Let ranks draw different numbers from now on."""
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))


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


class Tables(nn.Module):
    """Ten tables of embeddings, a perceptron on what they look up, as in models that recommend (DLRM): almost all rows
    have no gradient in a step."""

    def __init__(self, tables: int = 10, rows: int = 100_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Of int64 [batch, tables]."""
        found = [table(x[:, i : i + 1]) for i, table in enumerate(self.tables)]
        result: Tensor = self.top(torch.cat(found, 1))
        return result


class Classifier(nn.Module):
    """A small body and a head of very many classes."""

    def __init__(self, classes: int = 50_000, width: int = 1024) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Of float32 [batch, 256]."""
        result: Tensor = self.head(self.body(x))
        return result


class Experts(nn.Module):
    """A mixture of perceptrons of which each sample takes one: those that no sample takes have no gradient."""

    def __init__(self, experts: int = 16, width: int = 256) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        made = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )
        self.experts = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        """Of float32 [batch, width]."""
        chances = self.router(x).softmax(1)
        chance, chosen = chances.max(1)
        out = 0.0 * x
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().view(-1)
            out = out.index_add(0, at, expert(x[at]) * chance[at, None])
        return out


class Bottleneck(nn.Module):
    """Convolutions of 1, 3 and 1, each with batch norm, beside a shortcut."""

    def __init__(self, width: int, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.narrow, self.first = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.middle, self.second = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.widen, self.third = nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Identity()
        if width != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(width, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.first(self.narrow(x)))
        out = F.relu(self.second(self.middle(out)))
        return F.relu(self.third(self.widen(out)) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """ResNet-50 (He et al. 2016), the stride in the middle convolution: 25.6 million parameters by default."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        modules, inputs = list[nn.Module](), width
        for stage, count in enumerate(blocks):
            inner = width << stage
            for block in range(count):
                modules.append(Bottleneck(inputs, inner, 4 * inner, 2 if stage and not block else 1))
                inputs = 4 * inner
        self.blocks, self.head = nn.Sequential(*modules), nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Of float32 [batch, 3, height, width]."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        result: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return result


def residual() -> Built:
    """ResNet-50 on 8 images of 224 x 224."""
    x, y = torch.randn(8, 3, 224, 224), torch.randint(1000, (8,))
    return ResidualNetwork(), lambda model: F.cross_entropy(model(x), y)


def transformer() -> Built:
    """25 million parameters on 8 texts of 128 bytes."""
    text = torch.randint(VOCABULARY, (8, 129))
    model = LanguageModel(width=512, layers=8, heads=8, context=128)
    return model, lambda model: F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def gpt2(batch: int = 4, context: int = 1024, words: int = 50_257, *size: int) -> Built:
    """GPT-2's, 124 million parameters in float32 under bf16 autocast, on 4 x 1024 tokens."""
    width, layers, heads = size or (768, 12, 12)
    model = GPT2(width, layers, heads, context, words)
    model.autocast = True
    seed_by_rank()
    text = torch.randint(words, (batch, context + 1))
    return model, lambda model: F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


#: Models that come along for `--model`, by their short names.
NAMED: dict[str, Callable[[], Built]] = {"gpt2": gpt2, "gpt2-tiny": partial(gpt2, 2, 32, 512, 64, 2, 2)}
NAMED |= {function.__name__: function for function in (linear, small, language)}


class ModelError(ValueError):
    """`--model` cannot be measured; says why and what to do."""


def load(name: str) -> Built:
    """The model that `--model` names, and its loss.

    Raises:
        ModelError: it is not there, or not what it should be.
    """
    if name in NAMED:
        torch.manual_seed(0)
        return NAMED[name]()
    module_name, _, attribute = name.partition(":")
    here = f"--model {name}"
    if not module_name or not attribute:
        raise ModelError(f"{here}: expected module:function, such as train:build, or one of {', '.join(NAMED)}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ModelError(f"{here}: importing {module_name} failed: {_last(error)}") from error
        raise ModelError(
            f"{here}: there is no module {error.name!r}: run this in the folder that holds it, or install it"
        ) from error
    except Exception as error:
        raise ModelError(f"{here}: importing {module_name} failed: {_last(error)}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        kind = "has no" if function is None else "has a value, not a function,"
        raise ModelError(f"{here}: module {module_name} {kind} {attribute!r}: write a function that builds the model")
    torch.manual_seed(0)
    try:
        built = function()
    except Exception as error:
        raise ModelError(f"{here}: {attribute}() failed: {_last(error)}") from error
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module) and callable(built[1])):
        found = f"({', '.join(type(b).__name__ for b in built)})" if isinstance(built, tuple) else type(built).__name__
        raise ModelError(
            f"{here}: {attribute}() returned {found}: expected a tuple (model, loss), where loss(model) runs the model "
            "on an example batch and returns a scalar"
        )
    _check(here, *built)
    return built


def _check(here: str, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """Raises ModelError unless a step of the model gives every parameter a gradient that can be exchanged."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ModelError(f"{here}: the model has no parameter that requires a gradient: there is nothing to exchange")
    devices = sorted({str(p.device) for p in trained.values()})
    if len(devices) > 1:
        raise ModelError(f"{here}: the model lies on {', '.join(devices)}: put all of it on one device")
    try:
        value = loss(model)
    except Exception as error:
        raise ModelError(f"{here}: loss(model) failed: {_last(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        if isinstance(value, Tensor) and value.numel() == 1:
            found = "a tensor without a gradient"
        raise ModelError(f"{here}: loss(model) returned {found}: expected a scalar to call backward() on")
    if not bool(torch.isfinite(value)):
        raise ModelError(f"{here}: loss(model) is {value.item()}: it must be finite; look at the batch and the weights")
    value.backward()
    for name, parameter in trained.items():
        if parameter.grad is None:
            raise ModelError(
                f"{here}: loss(model) does not use parameter {name!r}: set its requires_grad to False, or use it"
            )
        if parameter.grad.layout != torch.strided or parameter.dtype not in DTYPES:
            kind = "sparse" if parameter.grad.layout != torch.strided else str(parameter.dtype)
            raise ModelError(
                f"{here}: the gradient of {name!r} is {kind}: gradwire compresses dense floats of 16 or 32 bits"
            )
    model.zero_grad()


def _last(error: Exception) -> str:
    """An exception, and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
