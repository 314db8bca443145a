"""From a script's call to an operation under way: checks, names, handles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...comm.untraced import untraced
from ..compression import CodecCompression
from ..gradients.residuals import CompressionState
from ..process_sets import ProcessSet
from .arithmetic import integers
from .compressed import CompressedReduce
from .context import engine
from .engine import Pending
from .operations import (
    OP_NAMES,
    Adasum,
    AllGather,
    AllReduce,
    AllToAll,
    Average,
    Broadcast,
    Nameless,
    Operation,
    ReduceScatter,
    Scaled,
    Sum,
)

#: Dtypes that the backends can add up.
SUMMABLE = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
FLOATING = SUMMABLE[4:]
#: Dtypes that the codecs take.
COMPRESSIBLE = (torch.float32, torch.float16, torch.bfloat16)

_handles: dict[int, tuple[Pending, Callable[[Any], Any]]] = {}
_next_handle = 0


def submit(operation: Operation, finish: Callable[[Any], Any] = lambda result: result) -> int:
    """Start an operation; `finish` turns its result into that of `synchronize`."""
    global _next_handle
    here = engine()
    with here.submitting:
        pending = here.announce(operation)
        handle, _next_handle = _next_handle, _next_handle + 1
        _handles[handle] = (pending, finish)
    return handle


@untraced
def poll(handle: int) -> bool:
    """True if `synchronize(handle)` would return at once: the operation has ended, well or not.

    Raises:
        ValueError: no operation has had this handle.
    """
    if handle not in _handles:
        if isinstance(handle, int) and 0 <= handle < _next_handle:
            return True
        raise ValueError(f"handle={handle!r}: expected what an asynchronous operation returned")
    return _handles[handle][0].poll()


@untraced
def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None if the handle is not known, or was synchronized before.

    Raises:
        HorovodInternalError: the ranks disagree about the operation, or a rank is gone.
    """
    if handle not in _handles:
        return None
    pending, finish = _handles.pop(handle)
    return finish(pending.wait())


def first(results: Sequence[Any]) -> Any:
    """The result of an operation on one tensor."""
    return results[0]


def key_of(kind: str, name: str | None, process_set: ProcessSet) -> tuple[str, int]:
    """An operation's key, the same on all ranks, and its process set's id.

    Raises:
        ValueError: this process is not in the process set, or that is not registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r}: expected what add_process_set() returns")
    rank, set_id = engine().rank, process_set.process_set_id
    if set_id is None:
        raise ValueError(f"{process_set} is not registered: pass it to add_process_set() on every rank first")
    if not process_set.included():
        raise ValueError(f"rank {rank} is not in {process_set}: call {kind} on ranks {process_set.ranks} only")
    key = f"{kind}.{'noname' if name is None else name}" + (f" in process set {set_id}" if set_id else "")
    return Nameless(key) if name is None else key, set_id


def reduction(op: int | None, average: bool | None) -> int:
    """`op`, or that of the deprecated `average`.

    Raises:
        ValueError: both were given, or there is no such op.
    """
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn(
            "Parameter `average` has been replaced with `op`: pass op=hvd.Average or op=hvd.Sum.",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if op is None:
        return Average
    if isinstance(op, bool) or op not in range(len(OP_NAMES)):
        raise ValueError(f"op={op!r}: expected one of hvd.{', hvd.'.join(OP_NAMES)}")
    return op


def overlaps(tensor: Tensor) -> bool:
    """True if elements share a place in memory, as in an expanded tensor, which nothing can be written to."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def check_dtype(tensor: Tensor, kind: str, dtypes: Sequence[torch.dtype]) -> None:
    """Raises ValueError if the tensor's dtype is none of these."""
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"Tensor type {tensor.dtype} is not supported by {kind}: convert it to one of {names}")


