"""DDP's options since torch 2.15: other memory for buckets, and backward passes that the caller finalizes.

Gradients are those of the same steps without.
"""

from __future__ import annotations

import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire import CompressState, OneBit, PowerSGD, compress_hook
from lacking import needs_ddp
from ranks import Ranks, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import mean_residuals

LAZY, BATCHED = needs_ddp("lazy_bucket_allocation"), needs_ddp("batched_grad_copy")
BY_HAND = needs_ddp("require_manual_backward_finalization")


def wrapped(exchange: str, **options: Any) -> tuple[Any, CompressState]:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 3))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01, **options)
    state = CompressState(model, OneBit(), exchange=exchange)
    model.register_comm_hook(state, compress_hook)
    return model, state


def grads_of(rank: int, exchange: str, options: dict[str, Any], finalize: str) -> list[list[Tensor]]:
    """Of each step.

    Args:
        finalize: "after" backward, or "within" it as soon as DDP lets; else DDP does.
    """
    model, state = wrapped(exchange, **options)
    draws, found, late = torch.Generator().manual_seed(rank), [], True
    within = list[bool]()

    def last(grad: Tensor) -> None:
        if not late:
            model.finalize_backward()
            within.append(True)

    for step in range(6):
        model.require_manual_backward_finalization = bool(finalize) and step > 1  # not from the first step on
        x = torch.randn(6, 20, generator=draws).requires_grad_()
        x.register_hook(last)  # after those of the parameters
        loss = model(x * 1.0).square().mean()
        late = finalize != "within" or step < 2 or model.should_finalize_after_backward
        loss.backward()
        if late and model.require_manual_backward_finalization:
            model.finalize_backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert state.step == 6
    assert len(within) == (4 if finalize == "within" else 0)
    state.close()
    return found


@pytest.mark.parametrize(
    ("options", "finalize"),
    [
        pytest.param({"lazy_bucket_allocation": True}, "", marks=LAZY),
        pytest.param({"batched_grad_copy": True}, "", marks=BATCHED),
        pytest.param({}, "after", marks=BY_HAND),
        pytest.param({}, "within", marks=BY_HAND),
        pytest.param(
            {"batched_grad_copy": True, "lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
            "within",
            marks=BY_HAND,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("exchange", ["gather", "dense"])
def test_gradients_are_those_without(ranks: Ranks, exchange: str, options: dict[str, Any], finalize: str) -> None:
    plain, theirs = (ranks(2).run(grads_of, exchange, *how) for how in (({}, ""), (options, finalize)))
    for expected, got in zip(plain, theirs, strict=True):
        for step, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), step


@LAZY
@pytest.mark.parametrize("exchange", ["gather", "dense"])
@on_ranks(2)
def test_nothing_keeps_lazy_buckets_after_backward(rank: int, exchange: str) -> None:
    """How many buffers of buckets, after each backward pass."""
    model, state = wrapped(exchange, lazy_bucket_allocation=True)
    submit, buffers, found = state.submit, list[weakref.ref[Tensor]](), []

    def noted(grad_bucket: dist.GradBucket) -> Any:
        buffers.append(weakref.ref(grad_bucket.buffer()))
        return submit(grad_bucket)

    state.submit = noted  # type: ignore[method-assign]
    for _ in range(6):
        model(torch.ones(4, 20)).sum().backward()
        end = time.monotonic() + 10  # Gloo's thread lets go of a tensor some time after its sum is there
        while (alive := sum(buffer() is not None for buffer in buffers)) and time.monotonic() < end:
            time.sleep(0.01)
        found.append(alive)
    assert len(buffers) > 6
    del state.submit
    state.close()
    assert found == [0] * 6


@BY_HAND
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@on_ranks(2)
def test_what_ddp_would_tell_too_late_is_refused(rank: int, option: str) -> None:
    model, state = wrapped("gather", **{option: True})
    model.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(4, 20)).sum().backward()
    state.close()
    text = str(raised.value)
    assert f"DDP({option}=True) throws away" in text
    assert "leave out require_manual_backward_finalization, or that" in text


@on_ranks(2)
def test_a_delayed_all_reduce_is_refused(rank: int) -> None:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    late: dict[str, Any] = {
        "delay_all_reduce_named_params": [("1.weight", layers[1].weight)],
        "param_to_hook_all_reduce": layers[0].bias,
    }
    with pytest.raises(ValueError, match="leave out delay_all_reduce_named_params"):
        CompressState(DistributedDataParallel(layers, **late), OneBit())


class GivenGradients(nn.Module):
    """Parameters of these shapes, whose gradients are the input."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.all, grads, strict=True)]).sum()


def to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def transposed(model: nn.Module) -> None:
    for p in model.parameters():
        if p.ndim == 2:
            p.data = p.data.t().contiguous().t()


@pytest.mark.parametrize("change", ["to_channels_last", "transposed"])
@pytest.mark.parametrize("codec", [OneBit(), PowerSGD(rank=1)])
@on_ranks(2)
def test_strides_may_change_after_ddp_has_made_its_buckets(rank: int, change: str, codec: Any) -> None:
    """Where plain DDP takes it, before the first step, after it, and in later ones: nothing is lost."""
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    shapes = [(8, 4, 3, 3), (8,), (6, 4, 1, 1), (10, 7)]
    for when in (-2, -1, 0, 3):
        if when == 3 and change == "to_channels_last":
            continue  # this moves the gradients out of DDP's buckets
        net = GivenGradients(shapes)
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
        if when == -2:
            globals()[change](model)
        state = CompressState(model, codec, exchange="gather" if codec == OneBit() else "factors", fallback=None)
        model.register_comm_hook(state, compress_hook)
        if when == -1:
            globals()[change](model)
        sums, wanted = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
        for step in range(6):
            draws = torch.Generator().manual_seed(step)
            grads = [[torch.randn(shape, generator=draws) for shape in shapes] for _ in range(2)]
            model.zero_grad()
            model(grads[rank]).backward()
            for i, p in enumerate(net.all):
                sums[i] += p.grad
                wanted[i] += (grads[0][i] + grads[1][i]) / 2
            if when == step:
                globals()[change](model)
            if step == 4:  # its buckets are made again
                state.close()
        for name, residual in mean_residuals(state).items():
            sums[int(name.split(".")[1])] += residual
        state.close()
        for total, dense in zip(sums, wanted, strict=True):
            assert torch.allclose(total, dense, rtol=0, atol=1e-4), when
