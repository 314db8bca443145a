"""Tasks of learning that need no download, the same in every arm.

A task's global batch does not depend on the number of ranks, so its float32 curve does not either, up to rounding.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.language_model import (
    GPT2,
    Corpus,
    LanguageModel,
    bits_per_byte,
    installed_source,
    standard_library,
    text_file,
    total_loss,
    update,
    validation_starts,
    warm_up_and_decay,
    windows,
)

Batch = tuple[Tensor, Tensor]
#: Share of the steps over which the learning rate rises.
WARM_UP = 0.1


@dataclass(frozen=True)
class Task(ABC):
    """Something to learn: a model, its data, and an optimizer under a warm-up and a cosine decay.

    Attributes:
        steps: optimizer steps of a whole run.
        batch: samples of all ranks together, in each step.
        learning_rates: for each optimizer, the one found for float32; reached at the end of the warm-up.
        bucket_mb: DDP's `bucket_cap_mb`, smaller for small models, so that they too have several buckets.
        margin: equal loss is within this share of what float32 ends at with the same seed.
        optimizer: "sgd", with a momentum of 0.9, or "adamw".
        clip: largest norm of the averaged gradient.
        beta, beta2, weight_decay: of AdamW.
    """

    loss_unit: ClassVar[str]

    name: str
    title: str
    steps: int
    batch: int
    learning_rates: Mapping[str, float]
    bucket_mb: float
    margin: float = 0.01
    optimizer: str = "sgd"
    clip: float = 1.0
    beta: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.01

    @property
    @abstractmethod
    def source(self) -> str:
        """The name of its data: losses on different data do not compare."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, from torch's global generator."""

    @abstractmethod
    def batches(self, seed: int, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's share of every global batch, without end."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> float: ...

    @abstractmethod
    def validation(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        """This rank's share of sums over the validation data: `loss` in the task's unit, `right`, `count`."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def loss_of(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(model(inputs), targets)

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), momentum=0.9)
        return torch.optim.AdamW(
            model.parameters(), betas=(self.beta, self.beta2), weight_decay=self.weight_decay, fused=True
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return warm_up_and_decay(step, self.steps, self.learning_rates[self.optimizer], WARM_UP)

    def train_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, batch: Batch) -> None:
        """Forward, backward, clip, update; `model` is DDP's."""
        inputs, targets = batch
        self.loss_of(model, inputs, targets).backward()
        update([optimizer], self.rate(step), self.clip)

    def share(self, world_size: int) -> int:
        """Samples of one rank in each step.

        Raises:
            ValueError: the global batch cannot be shared equally.
        """
        if self.batch % world_size:
            raise ValueError(f"{world_size} ranks cannot share {self.name}'s {self.batch} samples a step equally")
        return self.batch // world_size

    def describe(self) -> dict[str, Any]:
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"loss_unit": self.loss_unit, **options}


@dataclass(frozen=True)
class Text(Task):
    """A byte-level transformer on the standard library's source.

    Attributes:
        context: bytes that a sample has.
        gpt2: the model is GPT-2's, and not the one that learns fast.
        autocast: matrix products take bfloat16.
        packages: the text is the source of installed packages, too.
        text: path of a file that is the text instead.
    """

    loss_unit = "bits per byte"
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    gpt2: bool = False
    validation_windows: int = 128
    autocast: bool = False
    packages: bool = False
    text: str | None = None

    @cached_property
    def corpus(self) -> Corpus:
        if self.text is not None:
            return text_file(self.text)
        return installed_source() if self.packages else standard_library()

    @property
    def source(self) -> str:
        name = "installed packages" if self.packages else "standard library"
        return f"{name if self.text is None else Path(self.text).name} {self.corpus.digest}"

    def model(self) -> nn.Module:
        model = (GPT2 if self.gpt2 else LanguageModel)(self.width, self.layers, self.heads, self.context)
        model.autocast = self.autocast
        return model

    def batches(self, seed: int, rank: int, world_size: int) -> Iterator[Batch]:
        text, share = self.corpus.train, self.share(world_size)
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - self.context, (self.batch,), generator=generator)
            yield windows(text, starts[rank * share : (rank + 1) * share], self.context)

    @property
    def steps_per_epoch(self) -> float:
        return len(self.corpus.train) / (self.batch * self.context)

    def validation(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        text = self.corpus.validation
        starts = validation_starts(text, self.validation_windows, self.context)[rank::world_size]
        device = next(model.parameters()).device
        inputs, targets = (x.to(device) for x in windows(text, starts, self.context))
        return {"loss": bits_per_byte(total_loss(model, inputs, targets), 1), "count": targets.numel()}


@dataclass(frozen=True)
class Digits(Task):
    """A convolutional network on scikit-learn's 1797 handwritten digits (Alpaydin & Kaynak 1998), 8 × 8 pixels each;
    one in five is kept for validation."""

    loss_unit = "nats"

    @property
    def source(self) -> str:
        return "scikit-learn's digits"

    @cached_property
    def data(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Images [n, 1, 8, 8] and labels [n] to train on, and to validate on."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images, unseen, labels, answers = train_test_split(
            digits.images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
        )
        train, validation = (torch.from_numpy(x).float().unsqueeze(1) / 16 for x in (images, unseen))
        return train, torch.from_numpy(labels), validation, torch.from_numpy(answers)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def batches(self, seed: int, rank: int, world_size: int) -> Iterator[Batch]:
        images, labels, share = *self.data[:2], self.share(world_size)
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(images), generator=generator)
            for chosen in order.split(self.batch):
                if len(chosen) == self.batch:
                    mine = chosen[rank * share : (rank + 1) * share]
                    yield images[mine], labels[mine]

    @property
    def steps_per_epoch(self) -> float:
        return len(self.data[0]) // self.batch

    @torch.no_grad()
    def validation(self, model: nn.Module, rank: int, world_size: int) -> dict[str, float]:
        images, labels = (x[rank::world_size] for x in self.data[2:])
        model.eval()
        logits = model(images)
        model.train()
        right = float((logits.argmax(dim=1) == labels).sum())
        return {"loss": F.cross_entropy(logits, labels, reduction="sum").item(), "right": right, "count": len(labels)}


