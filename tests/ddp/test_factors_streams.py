"""`SufficientFactors` over NCCL, on GPUs that are not there (`nccl_on_cpu`): in whatever order streams run, weights are
those that plain data parallelism has on CPUs. Faults are seeded, and each is found."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gradwire import SufficientFactors
from gradwire.hooks.comm.pipeline import Scheduler
from gradwire.hooks.core import front
from gradwire.hooks.sufficient_factors import gradients, selection
from gradwire.hooks.sufficient_factors.layer import Layer
from nccl_on_cpu import DEVICE, GpuTensor, Schedule, World, on_gpu, read
from nccl_on_cpu.machine import Stream
from nccl_on_cpu.training import Meeting
from torch import Tensor, nn

ROWS, RATE = 3, 0.05
#: Passes of each step; all but the last one are in `no_sync()`. With two, gradients take fewer bytes than factors.
PASSES = (1, 2, 1)
#: Of one rank: backward's, those of the two layers, the pipeline's, and NCCL's.
STREAMS = ("0 default", *(f"0 side {number}" for number in range(1, 5)), "0 nccl")


class Fork(torch.autograd.Function):
    """Several streams go on from here, and meet here in backward, as autograd has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *streams: Stream) -> tuple[Tensor, ...]:
        ctx.streams = streams
        made = tuple(x.clone() for _ in streams)
        for copied, stream in zip(made, streams, strict=True):
            hand_over(copied, stream)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for grad, stream in zip(grads, ctx.streams, strict=True):
            hand_over(grad, torch.cuda.current_stream(), stream)
        return sum(grads[1:], grads[0]), *(None for _ in grads)


class Meet(torch.autograd.Function):
    """The sum of what several streams have made."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, *streams: Stream) -> Tensor:
        ctx.streams = streams
        for made, stream in zip((a, b), streams, strict=True):
            hand_over(made, torch.cuda.current_stream(), stream)
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for stream in ctx.streams:
            hand_over(grad, stream)
        return grad, grad, *(None for _ in ctx.streams)


class Moved(torch.autograd.Function):
    """From one stream to another; back in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, machine: Any, stream: Stream) -> Tensor:
        ctx.machine, ctx.before, machine.host.current = machine, machine.current, stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.machine.host.current = ctx.before
        return grad, None, None


def hand_over(x: Any, to: Any, by: Any = None) -> None:
    to.wait_stream(by or torch.cuda.current_stream())
    x.record_stream(to)


class Branches(nn.Module):
    """A body, and two layers of its output, each on a stream of its own where there are streams."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 40), nn.Linear(6, 40)
        self.streams: tuple[Any, ...] = ()
        self.machine: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        if not self.streams:
            return (self.b(h).sin() + self.a(h).sin()).square().sum()
        inputs, made = Fork.apply(h, *self.streams), []
        # Backward runs through `b` last, whose factors are to leave first.
        for layer, stream, x in zip((self.b, self.a), self.streams, inputs, strict=True):
            outer = self.machine.current
            y = layer(Moved.apply(x, self.machine, stream)).sin()
            made.append(Moved.apply(y, self.machine, outer))
        total: Tensor = Meet.apply(*made, *self.streams)
        return total.square().sum()


def model() -> Branches:
    torch.manual_seed(1)
    return Branches()


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def train(world: World, rank: int) -> list[Tensor]:
    """The weights of the layers whose factors travel, after some steps."""
    net = model()
    for module in (net.body, net.a, net.b):
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(on_gpu(parameter.detach())))
    data = [on_gpu(batch(rank, number)) for number in range(sum(PASSES))]
    net.machine, net.streams = world.machine, (torch.cuda.Stream(), torch.cuda.Stream())
    factors, weights = SufficientFactors(net, ["a", "b"]), (net.a.weight, net.b.weight)
    for passes in PASSES:
        with world.machine.never_waiting():
            for number in range(passes):
                x = data.pop(0)
                with torch.enable_grad():
                    if number < passes - 1:
                        with factors.no_sync():
                            net(x).backward()
                    else:
                        net(x).backward()
            for weight in weights:
                weight.sub_(weight.grad, alpha=RATE)  # type: ignore[arg-type]
            net.zero_grad()
    assert factors.statistics().steps == len(PASSES)
    assert all(text.startswith("factors") for text in factors.statistics().decisions.values())
    return [read(weight.detach()) for weight in weights]


def expected(ranks: int) -> list[Tensor]:
    net = model()
    first = 0
    for passes in PASSES:
        for number in range(first, first + passes):
            for rank in range(ranks):
                (net(batch(rank, number)) / ranks).backward()
        first += passes
        for layer in (net.a, net.b):
            layer.weight.data.sub_(layer.weight.grad, alpha=RATE)  # type: ignore[arg-type]
        net.zero_grad()
    return [net.a.weight.detach(), net.b.weight.detach()]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[Schedule], World]:
    """Worlds in which `SufficientFactors` connects."""
    found: list[World] = []

    def session(owner: str, group: Any, device: Any, told: Any, problem: Any, **_: Any) -> Meeting:
        if problem is not None:
            raise problem
        return Meeting(found[-1], found[-1].machine.host.rank, DEVICE, 0)

    def make(schedule: Schedule) -> World:
        found.append(World(2, schedule))
        return found[-1]

    names: dict[str, Any] = {"is_available": bool, "is_initialized": bool, "broadcast": bool, "new_group": bool}
    fake = types.SimpleNamespace(
        **{name: lambda *_: True for name in names}, group=types.SimpleNamespace(WORLD=object())
    )
    fake.get_world_size = lambda group: 2
    monkeypatch.setattr(gradients, "dist", fake)
    monkeypatch.setattr(front, "Session", session)
    monkeypatch.setattr(gradients, "describe", lambda *_: {})
    monkeypatch.setattr(selection, "check_whole", lambda *_: None)
    return make


def wrong(world: Callable[[Schedule], World]) -> Iterator[str]:
    """The streams of which one that is late changes something."""
    wanted = expected(2)
    for stream in STREAMS:
        made = world(Schedule(stream))
        for got in made.run(train):
            if not all(torch.allclose(w, g, rtol=1e-4, atol=1e-5) for w, g in zip(wanted, got, strict=True)):
                yield stream
        assert stream in {found.name for found in made.machine.streams}


def test_no_order_of_streams_changes_a_weight(world: Callable[[Schedule], World]) -> None:
    assert list(wrong(world)) == []


def not_recorded(function: str) -> Callable[[pytest.MonkeyPatch], None]:
    """`record_stream` is missing in this function."""

    def fault(patch: pytest.MonkeyPatch) -> None:
        real = GpuTensor.record_stream

        def record_stream(self: GpuTensor, stream: Any) -> None:
            if sys._getframe(1).f_code.co_name != function:
                real(self, stream)

        patch.setattr(GpuTensor, "record_stream", record_stream)

    return fault


def result_of_no_device(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.__post_init__

    def made(self: Scheduler) -> None:
        real(self)
        self.nothing = torch.empty(0, device="cpu")

    patch.setattr(Scheduler, "__post_init__", made)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "means used before they are there": result_of_no_device,
    "factors used before they are there": lambda patch: patch.setattr(Layer, "_made", lambda *_: None),
    "factors were not recorded": not_recorded("use"),
    "the mean was not recorded": not_recorded("apply"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, world: Callable[[Schedule], World], monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    assert next(wrong(world), None) is not None
