"""The operations as functions that autograd can go back through.

The gradients are Horovod's, whose convention is that the loss is the mean of the ranks' losses: that of an allreduce is
an allreduce with the same op; those of allgather and broadcast are averaged over the ranks; that of a summing
reducescatter is an allgather times the number of ranks. Every rank must go back as well: its gradient is an operation,
through which autograd can go back in turn, as for a penalty on gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def _now(operation: Operation) -> Any:
    return synchronize(submit(operation))


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _differentiable(op: int) -> None:
    if op not in (Average, Sum, Adasum):
        raise RuntimeError(f"op={OP_NAMES[op]} has no gradient here: use hvd.Average or hvd.Sum, or tensor.detach()")


class AllReduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, prescale: float, postscale: float, ps: ProcessSet, codec: Any,
        kind: str, *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.arguments = (name, op, prescale, postscale, ps, kind)
        key = key_of(kind, name, ps)
        operation = allreduce_operation(key, tensors, op, prescale, postscale, codec=codec, nameless=name is None)
        return tuple(_now(operation))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name, op, prescale, postscale, ps, kind = ctx.arguments
        _differentiable(op)
        dense = [gradient.contiguous() for gradient in gradients]
        reduced = AllReduceFunction.apply(_backward_name(name), op, prescale, postscale, ps, None, kind, *dense)
        return (None,) * 7 + tuple(reduced)


def _mean(name: str | None, ps: ProcessSet, kind: str, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    dense = [gradient.contiguous() for gradient in gradients]
    mean: tuple[Tensor, ...] = AllReduceFunction.apply(name, Average, 1.0, 1.0, ps, None, f"{kind}.gradient", *dense)
    return mean


class AllGatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, ps: ProcessSet, kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        operation = allgather_operation(key_of(kind, name, ps), tensors)
        results = tuple(_now(operation))
        # Where this rank's begin, which others may have joined before: these had no rows.
        starts = [sum(rows[: ps.rank()]) for rows in operation.rows]
        ctx.arguments, ctx.own = (name, ps, kind), [(a, len(t)) for a, t in zip(starts, tensors, strict=True)]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name, ps, kind = ctx.arguments
        mean = _mean(name, ps, kind, gradients)
        own = (g.narrow(0, start, rows) for g, (start, rows) in zip(mean, ctx.own, strict=True))
        return (None, None, None, *own)


class BroadcastFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: int, name: str | None, ps: ProcessSet) -> Tensor:
        ctx.arguments = (root, name, ps)
        operation = broadcast_operation(key_of("broadcast", name, ps), tensor, torch.empty_like(tensor), root, ps)
        result: Tensor = _now(operation)[0]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        root, name, ps = ctx.arguments
        (mean,) = _mean(name, ps, "broadcast", gradients)
        # Only the root's tensor had any influence. Zeros have the mean's history: every rank goes back through it.
        is_root = ps.ranks[ps.rank() or 0] == root
        return mean if is_root else mean.masked_fill(torch.ones_like(mean, dtype=torch.bool), 0.0), None, None, None


class AllToAllFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, ps: ProcessSet, kind: str
    ) -> tuple[Tensor, Tensor]:
        operation = alltoall_operation(key_of(kind, name, ps), tensor, splits, ps.size() or 0)
        result, received = _now(operation)
        ctx.arguments, ctx.received = (name, ps, f"{kind}.gradient"), received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        sent, _ = AllToAllFunction.apply(gradients[0].contiguous(), ctx.received, *ctx.arguments)
        return sent, None, None, None, None


class ReduceScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, prescale: float, postscale: float, ps: ProcessSet, kind: str,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        operation = reducescatter_operation(key_of(kind, name, ps), tensors, op, prescale, postscale)
        ctx.arguments = (name, op, operation.prescale * operation.postscale, ps, kind)
        return tuple(_now(operation))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        name, op, factor, ps, kind = ctx.arguments
        _differentiable(op)
        factor *= (ps.size() or 1) if op == Sum else 1
        scaled = [(g * factor).contiguous() for g in gradients]
        gathered = AllGatherFunction.apply(name, ps, f"{kind}.gradient", *scaled)
        return (None,) * 6 + tuple(gathered)
