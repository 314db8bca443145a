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
from .context import world
from .engine import Pending
from .operations import (
    OP_NAMES,
    Adasum,
    AdasumReduce,
    AllGather,
    AllReduce,
    AllToAll,
    Average,
    Broadcast,
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
    engine = world().engine
    with engine.submitting:
        if isinstance(operation.key, Unnumbered):
            operation.key = operation.key.numbered(world().next_name)
        pending = engine.announce(operation)
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


class Unnumbered(str):
    """The key of a nameless operation. It is numbered at submission, so a call rejected on one rank does not shift
    numbering."""

    _place: tuple[str, int]

    def __new__(cls, kind: str, set_id: int) -> Unnumbered:
        new = super().__new__(cls, _key(kind, "noname", set_id))
        new._place = kind, set_id
        return new

    def numbered(self, next_name: Callable[[str, int], str]) -> str:
        """The key with the next number."""
        kind, set_id = self._place
        return _key(kind, next_name(kind, set_id), set_id)


def _key(kind: str, name: str, set_id: int) -> str:
    return f"{kind}.{name}" + (f" in process set {set_id}" if set_id else "")


def key_of(kind: str, name: str | None, process_set: ProcessSet) -> tuple[str, int]:
    """An operation's key, the same on all ranks, and its process set's id. Nameless ones are numbered, by kind and set.

    Raises:
        ValueError: this process is not in the process set, or that is not registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={process_set!r}: expected what add_process_set() returns")
    here, set_id = world(), process_set.process_set_id
    if set_id is None:
        raise ValueError(f"{process_set} is not registered: pass it to add_process_set() on every rank first")
    if not process_set.included():
        raise ValueError(f"rank {here.rank} is not in {process_set}: call {kind} on ranks {process_set.ranks} only")
    return Unnumbered(kind, set_id) if name is None else _key(kind, name, set_id), set_id


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


def unusual(tensor: Tensor) -> str | None:
    """The reason why the engine cannot reach the memory of a tensor, if there is one."""
    if tensor.device.type == "meta":
        return "a tensor on the meta device"
    if tensor.is_quantized or tensor.is_nested:
        return "a quantized tensor" if tensor.is_quantized else "a nested tensor"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}: pass the tensor that it wraps"
    return None


def overlaps(tensor: Tensor) -> bool:
    """True if elements share a place in memory, as in an expanded tensor, which nothing can be written to."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def check_dtype(tensor: Tensor, kind: str, dtypes: Sequence[torch.dtype]) -> None:
    """Raises ValueError if the tensor's dtype is none of these."""
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"Tensor type {tensor.dtype} is not supported by {kind}: convert it to one of {names}")


def check(tensor: Any, kind: str, dtypes: Sequence[torch.dtype] | None = None, contiguous: bool = True) -> None:
    """Raises ValueError unless an operation can take the tensor."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{kind} takes a torch.Tensor, not a {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{kind} takes dense tensors, not {tensor.layout}: use sparse_allreduce_async, or tensor.to_dense()"
        )
    what = unusual(tensor)
    if what is not None:
        raise ValueError(f"{kind} takes tensors with elements in memory, not {what}")
    if dtypes is not None:
        check_dtype(tensor, kind, dtypes)
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
    key: tuple[str, int], tensors: Sequence[Tensor], op: int, prescale: float, postscale: float,
    outputs: Sequence[Tensor] | None = None, contiguous: bool = True, no_gradient: bool = False,
    codec: CodecCompression | None = None, state: CompressionState | None = None, names: Sequence[str] = (),
    nameless: bool = False,
) -> Scaled:  # fmt: skip
    """The allreduce that `op` and `codec` ask for. With a codec, either `state` and `names`, by which it keeps what the
    codec leaves out, or that is kept by the name of the operation, unless it is `nameless`: its key is then a number.

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
    arguments = (*key, [elements(t) for t in tensors], op, prescale, postscale)
    if op == Adasum:
        size = len(world().engine.members(key[1]))
        if size & (size - 1):
            raise ValueError(f"Adasum pairs the ranks and needs a power of two of them, not {size}: use op=hvd.Average")
        if codec is not None:
            raise ValueError(f"op=Adasum cannot be combined with {codec.codec}: use Compression.fp16 or none")
        return AdasumReduce(*arguments, outputs=outputs, no_gradient=no_gradient)
    if codec is None:
        return AllReduce(*arguments, outputs=outputs, no_gradient=no_gradient)
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
        if nameless and codec.keeps:
            raise ValueError(
                f"an allreduce by {codec.codec} needs a name: what it leaves out is kept by that and added the next "
                "time, and else would never arrive; pass name=…, the same each time, or "
                "compression=Compression.codec(…, error_feedback=False) to do without"
            )
        state = world().engine.states.by_name(codec)
        name = f"noname in process set {key[1]}" if nameless else key[0]
        names = [f"{name}.{i}" for i in range(len(tensors))]
        state.check_shapes(names[0], [t.shape for t in tensors])
    return CompressedReduce(
        *arguments, outputs=outputs, no_gradient=no_gradient, names=names, state=state, keep=not nameless
    )


def allgather_operation(key: tuple[str, int], tensors: Sequence[Tensor]) -> AllGather:
    """Raises ValueError for scalars."""
    for tensor in tensors:
        check(tensor, "allgather")
        if tensor.dim() == 0:
            raise ValueError("allgather joins tensors along their first dimension, and a scalar has none: unsqueeze it")
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
    check(tensor, "alltoall")
    if tensor.dim() == 0:
        raise ValueError("alltoall splits tensors along their first dimension, and a scalar has none: unsqueeze it")
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
        check(tensor, "reducescatter", SUMMABLE)
        if tensor.dim() == 0:
            raise ValueError("reducescatter splits tensors along their first dimension, and a scalar has none")
    return ReduceScatter(*key, [elements(t) for t in tensors], op, prescale, postscale)
