"""The operations: each has a request, which it announces, and a run, once all ranks are ready."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..consensus.negotiation import LOSS_SCALE, Request
from .adasum import adasum
from .arithmetic import divide, number, reduce_rows, scale, shares
from .channel import Channel, as_bytes, flat_memory, is_plain

Average, Sum, Adasum, Min, Max, Product = range(6)
#: Larger allreduces are not fused: copying them costs more than the message that it saves.
FUSE_BELOW_BYTES = 4 << 20
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_REDUCTIONS = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class Nameless(str):
    """The key of an operation without a name. It gets a number at submission, so that a call which one rank was refused
    does not shift the numbers."""


class Operation:
    """One operation of one rank.

    Args:
        key: what the ranks call it.
        set_id: its process set.
        tensors: what this rank puts in.
    """

    kind: ClassVar[str]
    #: Tensors that take the results, if there are any already.
    outputs: Sequence[Tensor] | None = None
    #: This rank has nothing of its own, and goes along with what the others announce.
    no_gradient = False
    #: Of gradients: by what a GradScaler has multiplied them, where that is known.
    loss_scale: float | None = None

    def __init__(self, key: str, set_id: int, tensors: Sequence[Tensor] = ()) -> None:
        self.key, self.set_id, self.tensors = key, set_id, list(tensors)

    def request(self) -> Request:
        """Its announcement to the other ranks."""
        return {
            "key": self.key,
            "set": self.set_id,
            "kind": self.kind,
            "tensors": [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in self.tensors],
            "must_match": self.must_match(),
            "per_rank": self.per_rank(),
            "fuse": self.fuse(),
            "no_gradient": self.no_gradient,
        }

    def must_match(self) -> dict[str, Any]:
        """Facts that must be equal on all ranks, besides the tensors."""
        scale = {} if self.loss_scale is None else {LOSS_SCALE: self.loss_scale}
        return {"device": self.device.type, **scale}

    def per_rank(self) -> dict[str, Any]:
        """Facts of this rank that others need."""
        return {}

    def fuse(self) -> str | None:
        """Operations that say the same here may share a buffer."""
        return None

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    def run(self, channel: Channel, info: dict[str, Any]) -> Any:
        """Carry it out, together with all other ranks; the result."""
        return self.run_together([self], channel)[0]

    @staticmethod
    def run_together(operations: Sequence[Any], channel: Channel) -> list[list[Tensor]]:
        """Carry out several that say the same in `fuse`, in one buffer; the results of each."""
        raise NotImplementedError


Pairs = list[tuple[Tensor, Tensor]]


def pairs_of(operations: Sequence[Operation], results: Sequence[Sequence[Tensor]]) -> Pairs:
    """The tensors that operations take and those in which they leave their results."""
    return [
        (source, target)
        for operation, targets in zip(operations, results, strict=True)
        for source, target in zip(operation.tensors, targets, strict=True)
        if source.numel()
    ]


@contextmanager
def one_buffer(pairs: Pairs, new: Callable[[int], Tensor]) -> Iterator[Tensor]:
    """A flat buffer with what the operations take, one after the other; the results are what it holds at the end. It is
    the memory of the result, where there is one.

    Args:
        new: makes it, of so many elements or, for tensors of several dtypes, bytes.
    """
    (source, target), *more = pairs
    if not more and is_plain(target):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        yield flat_memory(target)
        return
    buffer = new(sum(source.numel() for source, _ in pairs))
    torch.cat([source.reshape(-1) for source, _ in pairs], out=buffer)
    yield buffer
    for piece, (_, target) in zip(buffer.split([target.numel() for _, target in pairs]), pairs, strict=True):
        target.copy_(piece.view(target.shape))


class Scaled(Operation):
    """A reduction with a factor before and one after it."""

    def __init__(
        self, key: str, set_id: int, tensors: Sequence[Tensor], op: int, prescale: float, postscale: float,
        outputs: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(key, set_id, tensors)
        self.op, self.outputs = op, outputs
        self.prescale, self.postscale = number("prescale_factor", prescale), number("postscale_factor", postscale)

    def must_match(self) -> dict[str, Any]:
        scales = {"prescale factor": self.prescale, "postscale factor": self.postscale}
        return {**super().must_match(), "op": OP_NAMES[self.op], **scales}

    def results(self) -> list[Tensor]:
        """Tensors for the results: the inputs themselves in in-place operations."""
        return list(self.outputs) if self.outputs is not None else [torch.empty_like(t) for t in self.tensors]

    def finish(self, reduced: Tensor, size: int) -> None:
        if self.op == Average:
            divide(reduced, size)
        scale(reduced, self.postscale)


class AllReduce(Scaled):
    kind = "allreduce"

    def fuse(self) -> str | None:
        dtypes = {t.dtype for t in self.tensors}
        if len(dtypes) > 1 or self.op == Adasum or sum(t.nbytes for t in self.tensors) > FUSE_BELOW_BYTES:
            return None
        return " ".join(map(str, [*dtypes, self.device, *self.must_match().values()]))

    @staticmethod
    def run_together(operations: Sequence[Any], channel: Channel) -> list[list[Tensor]]:
        first = operations[0]
        results = [operation.results() for operation in operations]
        pairs = pairs_of(operations, results)
        for dtype in dict.fromkeys(source.dtype for source, _ in pairs):
            chosen = [(source, target) for source, target in pairs if source.dtype == dtype]
            with one_buffer(chosen, partial(channel.scratch, dtype=dtype, device=first.device)) as buffer:
                scale(buffer, first.prescale)
                channel.all_reduce(buffer, _REDUCTIONS[first.op])
                first.finish(buffer, channel.size)
        return results

    def run(self, channel: Channel, info: dict[str, Any]) -> list[Tensor]:
        if self.op != Adasum:
            return super().run(channel, info)
        results = self.results()
        for source, target in zip(self.tensors, results, strict=True):
            flat = source.reshape(-1).cpu()
            flat = (flat if flat.dtype == torch.float64 else flat.float()) * self.prescale
            target.copy_((adasum(flat, channel) * self.postscale).view(source.shape))
        return results


class AllGather(Operation):
    """The ranks' tensors along the first dimension. With `sparse`, of a sparse tensor's indices and values.

    Args:
        sparse: shape of the sparse tensor whose transposed indices and values `tensors` are.
        average: divide a sparse result by the number of ranks.

    Attributes:
        rows: once it has run, of each tensor: how many rows every rank of the set had, 0 where it has joined.
    """

    kind = "allgather"
    rows: Sequence[Sequence[int]]

    def __init__(
        self, key: str, set_id: int, tensors: Sequence[Tensor], sparse: Sequence[int] | None = None,
        average: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(key, set_id, tensors)
        self.sparse, self.average = sparse, average

    def must_match(self) -> dict[str, Any]:
        if self.sparse is None:
            return super().must_match()
        return {**super().must_match(), "sparse shape": list(self.sparse), "average": self.average}

    def run(self, channel: Channel, info: dict[str, Any]) -> list[Tensor]:
        self.rows = info["rows"]
        gathered = [channel.all_gather(t, rows) for t, rows in zip(self.tensors, self.rows, strict=True)]
        if self.sparse is None:
            return gathered
        indices, values = gathered
        total = torch.sparse_coo_tensor(indices.t(), values, tuple(self.sparse), check_invariants=True).coalesce()
        if self.average:
            divide(total.values(), channel.size)
        return [total]


class Broadcast(Operation):
    kind = "broadcast"
    outputs: Sequence[Tensor]

    def __init__(self, key: str, set_id: int, tensors: Sequence[Tensor], root: int, outputs: Sequence[Tensor]) -> None:
        super().__init__(key, set_id, tensors)
        self.root, self.outputs = root, outputs

    def must_match(self) -> dict[str, Any]:
        return {**super().must_match(), "root rank": self.root}

    def fuse(self) -> str | None:
        size = sum(t.nbytes for t in self.tensors)
        return f"broadcast {self.root} {self.device}" if size <= FUSE_BELOW_BYTES else None

    @staticmethod
    def run_together(operations: Sequence[Any], channel: Channel) -> list[list[Tensor]]:
        root = channel.ranks.index(operations[0].root)
        targets = [t for operation in operations for t in operation.outputs]
        whole = [t if is_plain(t) else elements_of(t).view(t.dtype).view(t.shape) for t in targets]
        sources = (elements_of(t) for operation in operations for t in operation.tensors)
        pairs = [(source, as_bytes(t)) for source, t in zip(sources, whole, strict=True) if t.numel()]
        if pairs:
            with one_buffer(pairs, partial(torch.empty, dtype=torch.uint8, device=targets[0].device)) as buffer:
                channel.broadcast(buffer, root)
        for target, there in zip(targets, whole, strict=True):
            if there is not target:
                target.copy_(there)
        return [list(operation.outputs) for operation in operations]


class AllToAll(Operation):
    kind = "alltoall"

    def __init__(self, key: str, set_id: int, tensor: Tensor, splits: list[int]) -> None:
        super().__init__(key, set_id, [tensor])
        self.splits = splits

    def per_rank(self) -> dict[str, Any]:
        return {"splits": self.splits}

    def run(self, channel: Channel, info: dict[str, Any]) -> tuple[Tensor, Tensor]:
        received = [splits[channel.rank] for splits in info["splits"]]
        result = channel.all_to_all(self.tensors[0], self.splits, received)
        return result, torch.tensor(received, dtype=torch.int32, device="cpu")


class ReduceScatter(Scaled):
    kind = "reducescatter"

    def run(self, channel: Channel, info: dict[str, Any]) -> list[Tensor]:
        return [self._reduce(t, channel) for t in self.tensors]

    def _reduce(self, tensor: Tensor, channel: Channel) -> Tensor:
        rows = shares(len(tensor), channel.size)
        mine = rows[channel.rank]
        if self.prescale != 1.0:
            tensor = tensor.clone()
            scale(tensor, self.prescale)
        parts = channel.all_to_all(tensor, rows, [mine] * channel.size)
        parts = parts.view(channel.size, mine, *tensor.shape[1:])
        result = reduce_rows(parts, _REDUCTIONS[self.op]).to(tensor.dtype)
        self.finish(result, channel.size)
        return result


class Barrier(Operation):
    """Does nothing: it waits until all ranks are ready for it."""

    kind = "barrier"

    def run(self, channel: Channel, info: dict[str, Any]) -> None:
        return None


def elements_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor, one after the other, as bytes: its own memory, if that is so already."""
    return as_bytes(tensor.resolve_conj().resolve_neg().contiguous())
