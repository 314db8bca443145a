"""The operations on tensors, as `horovod.torch.mpi_ops` has them.

Each comes up to four times: `operation` waits for the result, and autograd goes back through it (`autograd`);
`operation_async` returns a handle for `poll` and `synchronize`; a trailing underscore means in place. Operations match
across ranks by `name`, in whatever order the ranks call them; those without a name match by their number. Until an
operation has been synchronized its tensors must stay as they are.

Common arguments: `name`; `process_set`, the ranks that take part, by default all; `op`, one of `Average`, `Sum`,
`Adasum`, `Min`, `Max`, `Product`; `prescale_factor` and `postscale_factor`, by which tensors are multiplied before and
after the reduction. The average of integers is truncated toward zero.

All raise ValueError for arguments that cannot work, and HorovodInternalError, when they are synchronized, if ranks
disagree on dtype, shape, op or root, or if a rank is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.untraced import untraced
from .compression import Compression, codec_of
from .errors import HorovodInternalError
from .gradients import autograd
from .process_sets import ProcessSet, add_process_set, global_process_set, process_set_ids, remove_process_set
from .runtime.compressed import Join
from .runtime.context import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    engine,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from .runtime.handles import (
    allgather_operation,
    allreduce_operation,
    alltoall_operation,
    broadcast_operation,
    first,
    key_of,
    poll,
    reducescatter_operation,
    reduction,
    sparse_operation,
    submit,
    synchronize,
)
from .runtime.operations import Adasum, Average, Barrier, Max, Min, Product, Sum

# -- allreduce ---------------------------------------------------------------------------------------------------------


@untraced
def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """The reduction of `tensor` over the ranks, by default its average; `tensor` stays as it is. Differentiable.

    A codec as `compression` leaves a residual, kept by `name` and added the next time; the gradient is not compressed.

    Raises:
        ValueError: both `op` and `average` were given; a codec with another op than Average and Sum; or one that leaves
            something out, without a name, or with that of a tensor of another shape.
    """
    return _allreduce([tensor], "allreduce", average, name, compression, op, prescale_factor, postscale_factor,
                      process_set)[0]  # fmt: skip


@untraced
def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start an allreduce; a handle."""
    op, key = reduction(op, average), key_of("allreduce", name, process_set)
    return submit(allreduce_operation(key, [tensor], op, prescale_factor, postscale_factor), first)


@untraced
def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> Tensor:  # fmt: skip
    """Replace `tensor` by its reduction over the ranks, and return it."""
    synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))
    return tensor


@untraced
def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start an allreduce in place; a handle."""
    op, key = reduction(op, average), key_of("allreduce", name, process_set)
    operation = allreduce_operation(key, [tensor], op, prescale_factor, postscale_factor, in_place=True)
    return submit(operation, lambda results: tensor)


@untraced
def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """As `allreduce`, of several tensors that are reduced together, once all of them are there. Differentiable.

    A codec compresses them as one: top-k chooses among all their elements.
    """
    return _allreduce(tensors, "grouped_allreduce", average, name, compression, op, prescale_factor, postscale_factor,
                      process_set)  # fmt: skip


def _allreduce(
    tensors: Sequence[Tensor], kind: str, average: bool | None, name: str | None, compression: Any, op: int | None,
    prescale: float, postscale: float, process_set: ProcessSet,
) -> list[Tensor]:  # fmt: skip
    arguments, codec = (kind, name, process_set, reduction(op, average), prescale, postscale), codec_of(compression)
    if codec is not None:
        return list(autograd.allreduce(tensors, *arguments, codec))
    return _compressed(compression, tensors, autograd.allreduce, *arguments)


@untraced
def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start a grouped allreduce; a handle, whose result is a list."""
    op, key = reduction(op, average), key_of("grouped_allreduce", name, process_set)
    return submit(allreduce_operation(key, list(tensors), op, prescale_factor, postscale_factor))


@untraced
def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> list[Tensor]:  # fmt: skip
    """Replace the tensors by their reductions over the ranks, and return them."""
    result = list(tensors)
    synchronize(grouped_allreduce_async_(result, average, name, op, prescale_factor, postscale_factor, process_set))
    return result


@untraced
def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set,
) -> int:  # fmt: skip
    """Start a grouped allreduce in place; a handle."""
    op, key, tensors = reduction(op, average), key_of("grouped_allreduce", name, process_set), list(tensors)
    operation = allreduce_operation(key, tensors, op, prescale_factor, postscale_factor, in_place=True)
    return submit(operation, lambda results: tensors)


@untraced
def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum or average of sparse COO tensors, by an all-gather of their indices and values.

    Returns:
        A function that waits for the result, a coalesced sparse tensor.
    """
    key = key_of("sparse_allreduce", name, process_set)
    return functools.partial(synchronize, submit(sparse_operation(key, tensor, reduction(op, None)), first))


def _compressed(
    compression: Any, tensors: Sequence[Tensor], reduce: Callable[..., Any], *arguments: Any
) -> list[Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = reduce([tensor for tensor, _ in pairs], *arguments)
    return [compression.decompress(t, context) for t, (_, context) in zip(reduced, pairs, strict=True)]


# -- allgather, broadcast, alltoall ------------------------------------------------------------------------------------


@untraced
def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors, one after the other along the first dimension, in which they may differ. Differentiable."""
    return autograd.allgather([tensor], "allgather", name, process_set)[0]


