"""Units: gradients that go into one operation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..runtime.context import world
from ..runtime.engine import Pending
from ..runtime.handles import allreduce_operation, key_of, overlaps, sparse_operation
from ..runtime.operations import Average
from .arguments import Options
from .residuals import CompressionState
from .unscaling import version

#: Bytes of a bucket that a codec compresses as one; what DDP's are.
BUCKET_BYTES = 25 << 20


@dataclass(eq=False)
class Unit:
    parameters: list[Tensor]
    #: The gradients that backward has made, and the versions of their memory then.
    arrived: dict[Tensor, tuple[Tensor | None, int]] = field(default_factory=dict)
    pending: Pending | None = None
    contexts: list[Any] = field(default_factory=list)


def buckets_of(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Buckets for a codec, in reverse order of the parameters: of one dtype on one device, up to `BUCKET_BYTES`."""
    for kind in dict.fromkeys((p.dtype, p.device) for p in parameters):
        bucket, filled = list[Tensor](), 0
        for p in reversed([p for p in parameters if (p.dtype, p.device) == kind]):
            if bucket and filled + p.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(p)
            filled += p.nbytes
        yield bucket


def check_alike(every: Sequence[tuple[int, list[list[str]]]]) -> None:
    """Raises ValueError unless all ranks' units of several are the same, by name: in a unit places count."""
    (first, units), *others = every
    for rank, theirs in others:
        if theirs != units:
            pairs = zip(
                (name for unit in units for name in unit), (name for unit in theirs for name in unit), strict=False
            )
            what = next((f": {a} and {b} have one place" for a, b in pairs if a != b), "")
            raise ValueError(
                f"ranks {first} and {rank} do not have their parameters in one order, or in one way of grouping{what}. "
                "What is reduced together is told apart by order: make model, optimizer and groups alike everywhere; "
                "that of a set differs from process to process"
            )


def empty_rows(p: Tensor, dimensions: int) -> Tensor:
    indices = torch.zeros((dimensions, 0), dtype=torch.int64, device=p.device)
    values = torch.zeros((0, *p.shape[dimensions:]), dtype=p.dtype, device=p.device)
    return torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=True)


class Reductions:
    """The operations of units.

    Args:
        names: of the parameters; there may come more.
        options, state: the optimizer's.

    Attributes:
        sparse: parameters with sparse gradients, and how many dimensions of these are sparse.
    """

    def __init__(self, names: Mapping[Tensor, str], options: Options, state: CompressionState | None) -> None:
        self.names, self.options, self.state = names, options, state
        self.sparse: dict[Tensor, int] = {}
        self._late: set[Tensor] = set()

    def start(self, unit: Unit, loss_scale: float | None) -> None:
        """Submit a unit's gradients; zeros where there is none."""
        no_gradient = all(p.grad is None for p in unit.parameters)
        for p in unit.parameters:
            made = p.grad
            if p.grad is None:
                p.grad = empty_rows(p, self.sparse[p]) if p in self.sparse else torch.zeros_like(p)
            elif p.grad.is_sparse and (self.options.sparse_as_dense or len(unit.parameters) > 1):
                self._warn_of_late_rows(p)
                p.grad = p.grad.to_dense()
            elif not p.grad.is_sparse and overlaps(p.grad):  # an expanded one that the script has put there
                p.grad = p.grad.contiguous()
            if p.grad is not made and p in unit.arrived and unit.arrived[p][0] is made:
                unit.arrived[p] = p.grad, version(p.grad)
        names = [self.names[p] for p in unit.parameters]
        key = key_of("gradient", names[0], self.options.process_set)
        # `data` has a version of its own, so that what the reduction writes is told from what others do.
        grads: list[Any] = [None if p.grad is None else p.grad.data for p in unit.parameters]
        if any(grad.is_sparse for grad in grads):
            self.sparse[unit.parameters[0]] = grads[0].sparse_dim()
            operation: Any = sparse_operation(key, grads[0], self.options.op)
            operation.no_gradient = no_gradient
            unit.contexts = [None]
        else:
            operation = self._dense(key, grads, names, no_gradient, unit)
        operation.loss_scale = loss_scale
        unit.pending = world().engine.submit(operation)

    def _warn_of_late_rows(self, p: Tensor) -> None:
        """Warn: the other ranks reduce it densely with others already."""
        if not self.options.sparse_as_dense and p not in self._late:
            self._late.add(p)
            warnings.warn(
                f"the gradient of {self.names[p]} has become sparse after the first step, in which no rank had one: it "
                "is made dense; leave it out of the groups, let the first step have it on some rank, or pass "
                "sparse_as_dense=True",
                stacklevel=2,
            )

    def _dense(self, key: tuple[str, int], grads: list[Tensor], names: list[str], no_gradient: bool, unit: Unit) -> Any:
        options = self.options
        if self.state is not None:
            unit.contexts = [None] * len(grads)
            # Not divided before: what is left out is kept in the gradient's own units, and sums are float32 anyway.
            return allreduce_operation(
                key, grads, options.op, 1.0, 1.0, grads, contiguous=False, codec=self.state.compression,
                state=self.state, names=names, no_gradient=no_gradient,
            )  # fmt: skip
        predivide = options.predivide if options.op == Average else 1.0
        scales = (options.op, 1.0 / predivide, predivide)
        pairs = [options.compression.compress(grad) for grad in grads]
        sent, unit.contexts = [tensor for tensor, _ in pairs], [context for _, context in pairs]
        return allreduce_operation(key, sent, *scales, sent, contiguous=False, no_gradient=no_gradient)

    def finish(self, unit: Unit) -> None:
        """Wait for a unit, and put what comes back into its gradients."""
        assert unit.pending is not None
        results = unit.pending.wait()
        for p, result, context in zip(unit.parameters, results, unit.contexts, strict=True):
            if result.is_sparse:
                self.sparse[p] = result.sparse_dim()
                p.grad = result
                continue
            if p.grad is None:
                raise AssertionError(
                    f"{self.names[p]} has lost its gradient between loss.backward() and optimizer.step() or "
                    "optimizer.synchronize(), as by model.zero_grad(): other ranks go on with their mean. Drop "
                    "gradients after the step"
                )
            if p.grad.is_sparse and self.state is None:  # nothing was here, and the others' is dense: what is theirs
                context = self.options.compression.compress(torch.zeros_like(p))[1]
            dense = result if self.state is not None else self.options.compression.decompress(result, context)
            if p.grad.is_sparse:
                p.grad = dense
            elif dense.data_ptr() != p.grad.data_ptr() or dense.dtype != p.grad.dtype:
                p.grad.detach().copy_(dense)