def check(
    tensor: Any, kind: str, dtypes: Sequence[torch.dtype] | None = None, contiguous: bool = True, rows: bool = False
) -> None:
    """Raises ValueError unless an operation can take the tensor, by its `rows` or as it is."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{kind} takes a torch.Tensor, not a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{kind} takes dense tensors, not {tensor.layout}: use sparse_allreduce_async, or tensor.to_dense()"
        )
    unusual = {
        "a tensor on the meta device": tensor.device.type == "meta",
        "a quantized tensor": tensor.is_quantized,
        "a nested tensor": tensor.is_nested,
        f"a {type(tensor).__name__}: pass the tensor that it wraps": is_traceable_wrapper_subclass(tensor),
    }
    for what, found in unusual.items():
        if found:
            raise ValueError(f"{kind} takes tensors with elements in memory, not {what}")
    if dtypes is not None:
        check_dtype(tensor, kind, dtypes)
    if rows and tensor.dim() == 0:
        raise ValueError(f"{kind} joins or splits tensors along their first dimension, a scalar has none: unsqueeze it")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"Tensor is required to be contiguous by {kind}: pass tensor.contiguous()")


def elements(tensor: Tensor) -> Tensor:
    """The tensor that an operation sends: without history, and with conjugation and negation carried out in memory."""
    return memory(tensor.detach().resolve_conj().resolve_neg())


def memory(tensor: Tensor) -> Tensor:
    """The tensor without its history, writable by the engine's threads.

    A tensor made in torch.inference_mode is read-only outside of that mode, which is a thread's own.
    """
    with torch.inference_mode(False):
        if not tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return tensor.detach()
        place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return place.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def allreduce_operation(
    key: tuple[str, int], tensors: Sequence[Tensor], op: int, prescale: float = 1.0, postscale: float = 1.0,
    in_place: bool = False, contiguous: bool = True, codec: CodecCompression | None = None,
    state: CompressionState | None = None, names: Sequence[str] = (),
) -> Scaled:  # fmt: skip
    """The allreduce that `op` and `codec` ask for. With a codec, either `state` and `names`, by which it keeps what the
    codec leaves out, or that is kept by the name of the operation, unless it has none.

    Raises:
        ValueError: it cannot be done with these tensors, or there would be something to keep, but no name for it.
    """
    if not tensors:
        raise ValueError("allreduce needs at least one tensor")
    kinds = {Adasum: FLOATING}.get(op, SUMMABLE)
    for tensor in tensors:
        check(tensor, f"allreduce with op={OP_NAMES[op]}", kinds if codec is None else COMPRESSIBLE, contiguous)
    if len({t.device for t in tensors}) > 1:
        raise ValueError("the tensors of a grouped allreduce must be on one device")
    outputs = [memory(t) for t in tensors] if in_place else None
    arguments = (*key, [elements(t) for t in tensors], op, prescale, postscale, outputs)
    if op == Adasum:
        size = len(engine().members(key[1]))
        if size & (size - 1):
            raise ValueError(f"Adasum pairs the ranks and needs a power of two of them, not {size}: use op=hvd.Average")
        if codec is not None:
            raise ValueError(f"op=Adasum cannot be combined with {codec.codec}: use Compression.fp16 or none")
    if codec is None:
        return AllReduce(*arguments)
    if op not in (Average, Sum):
        raise ValueError(f"op={OP_NAMES[op]} cannot be combined with {codec.codec}: use op=hvd.Average or hvd.Sum")
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError(f"tensors that {codec.codec} compresses together must have one dtype")
    if state is None:
        if codec.strategy.largest_norm is not None:
            raise ValueError(
                f"{codec.strategy} scales the gradients of all parameters together, and an allreduce knows its own "
                "tensors alone: use it in a DistributedOptimizer, or leave clip out"
            )
        if isinstance(key[0], Nameless) and codec.keeps:
            raise ValueError(
                f"an allreduce by {codec.codec} needs a name: what it leaves out is kept by that and added the next "
                "time, and else would never arrive; pass name=…, the same each time, or "
                "compression=Compression.codec(…, error_feedback=False) to do without"
            )
        state = engine().states.by_name(codec)
        names = [f"{key[0]}.{i}" for i in range(len(tensors))]
        state.check_shapes(names[0], [t.shape for t in tensors])
    return CompressedReduce(*arguments, names=names, state=state, keep=not isinstance(key[0], Nameless))


def allgather_operation(key: tuple[str, int], tensors: Sequence[Tensor]) -> AllGather:
    """Raises ValueError for scalars."""
    for tensor in tensors:
        check(tensor, "allgather", rows=True)
    return AllGather(*key, [elements(t) for t in tensors])


def sparse_operation(key: tuple[str, int], tensor: Tensor, op: int) -> AllGather:
    """Sum or average of sparse tensors, by all-gather of their indices and values.

    Raises:
        ValueError: the tensor is not sparse (COO), or op is another one.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.sparse_coo:
        raise ValueError("sparse_allreduce_async takes a sparse COO tensor: use allreduce_async for dense ones")
    if op not in (Average, Sum):
        raise ValueError(f"op={OP_NAMES[op]}: sparse tensors can be summed or averaged")
    check_dtype(tensor, "sparse_allreduce_async", SUMMABLE)
    tensor = tensor.detach().coalesce()
    parts = [tensor.indices().t().contiguous(), tensor.values().contiguous()]
    return AllGather(*key, parts, sparse=list(tensor.shape), average=op == Average)


def broadcast_operation(key: tuple[str, int], tensor: Tensor, output: Tensor, root: int, ps: ProcessSet) -> Broadcast:
    """Raises ValueError if the root is not one of the ranks."""
    check(tensor, "broadcast")
    if root not in ps.ranks:
        raise ValueError(f"root_rank={root!r}: expected a global rank among {ps.ranks}")
    return Broadcast(*key, [elements(tensor)], root, [memory(output)])


def alltoall_operation(key: tuple[str, int], tensor: Tensor, splits: Any, size: int) -> AllToAll:
    """Raises ValueError for splits that do not divide the tensor's rows among the ranks."""
    check(tensor, "alltoall", rows=True)
    if splits is None:
        if len(tensor) % size:
            raise ValueError(f"{len(tensor)} rows cannot be split equally among {size} ranks: pass splits")
        return AllToAll(*key, elements(tensor), [len(tensor) // size] * size)
    if isinstance(splits, Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError(f"splits is {splits.dtype} with {splits.dim()} dimensions: expected int32 with one")
        splits = splits.tolist()
    expected = f"{size} whole numbers, none negative, that add up to {len(tensor)} rows"
    counts = integers("splits", splits, expected)
    if len(counts) != size or min(counts) < 0 or sum(counts) != len(tensor):
        raise ValueError(f"splits={counts}: expected {expected}")
    return AllToAll(*key, elements(tensor), counts)


def reducescatter_operation(
    key: tuple[str, int], tensors: Sequence[Tensor], op: int, prescale: float, postscale: float
) -> ReduceScatter:
    """Raises ValueError for scalars and for Adasum."""
    if op == Adasum:
        raise ValueError("op=Adasum: reducescatter takes hvd.Average, hvd.Sum, hvd.Min, hvd.Max or hvd.Product")
    for tensor in tensors:
        check(tensor, "reducescatter", SUMMABLE, rows=True)
    return ReduceScatter(*key, [elements(t) for t in tensors], op, prescale, postscale)
