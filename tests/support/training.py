"""Small models on several ranks, and the law that nothing is lost, measured while they train."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gradwire import CompressState, OuterSGD, Rounds, compress_hook
from gradwire.compress.feedback.base import RESIDUAL
from gradwire.compress.feedback.residual import Residual
from gradwire.hooks.comm import group, rendezvous
from gradwire.hooks.comm.group import Group
from gradwire.hooks.core import session as connection
from gradwire.hooks.network import cost
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

#: Fields of `Rounds`.
ROUNDS = frozenset(field.name for field in dataclasses.fields(Rounds))


def convnet(width: int = 64) -> nn.Module:
    """Convolutions in channels_last, whose gradients lie in buckets with strides of their own, then linear layers."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 64, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def perceptron(inputs: int = 40, width: int = 64, layers: int = 3) -> nn.Sequential:
    torch.manual_seed(7)
    sizes = [inputs, *[width] * layers]
    linear: Iterable[list[nn.Module]] = ([nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(sizes))
    return nn.Sequential(*[module for pair in linear for module in pair])


class TwoHeads(nn.Module):
    """A body and two heads, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(40, 48)
        self.left, self.right = nn.Linear(48, 30), nn.Linear(48, 30)

    def forward(self, x: Tensor, head: str) -> Tensor:
        y: Tensor = getattr(self, head)(torch.tanh(self.body(x)))
        return y


def data_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def batch(rank: int, step: int, model: nn.Module) -> Tensor:
    """Data that differs by rank and step, and is the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = next(model.parameters())
    shape = (4, 3, 8, 8) if first.dim() == 4 else (4, first.shape[1])
    return torch.randn(shape, generator=generator).to(first.device)


def in_groups(options: Mapping[str, Any]) -> dict[str, Any]:
    """`LocalUpdates`' arguments, from options that name fields of `Rounds`, and those of `OuterSGD` as `outer_…`."""
    rounds = {name: value for name, value in options.items() if name in ROUNDS}
    outer = {name: value for name, value in options.items() if name.startswith("outer_")}
    rest = {name: value for name, value in options.items() if name not in rounds and name not in outer}
    outers = {name.removeprefix("outer_"): value for name, value in outer.items()}
    return {"rounds": Rounds(**rounds), "outer": OuterSGD(**outers), **rest}


@contextlib.contextmanager
def meeting_within(seconds: float) -> Iterator[None]:
    """Ranks wait for each other no longer than this where a state is made."""
    timeout = timedelta(seconds=seconds)
    with (
        patch.object(group, "HANDSHAKE_TIMEOUT", timeout),
        patch.object(connection, "meeting_timeout", lambda _: timeout),
        patch.object(rendezvous, "VERDICT_TIMEOUT", timeout),
    ):
        yield


def wrap(
    model: nn.Module,
    codec: Any,
    *,
    ddp: dict[str, Any] | None = None,
    within: Any = contextlib.nullcontext(),  # noqa: B008
    **options: Any,
) -> tuple[Any, CompressState]:
    """The model in DDP, with buckets of a few kilobytes, and the hook registered; compresses though it cannot pay. The
    state is made `within` a context."""
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": 0.02, **(ddp or {})})
    with within:
        state = CompressState(wrapped, codec, **{"fallback": None, **options})
    wrapped.register_comm_hook(state, compress_hook)
    return wrapped, state


def waiting(model: nn.Module, codec: Any, **options: Any) -> tuple[Any, CompressState, list[float]]:
    """As `wrap`, with a hook around ours that waits for each mean within backward; and the norms of all means."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state, norms = CompressState(wrapped, codec, **options), list[float]()

    def hook(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = compress_hook(state, bucket)
        norms.append(float(future.wait().norm()))
        return future

    hook.__annotations__ = compress_hook.__annotations__  # DDP compares them
    wrapped.register_comm_hook(state, hook)
    return wrapped, state, norms


WORK, LATENCY = cost.Work(2e-9, 2e-9, 2e-9, 2e-9, 5e-11, 5e-10), cost.Latency(1e-5, 3e-5, 4e-5)


def pretend(outside: float, inside: float | None = None) -> Any:
    """A calibration as of a network that moves a byte in `outside` seconds, and inside a node in `inside`."""

    def calibration(group: Group, device: torch.device, everywhere: bool | None = None) -> cost.Calibration:
        beta = inside if inside is not None and group.size == 2 and group.ranks[1] == group.ranks[0] + 1 else outside
        line = cost.Line(1e-5, beta)
        return cost.Calibration(line, line, line, WORK, LATENCY)

    return calibration


def two_large_layers() -> tuple[nn.Module, Any]:
    """A model whose buckets are large enough to compress, and DDP around it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 2))
    return model, DistributedDataParallel(model, bucket_cap_mb=0.3)


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of nested dictionaries, by key, and lists."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = [tree[key] for key in sorted(tree, key=str)] if isinstance(tree, dict) else tree
    return [x for part in parts for x in leaves(part)] if isinstance(parts, list | tuple) else []


