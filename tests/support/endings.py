"""Short trainings, one after the other, that end in every way: what a rank needs of the others comes, or it is told."""

from __future__ import annotations

import gc
import random
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from fronts import FRONTS, Front, sgd
from gradwire import QSGD, OneBit, TopK, sparse_all_reduce
from torch import Tensor, nn
from training import digest

#: Weights of a mebibyte each, so that each is a bucket.
LAYERS, WIDTH = 5, 512
EXCHANGES = {
    "onebit": ("gather", "two_pass", "auto"),
    "qsgd": ("gather", "two_pass"),
    "topk": ("gather", "mask", "union", "split"),
}
CODECS = {"onebit": OneBit(), "qsgd": QSGD(4), "topk": TopK(0.02)}
NAMES = sorted([*FRONTS, "sparse"])
#: How ranks leave a training; in "raised" one of them does within its last backward pass.
ENDS = ("collected", "closed", "kept", "raised")
#: Within how many seconds a rank hears that another has raised.
SECONDS = 20.0


class Stopped(Exception):
    """Raised within backward."""


@dataclass(frozen=True)
class Training:
    """What is drawn, alike on all ranks."""

    front: str
    codec: str
    exchange: Any
    steps: int
    end: str
    #: Who raises, and in which layer's backward.
    victim: int
    layer: int
    #: Who begins which step late, and by how many seconds.
    late: tuple[int, int, float]
    #: Messages go through an entropy coder, on the fronts that have one.
    coded: bool


def draw(rng: random.Random, ranks: int) -> Training:
    front, codec = rng.choice(NAMES), rng.choice(sorted(CODECS))
    steps = rng.randint(1, 4)
    late = (rng.randrange(ranks), rng.randrange(steps), rng.choice((0.0, 0.01, 0.05)))
    end = rng.choice(ENDS)
    if end == "raised" and front in ("shards", "horovod", "sparse"):  # there others wait in collectives of FSDP's
        end = "collected"
    places = (rng.randrange(ranks), rng.randrange(LAYERS))
    return Training(front, codec, rng.choice(EXCHANGES[codec]), steps, end, *places, late, rng.random() < 0.5)


class Net(nn.Module):
    """Layers of one size; `raises` is the one whose backward raises."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers, self.raises = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), -1

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == self.raises:
                x.register_hook(_raise)
        return x


def _raise(grad: Tensor) -> None:
    raise Stopped


def sparse(net: Any, training: Training) -> Front:
    """Gradients of which each step reduces those above the mean."""

    def average(*_: Any) -> None:
        for parameter in net.parameters():
            grad = parameter.grad.flatten()
            indices = (grad > grad.mean()).nonzero().view(-1)
            algorithm: Any = training.exchange if training.exchange in ("gather", "union", "split") else "dense"
            mean = sparse_all_reduce(
                indices, grad[indices], grad.numel(), algorithm=algorithm, out=torch.empty_like(grad)
            )
            parameter.grad.copy_(mean.view_as(parameter))

    optimizer = sgd(net.parameters())
    optimizer.register_step_pre_hook(average)
    return Front(net, net, None, optimizer, int)


def made(net: Net, training: Training) -> Front:
    if training.front == "sparse":
        return sparse(net, training)
    options: dict[str, Any] = {}
    if training.front not in ("adam", "lion", "factors"):
        options["entropy_coding"] = training.coded
    if training.front in ("ddp", "overlap", "replicas", "local"):
        options["exchange"] = training.exchange
    if training.front in ("ddp", "overlap"):
        options["ddp"] = {"bucket_cap_mb": 1}
    return FRONTS[training.front](net, CODECS[training.codec], **options)


def train(training: Training, rank: int, kept: list[object]) -> str:
    """What came of it: a digest of the weights, or how an error was heard of."""
    net = Net()
    front = made(net, training)
    for step in range(training.steps):
        if training.late[:2] == (rank, step):
            time.sleep(training.late[2])
        raises = training.end == "raised" and step == training.steps - 1
        net.raises = training.layer if raises and rank == training.victim else -1
        began = time.monotonic()
        try:
            front.step(torch.randn(4, WIDTH))
        except Stopped:
            return "raised"
        except RuntimeError as error:
            if not raises:
                raise
            took = time.monotonic() - began
            return "raised" if took < SECONDS else f"heard of it after {took:.0f} s: {error}"
    if training.end == "raised":
        return "raised"  # nothing of that step was owed any more
    found = digest(front.parameters())
    if training.end == "closed":
        front.close()
    elif training.end == "kept":
        kept.append(front)
    return "sharded" if training.front == "shards" else found


def many(seed: int, seconds: float, runs: int = 1 << 30, front: str | None = None) -> list[tuple[str, str]]:
    """Train again and again, for so long or so often; then leave at once, whatever the others still do.

    Returns:
        What was drawn, and what came of it.
    """
    torch.set_num_threads(1)
    rank, ranks, rng, found = dist.get_rank(), dist.get_world_size(), random.Random(seed), list[tuple[str, str]]()
    kept: list[object] = []
    end = time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while len(found) < runs:
            late = torch.tensor(float(time.monotonic() > end))
            dist.all_reduce(late)  # they stop alike
            if late:
                break
            training = draw(rng, ranks)
            if front is not None:
                training = Training(**{**asdict(training), "front": front})
            print(f"{rank} {training}", flush=True)
            found.append((str(training), train(training, rank, kept)))
            if training.end == "raised":
                gc.collect()  # the exception held what it came through
            if rng.random() < 0.2:
                kept.clear()
    return found
