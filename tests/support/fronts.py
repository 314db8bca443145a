"""The library's fronts, each as a model in training: a law of all of them is one test over `FRONTS`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gradwire.hooks.horovod as hvd
import pytest
import torch
import torch.distributed as dist
from fsdp_drawn import mesh_of
from gradwire import CompressState, LocalUpdates, SufficientFactors, compress_fsdp, compress_hook, overlap_forward
from gradwire.optim import DistributedLion, OneBitAdam
from lacking import needs_hook, needs_reduce_scatter
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import in_groups, wrap

#: `within`: what the library's part of a front is made in, an autograd mode for example.
ANYWHERE = contextlib.nullcontext()


@dataclass
class Front:
    """A model in training.

    Attributes:
        model: what was given.
        run: what a step calls: the model, or what is around it.
        state: who compresses, counts and saves.
        after: what follows the optimizer's step.
        exchanges: the part of a step in which ranks exchange something: "backward", "step" or "after".
        finish: ends what is still due of the last step.
    """

    model: Any
    run: Any
    state: Any
    optimizer: Any
    close: Callable[[], object]
    after: Callable[[], object] = int
    exchanges: str = "backward"
    finish: Callable[[], object] = int

    def step(self, data: Tensor, exchange: Any = contextlib.nullcontext()) -> None:  # noqa: B008
        """Make a step; `exchange` is around the part of it in which ranks exchange something."""
        self.optimizer.zero_grad()
        loss = self.run(data).square().mean()
        for name, part in (("backward", loss.backward), ("step", self.optimizer.step), ("after", self.after)):
            with exchange if name == self.exchanges else contextlib.nullcontext():
                part()

    def parameters(self) -> list[Tensor]:
        """This rank's own part of each."""
        self.finish()
        return [p.to_local() if hasattr(p, "to_local") else p for p in self.model.parameters()]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def in_ddp(model: Any, codec: Any, optimizer: Any = sgd, within: Any = ANYWHERE, **options: Any) -> Front:
    run, state = wrap(model, codec, within=within, **options)
    return Front(model, run, state, optimizer(model.parameters()), state.close)


def bound_late(model: Any, codec: Any, optimizer: Any = sgd, **options: Any) -> Front:
    run, state = DistributedDataParallel(model), CompressState(codec, fallback=None, **options)
    run.register_comm_hook(state, compress_hook)
    return Front(model, run, state, optimizer(model.parameters()), state.close)


def overlapped(model: Any, codec: Any, optimizer: Any = sgd, **options: Any) -> Front:
    front = in_ddp(model, codec, optimizer, **options)
    front.finish = overlap_forward(front.run, front.optimizer).finish
    return front


def sharded(model: Any, codec: Any, optimizer: Any, replicated: bool, within: Any = ANYWHERE, **options: Any) -> Front:
    """FSDP2, by each part of the model that has parameters; all ranks are replicas, or shards."""
    ranks, parts = dist.get_world_size(), [*model.children()]
    mesh = mesh_of((ranks, 1) if replicated else (1, ranks))
    for part in [*getattr(model, "layers", parts), model]:
        if next(part.parameters(), None) is not None:
            fully_shard(part, mesh=mesh["shard"])
    if replicated:
        options = {"mesh": mesh["replicate"], "fallback": None, **options}
    with within:
        state = compress_fsdp(model, codec, **options)
    return Front(model, model, state, optimizer(model.parameters()), state.close)


def between_replicas(model: Any, codec: Any, optimizer: Any = sgd, **options: Any) -> Front:
    return sharded(model, codec, optimizer, True, **options)


def between_shards(model: Any, codec: Any, optimizer: Any = sgd, **options: Any) -> Front:
    return sharded(model, codec, optimizer, False, **options)


def locally(
    model: Any, codec: Any, optimizer: Any = sgd, every: int = 1, within: Any = ANYWHERE, **options: Any
) -> Front:
    inner = optimizer(model.parameters())
    with within:
        updates = LocalUpdates(model, inner, codec, every=every, **in_groups(options))
    return Front(model, model, updates, inner, updates.close, updates.step, "after")


def by_adam(model: Any, codec: Any = None, warmup_steps: int = 1, within: Any = ANYWHERE, **options: Any) -> Front:
    given = {} if codec is None else {"codec": codec}
    with within:
        optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup_steps=warmup_steps, **given, **options)
    return Front(model, model, optimizer, optimizer, optimizer.close, exchanges="step")


def by_lion(model: Any, codec: Any = None, within: Any = ANYWHERE, **options: Any) -> Front:
    with within:
        optimizer = DistributedLion(model.parameters(), lr=0.01, **options)
    return Front(model, model, optimizer, optimizer, optimizer.close, exchanges="step")


def by_horovod(model: Any, codec: Any, optimizer: Any = sgd, **options: Any) -> Front:
    hvd.init()
    compression = hvd.Compression.codec(codec, **options)
    made = hvd.DistributedOptimizer(optimizer(model.parameters()), model.named_parameters(), compression=compression)
    return Front(model, model, made, made, hvd.shutdown)


def by_factors(model: Any, codec: Any = None, optimizer: Any = sgd, within: Any = ANYWHERE) -> Front:
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    with within:
        factors = SufficientFactors(model, layers[:2] if len(layers) == 3 else layers)  # some weights may stay DDP's
    return Front(model, DistributedDataParallel(model), factors, optimizer(model.parameters()), factors.close)


FRONTS: dict[str, Callable[..., Front]] = {
    "ddp": in_ddp, "overlap": overlapped, "replicas": between_replicas, "shards": between_shards, "local": locally,
    "adam": by_adam, "lion": by_lion, "horovod": by_horovod, "factors": by_factors,
}  # fmt: skip


def marked(names: Iterable[str], *marks: Any) -> list[Any]:
    """Parameters of a test, each a front's name and what follows it, that skip what this torch lacks."""
    needs = {"replicas": [needs_hook], "shards": [needs_reduce_scatter]}
    return [pytest.param(name, marks=[*marks, *needs.get(name.split(",")[0], [])]) for name in names]
