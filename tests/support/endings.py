"""Short trainings, one after the other, that end in every way: what a rank needs of the others comes, or it is told."""

from __future__ import annotations

import functools
import gc
import hashlib
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import gradwire.hooks.horovod as hvd
import torch
import torch.distributed as dist
from gradwire import (
    QSGD,
    CompressState,
    LocalUpdates,
    OneBit,
    SufficientFactors,
    TopK,
    compress_fsdp,
    compress_hook,
    overlap_forward,
    sparse_all_reduce,
)
from gradwire.optim import DistributedLion, OneBitAdam
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

#: Weights of a mebibyte each, so that each is a bucket.
LAYERS, WIDTH = 5, 512
EXCHANGES = {
    "onebit": ("gather", "two_pass", "auto"),
    "qsgd": ("gather", "two_pass"),
    "topk": ("gather", "mask", "union", "split"),
}
CODECS = {"onebit": OneBit(), "qsgd": QSGD(4), "topk": TopK(0.02)}
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
    front, codec = rng.choice(sorted(FRONTS)), rng.choice(sorted(CODECS))
    steps = rng.randint(1, 4)
    late = (rng.randrange(ranks), rng.randrange(steps), rng.choice((0.0, 0.01, 0.05)))
    end = rng.choice(ENDS)
    if end == "raised" and front in (
        "scatter",
        "horovod",
        "sparse",
    ):  # there others wait in collectives of FSDP's
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


#: What a front gives: the model to call, what comes after each backward, and how to close it.
Made = tuple[nn.Module, Callable[[], object], Callable[[], object]]


def _ddp(net: Net, training: Training) -> Made:
    model = DistributedDataParallel(net, bucket_cap_mb=1)
    options: dict[str, Any] = {"exchange": training.exchange, "fallback": None, "entropy_coding": training.coded}
    state = CompressState(model, CODECS[training.codec], **options)
    model.register_comm_hook(state, compress_hook)
    return model, torch.optim.SGD(net.parameters(), lr=0.01).step, state.close


def _overlap(net: Net, training: Training) -> Made:
    model, step, close = _ddp(net, training)
    optimizer: Any = step.__self__  # type: ignore[attr-defined]
    overlap = overlap_forward(model, optimizer)
    return model, optimizer.step, overlap.close if training.layer % 2 else close


@functools.cache
def _replicas(group: dist.ProcessGroup) -> DeviceMesh:
    """Replicas of one rank each. Torch keeps the groups of a mesh."""
    return init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("replicate", "shard"))


def _fsdp(net: Net, training: Training) -> Made:
    group: Any = dist.group.WORLD
    mesh = _replicas(group)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    options: dict[str, Any] = {"exchange": training.exchange, "fallback": None, "entropy_coding": training.coded}
    state = compress_fsdp(net, CODECS[training.codec], mesh=mesh["replicate"], **options)
    return net, torch.optim.SGD(net.parameters(), lr=0.01).step, state.close


def _scatter(net: Net, training: Training) -> Made:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    state = compress_fsdp(net, CODECS[training.codec], entropy_coding=training.coded)
    return net, torch.optim.SGD(net.parameters(), lr=0.01).step, state.close


def _local(net: Net, training: Training) -> Made:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    options: dict[str, Any] = {"exchange": training.exchange, "entropy_coding": training.coded}
    updates = LocalUpdates(net, optimizer, CODECS[training.codec], every=1, **options)

    def after() -> None:
        optimizer.step()
        updates.step()

    return net, after, updates.close


def _adam(net: Net, training: Training) -> Made:
    optimizer = OneBitAdam(net.parameters(), lr=0.01, warmup_steps=1)
    return net, optimizer.step, optimizer.close


def _lion(net: Net, training: Training) -> Made:
    optimizer = DistributedLion(net.parameters(), lr=0.01)
    return net, optimizer.step, optimizer.close


def _factors(net: Net, training: Training) -> Made:
    factors = SufficientFactors(net, ["layers.*"])
    return DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.01).step, factors.close


def _horovod(net: Net, training: Training) -> Made:
    hvd.init()
    compression = hvd.Compression.codec(CODECS[training.codec], entropy_coding=training.coded)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters(), compression=compression
    )
    return net, optimizer.step, hvd.shutdown


def _sparse(net: Net, training: Training) -> Made:
    parameters = list(net.parameters())

    def after() -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            grad = parameter.grad.flatten()
            indices = (grad > grad.mean()).nonzero().view(-1)
            algorithm: Any = training.exchange if training.exchange in ("gather", "union", "split") else "dense"
            mean = sparse_all_reduce(
                indices, grad[indices], grad.numel(), algorithm=algorithm, out=torch.empty_like(grad)
            )
            with torch.no_grad():
                parameter.sub_(0.01 * mean.view_as(parameter))

    return net, after, lambda: None


FRONTS = {
    "ddp": _ddp, "overlap": _overlap, "fsdp": _fsdp, "scatter": _scatter, "local": _local, "adam": _adam, "lion": _lion,
    "horovod": _horovod, "sparse": _sparse, "factors": _factors,
}  # fmt: skip


def train(training: Training, rank: int, kept: list[object]) -> str:
    """What came of it: a digest of the weights, or how an error was heard of."""
    net = Net()
    model, after, close = FRONTS[training.front](net, training)
    for step in range(training.steps):
        if training.late[:2] == (rank, step):
            time.sleep(training.late[2])
        raises = training.end == "raised" and step == training.steps - 1
        net.raises = training.layer if raises and rank == training.victim else -1
        began = time.monotonic()
        try:
            net.zero_grad()
            model(torch.randn(4, WIDTH)).square().mean().backward()
            after()
        except Stopped:
            return "raised"
        except RuntimeError as error:
            if not raises:
                raise
            took = time.monotonic() - began
            return "raised" if took < SECONDS else f"heard of it after {took:.0f} s: {error}"
    if training.end == "raised":
        return "raised"  # nothing of that step was owed any more
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]
    digest = hashlib.blake2b(b"".join(w.detach().numpy().tobytes() for w in weights), digest_size=8).hexdigest()
    if training.end == "closed":
        close()
    elif training.end == "kept":
        kept.append((model, after))
    return "sharded" if training.front == "scatter" else digest


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