DIGITS = Digits(
    "digits",
    "convolutional network on handwritten digits, 0.15 M parameters",
    steps=220,
    batch=64,
    learning_rates={"sgd": 0.1, "adamw": 2e-3},
    bucket_mb=0.25,
    margin=0.1,  # of a loss near zero
)
SMALL = Text(
    "small",
    "byte-level transformer, 0.85 M parameters",
    steps=150,
    batch=8,
    learning_rates={"sgd": 0.3, "adamw": 2e-3, "muon": 4e-3},
    bucket_mb=1,
)
#: As transformers are often trained: GPT-2's model and initialisation, weight decay and β2, and batches of 16 KiB.
GPT2_SMALL = dataclasses.replace(
    SMALL,
    name="gpt2",
    title="GPT-2 over bytes, 0.89 M parameters",
    steps=250,
    batch=64,
    learning_rates={"adamw": 4e-3, "muon": 4e-3},
    context=256,
    gpt2=True,
    beta2=0.95,
    weight_decay=0.1,
)
#: The same on a core in a minute.
GPT2_TINY = dataclasses.replace(
    GPT2_SMALL,
    name="gpt2-tiny",
    title="GPT-2 over bytes, 0.14 M parameters",
    batch=256,
    context=64,
    width=64,
    layers=2,
    heads=2,
)
LARGE = Text(
    "large",
    "byte-level transformer, 10 M parameters",
    steps=100,
    batch=8,
    learning_rates={"sgd": 0.2, "adamw": 2e-3, "muon": 4e-3},
    bucket_mb=8,
    width=320,
    layers=8,
    heads=5,
    validation_windows=64,
)
LARGE_BFLOAT16 = dataclasses.replace(
    LARGE,
    name="large-bfloat16",
    title="byte-level transformer, 10 M parameters, products in bfloat16",
    validation_windows=128,
    autocast=True,
)
GPT2_LARGE = dataclasses.replace(
    GPT2_SMALL,
    name="gpt2-large",
    title="GPT-2 over bytes, 10 M parameters, products in bfloat16",
    learning_rates={"adamw": 2e-3, "muon": 2e-3},
    bucket_mb=8,
    width=320,
    layers=8,
    heads=5,
    autocast=True,
)
#: For one GPU: GPT-2's size, and more text than a run of 2000 steps reads.
GPT2_GPU = dataclasses.replace(
    GPT2_LARGE,
    name="gpt-116m",
    title="GPT-2 over bytes, 117 M parameters, products in bfloat16",
    steps=2000,
    batch=32,
    learning_rates={"adamw": 8e-4, "muon": 8e-4},
    bucket_mb=25,
    context=512,
    width=896,
    layers=12,
    heads=14,
    validation_windows=1024,
    packages=True,
)
TASKS: dict[str, Task] = {
    task.name: task for task in (DIGITS, SMALL, GPT2_SMALL, GPT2_TINY, GPT2_LARGE, GPT2_GPU, LARGE, LARGE_BFLOAT16)
}


def validate(task: Task, model: nn.Module) -> dict[str, float]:
    """Loss in the task's unit, and accuracy where it has one. A collective: every rank reads its share."""
    sums = task.validation(model, dist.get_rank(), dist.get_world_size())
    total = torch.tensor(list(sums.values()), dtype=torch.float64)
    dist.all_reduce(total)
    summed = dict(zip(sums, total.tolist(), strict=True))
    reading = {"loss": summed["loss"] / summed["count"]}
    return reading | ({"accuracy": summed["right"] / summed["count"]} if "right" in summed else {})


def require_equal_replicas(model: torch.nn.Module) -> None:
    """Raises RuntimeError on every rank unless all ranks hold the same weights, bit for bit. A collective."""
    mine = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    all_ranks: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, mine)
    if len(set(all_ranks)) > 1:
        raise RuntimeError(f"the ranks' models differ after training: SHA-256 of their weights {all_ranks}")
