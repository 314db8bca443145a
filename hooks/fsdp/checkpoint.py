"""Checkpoints of sharded models: residuals are saved as shards like the model's, so that
`torch.distributed.checkpoint` can move them to other meshes.

That keeps one copy of tensors that several ranks have, from any of them. Replicas have different residuals, so their
mean is saved, and every replica goes on with it: the mean of the residuals is unchanged, for any number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core import checkpoint
from ..core.checkpoint import MEAN
from ..core.names import renamed
from ..core.session import Session
from .torch_internals import Shards

Vectors = dict[str, dict[str, Tensor]]


def means(session: Session, vectors: Vectors, groups: Iterable[Shards], keeps: frozenset[str]) -> Vectors:
    """The mean over the replicas of what each keeps of its shards, as DTensors sharded as their parameters are: by
    vector and name, with zeros where nothing is kept. A collective.

    Args:
        vectors: padded shards by vector and name.
        keeps: names of the parameters that may have a residual.
    """
    shards_of = {name: shards for shards in groups for name in shards.parameters}
    padded = {  # the shapes of `checkpoint.means`' zeros
        name: torch.empty((), dtype=torch.float32, device=shards.group.device).expand(
            shards.parameters[name].padded_sharded_param_size
        )
        for name, shards in shards_of.items()
    }
    found: Vectors = {}
    for vector, kept in checkpoint.means(session, vectors, padded).items():
        found[vector] = {}
        for name in padded:
            if name in keeps:
                shards = shards_of[name]
                if name in kept:
                    part = shards.local(name, kept[name]).contiguous()
                else:
                    size = shards.parameters[name].sharded_size
                    part = torch.zeros(size, dtype=torch.float32, device=shards.group.device)
                found[vector][name] = as_sharded(part, shards.parameters[name].sharded_param)
    return found


def as_sharded(local: Tensor, parameter: DTensor) -> DTensor:
    """A local shard as a DTensor, sharded like a parameter."""
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def read(
    saved: Mapping[str, Any],
    expected: Mapping[str, Any],
    groups: Iterable[Shards],
    strict: bool,
    excluded: Iterable[str],
) -> Any:
    """A checkpoint, and this rank's padded shards of it, by vector and name.

    Args:
        excluded: names of parameters without residuals.

    Raises:
        ValueError: the checkpoint does not fit.
    """
    shards_of = {name: shards for shards in groups for name in shards.parameters}
    parameters = {name: shards.parameters[name].sharded_param for name, shards in shards_of.items()}
    saved = {**saved, "residuals": _local(saved.get("residuals", {}), parameters)}
    if "vectors" in saved:
        saved["vectors"] = {vector: _local(found, parameters) for vector, found in saved["vectors"].items()}
    mine = {name: p.to_local() for name, p in parameters.items()}
    facts, vectors = checkpoint.read(
        saved, expected, MEAN, mine, strict, "compress_fsdp", checkpoint.idle_names(excluded)
    )
    return facts, {
        vector: {name: shards_of[name].padded(name, local.float()) for name, local in found.items()}
        for vector, found in vectors.items()
    }


def _local(by_rank: Mapping[str, Mapping[str, Tensor]], parameters: Mapping[str, DTensor]) -> dict[str, Any]:
    """The same tensors, each DTensor replaced by this rank's shard.

    Raises:
        ValueError: one is sharded otherwise than the model's parameter.
    """
    result: dict[str, Any] = {}
    for key, found in by_rank.items():
        result[key] = {}
        for name, x in renamed(found, parameters).items():
            p = parameters.get(name)
            if isinstance(x, DTensor):
                if p is not None and (x.shape, x.placements) != (p.shape, p.placements):
                    raise ValueError(
                        f"the checkpoint has {name!r} of shape {tuple(x.shape)} as {x.placements}, this model "
                        f"{tuple(p.shape)} as {p.placements}: let torch.distributed.checkpoint load it into this "
                        "state's own state_dict(), which shards it again"
                    )
                x = x.to_local()
            result[key][name] = x
    return result
