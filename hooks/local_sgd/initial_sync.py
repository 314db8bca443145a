"""Each rank's own model: checks that it can be trained alone, and that it can take the first rank's values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..comm.group import Group
from ..training.names import names_of, plain_names


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter of `fully_shard`; another tensor itself."""
    shard: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return shard


def ranks_inside(parameters: Iterable[Tensor], process_group: Any = None) -> list[int]:
    """The global ranks that share the model; none, if every rank has all of it.

    Args:
        process_group: with which this rank exchanges; None: with other replicas.

    Raises:
        ValueError: parameters are shared by different ranks, or by ranks of the process group.
    """
    meshes = {tuple(p.device_mesh.mesh.flatten().tolist()) for p in parameters if isinstance(p, DTensor)}
    if len(meshes) > 1:
        raise ValueError(
            f"model's parameters are sharded among the ranks {' and '.join(map(str, sorted(meshes)))}: LocalUpdates "
            "takes a model with one mesh, that of fully_shard(mesh=…)"
        )
    inside = list(meshes.pop()) if meshes else []
    exchanging = [] if process_group is None else dist.get_process_group_ranks(process_group)
    if len(set(inside) & set(exchanging)) > 1:
        raise ValueError(
            f"the ranks {inside} share the model, so they do not exchange with each other: pass the process_group of "
            "those that hold the same shards, such as mesh['replicate'].get_group()"
        )
    return inside


def group_inside(ranks: list[int], problem: Exception | None) -> Group | None:
    """The group of the ranks that share a replica's model; None, if there is but this one. A collective of these.

    Raises:
        the problem because of which this rank cannot go on, if any.
        ValueError: another one has one.
    """
    group = Group.of_ranks(ranks) if len(ranks) > 1 else None
    found = [None] if group is None else group.all_gather_object(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]
    if failed:
        raise ValueError(f"gradwire cannot go on, on any rank of this replica: {'; '.join(failed)}")
    return group


def named_trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's parameters that require gradients and have elements, with their names."""
    names = names_of(model)
    for p in model.parameters():
        if p.requires_grad and p.numel():
            yield names[id(p)], p


def trainable(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, nn.Parameter]:
    """The model's parameters that require gradients and have elements, by name.

    Raises:
        TypeError, ValueError: model and optimizers are invalid, or do not belong together.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    wrong = [type(one).__name__ for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if wrong or not optimizers:
        found = "empty" if not wrong else f"a {wrong[0]}"
        raise TypeError(f"optimizer is {found}, expected a torch.optim.Optimizer of the model's, or several")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            "model is wrapped in DistributedDataParallel, which averages gradients at every step: hand LocalUpdates "
            "the module inside, model.module, and train that"
        )
    parameters = dict(named_trainable(model))
    if not parameters:
        raise ValueError("model has no parameters that require gradients: there is nothing to synchronise")
    own = {id(p) for p in model.parameters()}
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    strange = [p for p in held if id(p) not in own]
    if strange:
        raise ValueError(
            f"optimizer has {len(strange)} parameters that are not the model's, the first of shape "
            f"{tuple(strange[0].shape)}: make it of model.parameters(), and LocalUpdates after both"
        )
    devices = dict.fromkeys(p.device for p in parameters.values())
    if len(devices) > 1:
        raise ValueError(f"model is on {', '.join(map(str, devices))}: LocalUpdates takes parameters on one device")
    return parameters


def thawed(model: nn.Module, known: Iterable[Tensor]) -> str | None:
    """The error message if a parameter requires gradients that is none of the exchanged ones, else None."""
    ids = {id(p) for p in known}
    if all(id(p) in ids for p in model.parameters() if p.requires_grad and p.numel()):
        return None
    name = next(name for name, p in named_trainable(model) if id(p) not in ids)
    return (
        f"parameter {name!r} requires gradients, and is none of those that did when LocalUpdates was made, which are "
        "exchanged: unfreeze it before; or let it require none, synchronise(), unfreeze it, and make another "
        "LocalUpdates"
    )


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers, by their names without wrappers."""
    named = dict[str, Tensor](model.named_parameters()) | dict(model.named_buffers())
    return {name: named[full] for full, name in plain_names(named).items()}


def check_writable(model: nn.Module) -> None:
    """Raise ValueError for tensors that `comm.pieces.broadcast` cannot change in place."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sizes = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ()
        if tensor.layout != torch.strided:
            fault, remedy = f"has the layout {tensor.layout}", "to_dense()"
        elif any(size > 1 and stride == 0 for size, stride in sizes):
            fault, remedy = "has elements that lie at one address", "clone()"
        elif tensor.is_inference():
            fault, remedy = "was made in inference mode", "clone() outside of it"
        else:
            continue
        raise ValueError(
            f"{name!r} {fault}, so it cannot be given the first rank's values: let the model have its {remedy}, or "
            "keep it as an attribute that is no buffer"
        )
