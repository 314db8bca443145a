"""The operations: each has a request, which it announces, and a run, once all ranks are ready."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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


class Operation(ABC):
    """One operation of one rank.

    Args:
        key: what the ranks call it.
        set_id: its process set.
        tensors: what this rank puts in.
        no_gradient: this rank has nothing of its own, and goes along with what the others announce.
    """

    kind: ClassVar[str]
    #: Tensors that take the results, if there are any already.
    outputs: Sequence[Tensor] | None = None
    #: Of gradients: by what a GradScaler has multiplied them, where that is known.
    loss_scale: float | None = None

    def __init__(self, key: str, set_id: int, tensors: Sequence[Tensor] = (), no_gradient: bool = False) -> None:
        self.key, self.set_id, self.tensors, self.no_gradient = key, set_id, list(tensors), no_gradient

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

    @staticmethod
    def run_together(operations: Sequence[Any], channel: Channel) -> list[list[Tensor]]:
        """Carry out several that say the same in `fuse`, in one buffer; the results of each."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @abstractmethod
    def run(self, channel: Channel, info: dict[str, Any]) -> Any:
        """Carry it out, together with all other ranks; the result."""


class Scaled(Operation):
    """A reduction with a factor before and one after it."""

    def __init__(
        self, key: str, set_id: int, tensors: Sequence[Tensor], op: int, prescale: float, postscale: float,
        outputs: Sequence[Tensor] | None = None, no_gradient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(key, set_id, tensors, no_gradient)
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
        dtypes = sorted({str(t.dtype) for t in self.tensors})
        if sum(t.numel() * t.element_size() for t in self.tensors) > FUSE_BELOW_BYTES:
            return None
        return " ".join(map(str, [*dtypes, self.device, *self.must_match().values()])) if len(dtypes) == 1 else None

    def run(self, channel: Channel, info: dict[str, Any]) -> list[Tensor]:
        return run_fused([self], channel)[0]

    @staticmethod
    def run_together(operations: Sequence[Any], channel: Channel) -> list[list[Tensor]]:
        return run_fused(operations, channel)


def run_fused(operations: Sequence[AllReduce], channel: Channel) -> list[list[Tensor]]:
    """Allreduces of one dtype and kind, in one buffer; the results of each."""
    first = operations[0]
    results = [operation.results() for operation in operations]
    pairs = [
        (source, target)
        for operation, targets in zip(operations, results, strict=True)
        for source, target in zip(operation.tensors, targets, strict=True)
        if source.numel()
    ]
    for dtype in dict.fromkeys(source.dtype for source, _ in pairs):
        chosen = [(source, target) for source, target in pairs if source.dtype == dtype]
        if len(chosen) == 1 and is_plain(chosen[0][1]):
            source, target = chosen[0]
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)
            buffer = flat_memory(target)
        else:
            buffer = channel.scratch(sum(source.numel() for source, _ in chosen), dtype, chosen[0][0].device)
            torch.cat([source.reshape(-1) for source, _ in chosen], out=buffer)
        scale(buffer, first.prescale)
        channel.all_reduce(buffer, _REDUCTIONS[first.op])
        first.finish(buffer, channel.size)
        if len(chosen) > 1 or buffer.data_ptr() != chosen[0][1].data_ptr():
            pieces = buffer.split([target.numel() for _, target in chosen])
            for piece, (_, target) in zip(pieces, chosen, strict=True):
                target.copy_(piece.view(target.shape))
    return results


class AdasumReduce(Scaled):
    kind = "adasum"

    def run(self, channel: Channel, info: dict[str, Any]) -> list[Tensor]:
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

    def run(self, channel: Channel, info: dict[str, Any]) -> list[Tensor]:
        root = channel.ranks.index(self.root)
        for source, target in zip(self.tensors, self.outputs, strict=True):
            if source.data_ptr() != target.data_ptr() and channel.rank == root:
                target.copy_(source)
            if is_plain(target):
                channel.broadcast(target, root)
            else:
                whole = target.resolve_conj().resolve_neg().contiguous()
                channel.broadcast(whole, root)
                target.copy_(whole)
        return list(self.outputs)

    @staticmethod
    def run_together(operations: Sequence[Any], channel: Channel) -> list[list[Tensor]]:
        root = channel.ranks.index(operations[0].root)
        pairs = [
            (source, target)
            for operation in operations
            for source, target in zip(operation.tensors, operation.outputs, strict=True)
        ]
        sizes = [source.nbytes for source, _ in pairs]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=operations[0].device)
        if channel.rank == root:
            torch.cat([elements_of(source) for source, _ in pairs], out=buffer)
        channel.broadcast(buffer, root)
        for piece, (source, target) in zip(buffer.split(sizes), pairs, strict=True):
            if channel.rank != root or source.data_ptr() != target.data_ptr():
                # A copy, whose address suits any dtype.
                target.copy_(piece.clone().view(target.dtype).view(target.shape))
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
