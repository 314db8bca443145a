"""The operations as functions that autograd can go back through.

The gradients are Horovod's, whose convention is that the loss is the mean of the ranks' losses: that of an allreduce is
an allreduce with the same op; those of allgather and broadcast are averaged over the ranks; that of a summing
reducescatter is an allgather times the number of ranks. Every rank must go back as well: its gradient is an operation,
through which autograd can go back in turn, as for a penalty on gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..process_sets import ProcessSet
from ..runtime.handles import (
    allgather_operation,
    allreduce_operation,
    alltoall_operation,
    broadcast_operation,
    key_of,
    reducescatter_operation,
    submit,
    synchronize,
)
from ..runtime.operations import OP_NAMES, Adasum, Average, Operation, Sum


class _Differentiable(torch.autograd.Function):
    """An operation, and the one that takes gradients of its results to those of its tensors."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.apply_backward = backward
        return tuple(forward(*tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.apply_backward(*(gradient.contiguous() for gradient in gradients))


def _now(operation: Operation) -> Any:
    return synchronize(submit(operation))


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _check_gradient(op: int) -> None:
    if op not in (Average, Sum, Adasum):
        raise RuntimeError(f"op={OP_NAMES[op]} has no gradient here: use hvd.Average or hvd.Sum, or tensor.detach()")


def allreduce(
    tensors: Sequence[Tensor], kind: str, name: str | None, ps: ProcessSet, op: int = Average, prescale: float = 1.0,
    postscale: float = 1.0, codec: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    def forward(*tensors: Tensor) -> Any:
        return _now(allreduce_operation(key_of(kind, name, ps), tensors, op, prescale, postscale, codec=codec))

    def backward(*gradients: Tensor) -> Any:
        _check_gradient(op)
        return allreduce(gradients, kind, _backward_name(name), ps, op, prescale, postscale)

    return _Differentiable.apply(forward, backward, *tensors)


def allgather(tensors: Sequence[Tensor], kind: str, name: str | None, ps: ProcessSet) -> tuple[Tensor, ...]:
    own: list[tuple[int, int]] = []

    def forward(*tensors: Tensor) -> Any:
        operation = allgather_operation(key_of(kind, name, ps), tensors)
        results = _now(operation)
        # Where this rank's begin, which others may have joined before: these had no rows.
        own.extend((sum(rows[: ps.rank()]), len(t)) for rows, t in zip(operation.rows, tensors, strict=True))
        return results

    def backward(*gradients: Tensor) -> Any:
        mean = allreduce(gradients, f"{kind}.gradient", name, ps)
        return (gradient.narrow(0, *place) for gradient, place in zip(mean, own, strict=True))

    return _Differentiable.apply(forward, backward, *tensors)


def broadcast(tensor: Tensor, root: int, name: str | None, ps: ProcessSet) -> Tensor:
    def forward(tensor: Tensor) -> Any:
        return _now(broadcast_operation(key_of("broadcast", name, ps), tensor, torch.empty_like(tensor), root, ps))

    def backward(*gradients: Tensor) -> Any:
        (mean,) = allreduce(gradients, "broadcast.gradient", name, ps)
        # Only the root's tensor had any influence. Zeros have the mean's history: every rank goes back through it.
        is_root = ps.ranks[ps.rank() or 0] == root
        return [mean if is_root else mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0.0)]

    return _Differentiable.apply(forward, backward, tensor)[0]


def alltoall(tensor: Tensor, splits: Any, kind: str, name: str | None, ps: ProcessSet) -> tuple[Tensor, Tensor]:
    received: list[int] = []

    def forward(tensor: Tensor) -> Any:
        rows, counts = _now(alltoall_operation(key_of(kind, name, ps), tensor, splits, ps.size() or 0))
        received.extend(counts.tolist())
        return rows, counts

    def backward(gradient: Tensor, _: Any) -> Any:
        return alltoall(gradient, received, f"{kind}.gradient", name, ps)[:1]

    return _Differentiable.apply(forward, backward, tensor)


def reducescatter(
    tensors: Sequence[Tensor], kind: str, name: str | None, ps: ProcessSet, op: int, prescale: float, postscale: float
) -> tuple[Tensor, ...]:
    def forward(*tensors: Tensor) -> Any:
        return _now(reducescatter_operation(key_of(kind, name, ps), tensors, op, prescale, postscale))

    def backward(*gradients: Tensor) -> Any:
        _check_gradient(op)
        factor = prescale * postscale * ((ps.size() or 1) if op == Sum else 1)
        return allgather([gradient * factor for gradient in gradients], f"{kind}.gradient", name, ps)

    return _Differentiable.apply(forward, backward, *tensors)
