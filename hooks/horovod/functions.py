"""Broadcasts and gathers of whole models, optimizers and objects."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..training.loaded_values import parameters_of
from .gradients import checkpoint
from .gradients.residuals import CompressionState
from .optimizer_state import put_together, taken_apart
from .process_sets import ProcessSet, global_process_set
from .runtime.context import engine
from .runtime.handles import (
    allgather_operation,
    broadcast_operation,
    check,
    key_of,
    memory,
    overlaps,
    submit,
    synchronize,
)
from .runtime.operations import Broadcast


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give every rank the root's parameters, in place; typically a model's `state_dict()`.

    Args:
        params: a dictionary of tensors, or tensors, or pairs of name and tensor. What is no tensor stays as it is.
        root_rank: whose values all get.

    Raises:
        ValueError: `params` is none of these.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str | nn.Module):  # some iterate over modules
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(
            f"invalid params of type: {type(params).__name__}; expected a state_dict or named_parameters()"
        )
    if root_rank not in global_process_set.ranks:
        raise ValueError(f"root_rank={root_rank!r}: expected a rank below size() = {engine().size}")
    named = [(name, tensor) for name, tensor in pairs if isinstance(tensor, Tensor)]
    for name, tensor in named:
        # Any strides: parameters may be channels-last, and are no less worth it.
        check(tensor, "broadcast_parameters", contiguous=False)
        if overlaps(tensor):
            raise ValueError(
                f"parameter {name or tuple(tensor.shape)} is expanded: several of its elements share one place in "
                "memory, and cannot be set; pass tensor.contiguous()"
            )
    handles = []
    for name, tensor in named:
        place = [memory(tensor)]
        key = key_of("broadcast", name and f"parameter.{name}", global_process_set)
        handles.append(submit(Broadcast(*key, place, root_rank, place)))
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's `obj`: anything that pickle, or torch.save, can carry.

    Args:
        obj: read on the root only.
        root_rank: a global rank of the set.
        name: of the operation.
        process_set: the ranks.

    Returns:
        On the root `obj` itself, elsewhere a copy.

    Raises:
        ValueError: the root's cannot be pickled; on every rank.
    """
    is_root = engine().rank == root_rank
    pack = partial(_to_bytes, obj) if is_root else None
    found = _from_root("broadcast_object", pack, root_rank, name and f"object.{name}", process_set)
    return obj if is_root else found


def _from_root(
    kind: str,
    pack: Callable[[], Tensor] | None,
    root: int,
    base: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, of which `pack` gives the bytes there; other ranks have none. If it raises, every rank raises
    ValueError."""
    data, problem = _packed(pack) if pack else (torch.empty(0, dtype=torch.uint8, device="cpu"), None)
    length = torch.tensor([data.numel()], device="cpu")
    _broadcast(length, root, base and f"{base}.size", process_set)
    if pack is None:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    _broadcast(data, root, base, process_set)
    return _unpacked(kind, [data], problem)[0]


def _broadcast(tensor: Tensor, root: int, name: str | None, process_set: ProcessSet) -> None:
    key = key_of("broadcast", name, process_set)
    synchronize(submit(broadcast_operation(key, tensor, tensor, root, process_set)))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The `obj` of each rank of the set that has not joined, in their order: anything that pickle, or torch.save, can
    carry.

    Raises:
        ValueError: some rank's cannot be pickled; on every rank.
    """
    data, problem = _packed(partial(_to_bytes, obj))
    operation = allgather_operation(key_of("allgather", name and f"object.{name}", process_set), [data])
    (whole,) = synchronize(submit(operation))
    return _unpacked("allgather_object", [part for part in whole.split(operation.rows[0]) if len(part)], problem)


class _NotPacked(str):
    """The reason, which a rank sends in the place of an object that it cannot pack."""


def _packed(pack: Callable[[], Tensor]) -> tuple[Tensor, Exception | None]:
    """The bytes that `pack` gives, or, if it raises, those of the reason, for which the others wait, and the error."""
    try:
        return pack(), None
    except Exception as error:  # whatever the object's own methods raise
        # With the rank: where some have joined, there are fewer messages than ranks.
        return _to_bytes(_NotPacked(f"rank {engine().rank}: {type(error).__name__}: {error}")), error


def _unpacked(kind: str, messages: Sequence[Tensor], problem: Exception | None) -> list[Any]:
    found = [_from_bytes(data) for data in messages]
    if told := [one for one in found if isinstance(one, _NotPacked)]:
        text = f"{kind} sends what pickle, or torch.save, can carry, and not what there is on {'; '.join(told)}"
        raise ValueError(text) from problem
    return found


def _to_bytes(obj: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(obj, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    # From the other ranks of this very job, which run the same script.
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=here, weights_only=False)


def here(storage: Any, location: str) -> Any:
    """Move a tensor of some rank's GPU to this rank's."""
    if location.startswith("cuda") and torch.cuda.is_available():
        return storage.cuda(torch.cuda.current_device())
    return storage


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: nn.Module | None = None) -> None:
    """Give every rank the root's optimizer state and hyperparameters. No parameter changes, and no step is made.

    Residuals of compressed gradients belong to a rank and stay, unless the root has consolidated ones, which are then
    everybody's (`DistributedOptimizer`).

    Args:
        optimizer: any but LBFGS; made alike on every rank. It may be fresh on some.
        root_rank: whose state all get.
        model: whose parameters they are; not needed.

    Raises:
        ValueError: the optimizer is LBFGS, whose state is tied to one process, or the ranks' optimizers differ in their
            numbers of parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):  # the root alone would find out
        raise ValueError(f"broadcast_optimizer_state takes a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it belongs to the closure of one process")
    is_root = engine().rank == root_rank
    # Structure and numbers first, then the tensors' memory, as it is, one by one.
    counts = [len(group["params"]) for group in optimizer.param_groups]
    state: CompressionState | None = getattr(optimizer, "_compression_state", None)  # of a DistributedOptimizer
    own = None if state is None or not is_root else checkpoint.shared(state)
    more: dict[str, Any] = {"gradwire": own}
    exchanges: Any = optimizer if hasattr(optimizer, "follow_broadcast") else None  # of gradwire.optim
    memories: list[Tensor] = []

    def described() -> Tensor:
        more["exchanges"] = exchanges and exchanges.shared()
        data, places, found = taken_apart(optimizer, **more)
        memories.extend(found)
        return _to_bytes((counts, checkpoint.keeps_feedback(own), data, places))

    pack = described if is_root else None
    theirs, kept, data, places = _from_root("broadcast_optimizer_state", pack, root_rank)
    every = allgather_object((counts, None if state is None or not state.included else not state.feedback))
    if any(other != theirs for other, _ in every):
        raise ValueError(
            f"the optimizer has groups of {counts} parameters here, on rank {root_rank} of {theirs}: make it alike on "
            "all ranks"
        )
    if state is not None:
        checkpoint.check_broadcast(state, kept, [fresh for _, fresh in every])
    if not is_root:
        memories = [place.make(parameters_of(optimizer)) for place in places]
    broadcast_parameters([(f"optimizer.{i}", t) for i, t in enumerate(memories) if t.numel()], root_rank)
    if not is_root:
        more = put_together(optimizer, data, places, memories)
        if state is not None:
            checkpoint.follow_broadcast(state, more["gradwire"])
    if exchanges is not None:
        exchanges.follow_broadcast(more["exchanges"])