@untraced
def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an allgather; a handle."""
    return submit(allgather_operation(key_of("allgather", name, process_set), [tensor]), first)


@untraced
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """As `allgather`, of several tensors at once. Differentiable."""
    return list(autograd.allgather(tensors, "grouped_allgather", name, process_set))


@untraced
def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a grouped allgather; a handle, whose result is a list."""
    return submit(allgather_operation(key_of("grouped_allgather", name, process_set), list(tensors)))


@untraced
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The `tensor` of `root_rank`, a global rank; this rank's stays as it is. Differentiable."""
    return autograd.broadcast(tensor, root_rank, name, process_set)


@untraced
def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast; a handle."""
    key = key_of("broadcast", name, process_set)
    return submit(broadcast_operation(key, tensor, torch.empty_like(tensor), root_rank, process_set), first)


@untraced
def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replace `tensor` by what it is on `root_rank`, and return it."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


@untraced
def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast in place; a handle."""
    key = key_of("broadcast", name, process_set)
    return submit(broadcast_operation(key, tensor, tensor, root_rank, process_set), lambda results: tensor)


@untraced
def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the next `splits[r]` rows to rank r of the set, and get its rows for this rank. Differentiable.

    Args:
        tensor: whose first dimension is split.
        splits: a list, or an int32 tensor, of one number for each rank; None: equal parts.

    Returns:
        The rows from all ranks, in their order; with `splits`, also how many came from each, int32.
    """
    result, received = autograd.alltoall(tensor, splits, "alltoall", name, process_set)
    return result if splits is None else (result, received)


@untraced
def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an alltoall; a handle, whose result is always the pair."""
    key = key_of("alltoall", name, process_set)
    return submit(alltoall_operation(key, tensor, splits, process_set.size() or 0))


# -- reducescatter -----------------------------------------------------------------------------------------------------


@untraced
def reducescatter(
    tensor: Tensor, name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """This rank's share of the reduction, by the first dimension; the first ranks take the remainder. Differentiable.

    Raises:
        ValueError: `compression` is a codec, or `op` is Adasum.
    """
    return _scatter([tensor], "reducescatter", name, compression, op, process_set, prescale_factor, postscale_factor)[0]


@untraced
def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Start a reducescatter; a handle."""
    key = key_of("reducescatter", name, process_set)
    return submit(reducescatter_operation(key, [tensor], reduction(op, None), prescale_factor, postscale_factor), first)


@untraced
def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: Any = Compression.none, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """As `reducescatter`, of several tensors at once. Differentiable."""
    return _scatter(tensors, "grouped_reducescatter", name, compression, op, process_set, prescale_factor,
                    postscale_factor)  # fmt: skip


@untraced
def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: int = Average,
    process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Start a grouped reducescatter; a handle, whose result is a list."""
    key = key_of("grouped_reducescatter", name, process_set)
    return submit(reducescatter_operation(key, list(tensors), reduction(op, None), prescale_factor, postscale_factor))


def _scatter(
    tensors: Sequence[Tensor], kind: str, name: str | None, compression: Any, op: int, process_set: ProcessSet,
    prescale: float, postscale: float,
) -> list[Tensor]:  # fmt: skip
    if codec_of(compression) is not None:
        raise ValueError(f"{kind} cannot use {compression}: use Compression.none, .fp16 or .bf16, or allreduce")
    arguments = kind, name, process_set, reduction(op, None), prescale, postscale
    return _compressed(compression, tensors, autograd.reducescatter, *arguments)


# -- waiting for the others --------------------------------------------------------------------------------------------


@untraced
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the set has called this."""
    synchronize(submit(Barrier(*key_of("barrier", None, process_set))))


@untraced
def join(device: int = -1) -> int:
    """This rank has no more data; wait until all say so. Until then it takes part in the others' allreduces with zeros,
    and in their allgathers with no rows; other operations fail.

    Args:
        device: number of the GPU for these zeros, where the others' tensors are on GPUs. By default the one that this
            rank has used last, or else the current one.

    Returns:
        The last rank to join.
    """
    here = engine()
    if torch.cuda.is_available() and (device >= 0 or here.device is None):
        here.device = torch.device("cuda", device if device >= 0 else torch.cuda.current_device())
    last = int(synchronize(submit(Join(here.states))))
    here.joined()
    return last


__all__ = [
    "Adasum", "Average", "HorovodInternalError", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set",
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "ccl_built",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "poll", "process_set_ids", "rank", "reducescatter",
    "reducescatter_async", "remove_process_set", "rocm_built", "shutdown", "size", "sparse_allreduce_async",
    "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip
