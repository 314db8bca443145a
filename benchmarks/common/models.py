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
