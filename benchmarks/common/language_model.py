"""A small language model and its data, for benchmarks that need something real to learn.

The text is the Python standard library's own source, which every machine that runs this has: nothing is downloaded.
The model predicts its next byte.
"""

from __future__ import annotations

import hashlib
import math
import os
import site
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Left out: what is installed beside the standard library, what some systems strip from it, and tables of numbers.
SKIPPED = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
        "encodings",
        "pydoc_data",
    }
)
#: One file in this many is kept for validation.
VALIDATION_SHARE = 10
VOCABULARY = 256


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, split by file: no file lends its words to both sides.

    Attributes:
        train, validation: flat uint8, files end to end in the order of their names.
        train_files, validation_files: their names, relative to the root, with forward slashes.
        digest: the first 16 hex digits of a SHA-256 over names and contents; equal digests mean equal data.
    """

    train: Tensor
    validation: Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    digest: str


def standard_library(root: str | Path | None = None) -> Corpus:
    """The `.py` files below `root`, by default the directory of the Python standard library.

    A file's side depends on its name alone, so adding a file moves no other.

    Raises:
        ValueError: either side would be empty.
    """
    root = Path(os.__file__).parent if root is None else Path(root)
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    names: tuple[list[str], list[str]] = ([], [])
    digest = hashlib.sha256()
    for name in sorted(source_files(root)):
        text = (root / name).read_bytes()
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
        held_out = hashlib.sha256(name.encode()).digest()[0] % VALIDATION_SHARE == 0
        sides[held_out].append(text)
        names[held_out].append(name)
    train, validation = (b"".join(side) for side in sides)
    if not train or not validation:
        raise ValueError(
            f"{root} has {len(names[0])} Python files to train on and {len(names[1])} to validate on: "
            "pass a directory with more source text"
        )
    return Corpus(as_bytes(train), as_bytes(validation), tuple(names[0]), tuple(names[1]), digest.hexdigest()[:16])


def installed_source(roots: Sequence[str | Path] = ()) -> Corpus:
    """The `.py` files below `roots`, by default of the standard library and of all packages installed beside it, which
    are hundreds of megabytes where torch is: each content once, without the shortest and the longest files. The hash of
    a content decides its side; one in twenty is for validation."""
    names = {
        os.path.realpath(path)
        for root in roots or (Path(os.__file__).parent, *site.getsitepackages())
        for path in Path(root).rglob("*.py")
    }
    sides: tuple[dict[bytes, str], dict[bytes, str]] = ({}, {})
    for name in sorted(filter(os.path.isfile, names)):
        text = Path(name).read_bytes()
        if 200 < len(text) < 400_000:
            held_out = hashlib.sha256(text).digest()[0] % (2 * VALIDATION_SHARE) == 0
            sides[held_out].setdefault(text, name)
    train, validation = map(b"\0".join, sides)
    train_files, validation_files = (tuple(side.values()) for side in sides)
    digest = hashlib.sha256(train + validation).hexdigest()[:16]
    return Corpus(as_bytes(train), as_bytes(validation), train_files, validation_files, digest)


def text_file(path: str | Path) -> Corpus:
    """Any file's bytes; the last twentieth is for validation.

    Raises:
        ValueError: there is no such file, or it has fewer than 100,000 bytes.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected a file to learn from") from error
    if len(text) < 100_000:
        raise ValueError(f"{path} has {len(text)} bytes: expected 100,000 or more to learn from")
    end, name = len(text) - len(text) // (2 * VALIDATION_SHARE), (str(path),)
    return Corpus(as_bytes(text[:end]), as_bytes(text[end:]), name, name, hashlib.sha256(text).hexdigest()[:16])


def source_files(root: Path) -> Iterator[str]:
    """The `.py` files below `root`, relative to it."""
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIPPED and not f.startswith(("config-", "."))]
        yield from ((Path(folder) / f).relative_to(root).as_posix() for f in files if f.endswith(".py"))


