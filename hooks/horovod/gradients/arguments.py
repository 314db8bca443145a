"""Arguments of `DistributedOptimizer`: options, and the names and groups of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...training.loaded_values import parameters_of
from ...training.names import plain_names
from ..process_sets import ProcessSet


@dataclass
class Options:
    """Arguments of `DistributedOptimizer`.

    Attributes:
        groups: positions in the optimizer's list of parameters.
        only_sparse: the optimizer takes no dense gradient.
    """

    compression: Any
    backward_passes_per_step: int
    op: int
    predivide: float
    groups: list[list[int]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    only_sparse: bool = False


def name_parameters(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """The optimizer's parameters in its order, with their names."""
    if named is None:
        groups = enumerate(optimizer.param_groups)
        return [(f"noname.{i}.{j}", p) for i, group in groups for j, p in enumerate(group["params"])]
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    name_of = {p: name for name, p in pairs}
    parameters = parameters_of(optimizer)
    missing = [tuple(p.shape) for p in parameters if p not in name_of]
    if missing:
        shapes = ", ".join(map(str, missing))
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: those of shape "
            f"{shapes}. Pass the names of all parameters of the optimizer"
        )
    plain = plain_names(names)
    return [(plain[name_of[p]], p) for p in parameters]


def group_positions(groups: Any, named: list[tuple[str, Tensor]]) -> list[list[int]] | None:
    """Positions of each group's parameters."""
    problem = f"groups={groups!r}: " if isinstance(groups, int | str | float) else "groups: "
    problem += "groups should be a non-negative integer or a list of lists of the optimizer's parameters, each in one"
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(problem)
        chosen = [i for i, (_, p) in enumerate(named) if p.requires_grad]
        share, more = divmod(len(chosen), groups) if groups else (0, 0)
        starts = [share * i + min(i, more) for i in range(groups + 1)]
        return [chosen[a:b] for a, b in itertools.pairwise(starts) if b > a] or None
    position = {p: i for i, (_, p) in enumerate(named)}
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise ValueError(problem)
    flat = [p for group in groups for p in group]
    if any(not isinstance(p, Tensor) or p not in position for p in flat) or len(set(flat)) < len(flat):
        raise ValueError(problem)
    return [[position[p] for p in group] for group in groups]