def residuals_of(saved: dict[str, Any]) -> dict[str, Tensor]:
    """The residuals in a checkpoint of one rank, or in a consolidated one."""
    [residuals] = saved["residuals"].values()
    return dict(residuals)


class Ledger:
    """Sums what went in and what came out, by parameter: mean(gradient) = output + mean(change of the residual)."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.wanted = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.parameters.items()}
        self.received = {name: torch.zeros_like(w) for name, w in self.wanted.items()}

    def expect(self, loss: Callable[[], Tensor]) -> None:
        """Add the mean over ranks of this rank's own gradients."""
        gradients = torch.autograd.grad(loss(), list(self.parameters.values()), allow_unused=True)
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                mean = gradient.detach().double().contiguous()
                dist.all_reduce(mean)
                self.wanted[name] += mean / dist.get_world_size()
            else:
                dist.all_reduce(torch.zeros_like(self.wanted[name]))

    def receive(self) -> None:
        """Add what DDP left in the parameters' gradients."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.received[name] += parameter.grad.double()

    def error(self, state: CompressState) -> float:
        """How far the law is off, relative to the norm of all that went in. A collective."""
        wanted, received = ({name: x.cpu() for name, x in sums.items()} for sums in (self.wanted, self.received))
        off = law(wanted, received, mean_residuals(state))
        return math.hypot(*off.values()) / math.hypot(*(float(wanted.norm()) for wanted in self.wanted.values()))


def mean_residuals(state: CompressState) -> dict[str, Tensor]:
    """What the ranks keep, by parameter: the mean, in float64, in units of a loss that is not scaled. A collective."""
    saved = state.consolidated_state_dict()
    scale = 1.0 if saved["scale"] is None else saved["scale"]
    return {name: residual.cpu().double() / scale for name, residual in residuals_of(saved).items()}


def law(
    wanted: dict[str, Tensor],
    received: dict[str, Tensor],
    residuals: dict[str, Tensor],
    abandoned: Sequence[Sequence[dict[str, Tensor]]] = (),
) -> dict[str, float]:
    """By parameter, the norm of what is off in "what was applied + mean residual = what was to be applied".

    Args:
        wanted: sums of mean gradients, of the steps that were applied.
        received: sums of what the optimizer applied.
        residuals: means over the ranks; parameters without one may be left out.
        abandoned: for each backward pass that raised, what may have been kept of it; or nothing at all.
    """
    result = {}
    for name, total in wanted.items():
        nothing = torch.zeros((), dtype=torch.float64)
        off = Residual().invariant(total, {RESIDUAL: nothing}, received[name], {RESIDUAL: residuals.get(name, nothing)})
        nothing = torch.zeros_like(off)
        kept = itertools.product(*((nothing, *(choice[name] for choice in choices)) for choices in abandoned))
        result[name] = min(float((off + sum(some, start=nothing)).norm()) for some in kept)
    return result


def train(rank: int, model: Any, steps: range, ledger: Ledger | None = None, lr: float = 0.01) -> list[str]:
    """Plain gradient descent; a digest of all gradients after each step, which must be equal on all ranks."""
    inner = model.module
    digests = []
    for step in steps:
        data = batch(rank, step, inner)
        if ledger is not None:
            ledger.expect(lambda data=data: inner(data).square().mean())  # type: ignore[misc]
        model.zero_grad()
        model(data).square().mean().backward()
        if ledger is not None:
            ledger.receive()
        digests.append(digest(p.grad for p in inner.parameters()))
        with torch.no_grad():
            for parameter in inner.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
    return digests


def through_a_file(saved: Any) -> Any:
    """What `torch.load` makes of it, which shares no memory with it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def mean_over_ranks(x: Tensor) -> Tensor:
    """In float64, by torch alone."""
    total = x.detach().double().contiguous()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def all_ranks(x: Tensor) -> Tensor:
    """Every rank's, [ranks, …]."""
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x.contiguous())
    return torch.stack(rows)


def told(function: Callable[[], Any]) -> str:
    """What it raises, if it does."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def digest(tensors: Iterable[Tensor | None]) -> str:
    """Equal for tensors that are equal bit for bit."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"-" if tensor is None else tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