def as_bytes(text: bytes) -> Tensor:
    """`text` as a flat uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [len(starts), context] each: a target is the byte after its input.

    Raises:
        ValueError: `text` is shorter than one window.
    """
    if len(text) <= context:
        raise ValueError(f"a text of {len(text)} bytes has no window of {context + 1}: shorten the context")
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def validation_starts(text: Tensor, count: int, context: int) -> Tensor:
    """Starts of `count` windows that lie evenly over `text`: the same in every run."""
    return torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each behind a normalization and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention(norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = rotate(norm(query), angles), rotate(norm(key), angles)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.relu(self.widen(norm(x))).square())


class ByteModel(nn.Module, ABC):
    """A transformer over bytes: their values as int64 [batch, length] in, logits [batch, length, 256] out.

    Attributes:
        autocast: matrix products take bfloat16 (`torch.autocast`); parameters, gradients and logits are float32.
    """

    autocast = False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.autocast:
            return self.logits(inputs)
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return self.logits(inputs).float()

    @abstractmethod
    def logits(self, inputs: Tensor) -> Tensor: ...


class LanguageModel(ByteModel):
    """A byte model that learns fast: rotary positions (Su et al. 2021), normalized queries and keys, and squared ReLU
    (So et al. 2021).

    Normalizations without gain and layers without bias: every parameter is a matrix.
    """

    angles: Tensor

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        half = width // heads // 2
        frequencies = 10000 ** -(torch.arange(half) / half)
        self.register_buffer("angles", torch.arange(context)[:, None] * frequencies, persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("merge.weight", "narrow.weight", "head.weight")):
                nn.init.zeros_(parameter)  # each block begins as the identity, and every byte as likely
            elif not name.startswith("embedding"):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def logits(self, inputs: Tensor) -> Tensor:
        x, angles = norm(self.embedding(inputs)), self.angles[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x, angles)
        return cast(Tensor, self.head(norm(x)))


class GPT2Block(nn.Module):
    """As `Block`, with LayerNorm, GELU, and queries and keys as they are."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.widen(self.between(x))))


class GPT2(ByteModel):
    """A byte model that begins as GPT-2 (Radford et al. 2019): positions are learned; matrices are normal of 0.02, and
    those that end a block divided by √(2 · layers). Attention is nearly uniform at first: training has to leave that
    plateau.

    Args:
        words: of another vocabulary than bytes; the head is the embedding then, as GPT-2's.
    """

    def __init__(
        self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 64, words: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPT2Block(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if words != VOCABULARY:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                ends = name.endswith(("merge.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ends else 0.02)

    def logits(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.last(x)))


def norm(x: Tensor) -> Tensor:
    """Divided by the root mean square of the last dimension."""
    return F.rms_norm(x, x.shape[-1:])


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of elements, half the last dimension apart, turned by their angle."""
    (first, second), cosine, sine = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def warm_up_and_decay(step: int, steps: int, highest: float, warmup: float) -> float:
    """The learning rate of a step, counted from 0: it rises for a share of the steps, then a cosine falls to 0."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return highest * (step + 1) / rise
    return highest * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def update(optimizers: Sequence[torch.optim.Optimizer], rate: float, clip: float) -> None:
    """Clip the norm of all gradients together, step, and forget them."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    nn.utils.clip_grad_norm_([parameter for group in groups for parameter in group["params"]], clip)
    for group in groups:
        group["lr"] = rate
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def total_loss(model: nn.Module, inputs: Tensor, targets: Tensor, at_once: int = 32) -> float:
    """The summed loss in nats over all targets, `at_once` windows at a time."""
    model.eval()
    loss = sum(
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        for x, y in zip(inputs.split(at_once), targets.split(at_once), strict=True)
    )
    model.train()
    return float(loss)


def bits_per_byte(nats: float, count: int) -> float:
    """A summed loss in nats over `count` bytes, as bits for each of them."""
    return nats / count / math.log(2)
