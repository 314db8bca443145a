"""What a state writes down and reads back: tensors, numbers and strings only.

Residuals differ between ranks, so each rank's lie under a key that names the rank: `torch.distributed.checkpoint` keeps
one value for each key, whichever rank brings it. Their mean is the same on all ranks and lies under `MEAN`. Format 1
had one rank's residuals without such a key, and "rank" (-1 for the mean) and "world_size" beside them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...compress.feedback.base import RESIDUAL, Feedback
from ..comm.pieces import all_reduce
from .names import renamed
from .session import Session

FORMAT = 2
#: The key of residuals that are the mean over the ranks.
MEAN = "mean"

PACKAGE = Path(__file__).parents[2]


def rank_key(rank: int, world_size: int) -> str:
    """The key of one rank's residuals."""
    return f"rank {rank} of {world_size}"


def export(
    key: str, vectors: Mapping[str, dict[str, Tensor]], strategy: Feedback | None = None, **facts: Any
) -> dict[str, Any]:
    """A checkpoint: `facts`, which are the same on all ranks, residuals by parameter name, and what else is kept.

    Args:
        strategy: what a rank keeps as bfloat16 is saved so; int8's numbers take their steps' float32, and means do too.
    """
    if strategy is not None and key != MEAN:
        halved = {vector for vector in vectors if strategy.stored_as(vector) == torch.bfloat16}
        vectors = {v: {n: x.bfloat16() if v in halved else x for n, x in found.items()} for v, found in vectors.items()}
    kept = {vector: {key: found} for vector, found in vectors.items()}
    residuals = kept.pop(RESIDUAL, {key: {}})
    return {"format": FORMAT, **facts, "residuals": residuals, **({"vectors": kept} if kept else {})}


def upgraded(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint in today's format, whichever it had."""
    if saved.get("format") != 1 or not {"rank", "world_size", "residuals"} <= saved.keys():
        return saved
    rest = {key: value for key, value in saved.items() if key not in ("rank", "world_size")}
    key = MEAN if saved["rank"] == -1 else rank_key(saved["rank"], saved["world_size"])
    return {**rest, "format": FORMAT, "residuals": {key: saved["residuals"]}}


def read(
    saved: Mapping[str, Any],
    expected: Mapping[str, Any],
    key: str,
    parameters: Mapping[str, Tensor],
    strict: bool,
    owner: str = "CompressState",
    idle: Mapping[str, str] | None = None,
) -> tuple[Mapping[str, Any], dict[str, dict[str, Tensor]]]:
    """A checkpoint in today's format, and what it has that is this rank's or everybody's: residuals, and other vectors.

    Args:
        saved: what `export` gave, in this or another process.
        expected: what this state would export.
        key: this rank's.
        parameters: the model's, by name.
        strict: whether to refuse a checkpoint that has no residuals for this rank, or some of parameters that the model
            has not, or has frozen; else go on without these, and warn.
        owner: whose checkpoints these are, for messages.
        idle: why nothing that is kept of a parameter would ever be sent, by name: a checkpoint that has something is
            refused if `strict`, else that is dropped, with a warning.

    Raises:
        ValueError: it does not fit.
    """
    saved = upgraded(saved)
    missing = expected.keys() - saved.keys() - {"vectors"}
    if missing:
        raise ValueError(f"this is not a checkpoint of {owner}: it lacks {', '.join(sorted(missing))}")
    remedies = {
        "format": "load it with the version of gradwire that saved it",
        "codec": f"make this one with the checkpoint's codec, or begin without the checkpoint of {owner}",
    }
    for fact, remedy in remedies.items():
        if saved[fact] != expected[fact]:
            raise ValueError(f"the checkpoint has {fact} {saved[fact]}, this state {expected[fact]}: {remedy}")
    by_rank = {RESIDUAL: saved["residuals"], **saved.get("vectors", {})}
    vectors: dict[str, Any] = {
        vector: found[key] if key in found else _mean_of_all(found) for vector, found in by_rank.items()
    }
    absent = sorted(expected.get("vectors", {}).keys() - vectors.keys())
    if absent:  # a residual alone would stay in what is added up
        text = (
            f"the checkpoint has no {' and no '.join(absent)} of parameters, which this state keeps besides residuals"
        )
        if strict:
            raise ValueError(f"{text}; load_state_dict(..., strict=False) begins without what was kept")
        _warn(f"{text}; it begins without what was kept")
        vectors = {}
    if None in vectors.values():
        text = (
            f"the checkpoint has the residuals of {', '.join(saved['residuals']) or 'no rank'}, and this is {key}: "
            "save state_dict() on every rank, each to a file of its own, or on every rank consolidated_state_dict(), "
            "which loads on any rank and any number of ranks"
        )
        if strict:
            raise ValueError(f"{text}; load_state_dict(..., strict=False) goes on without residuals")
        _warn(f"{text}; this rank goes on without residuals")
        vectors = {}
    named: dict[str, Mapping[str, Tensor]] = {vector: renamed(found, parameters) for vector, found in vectors.items()}
    vectors = _of_this_model(named, parameters, strict)
    # A checkpoint has zeros where nothing was kept.
    kept = {v: {name: x for name, x in found.items() if bool(x.any())} for v, found in vectors.items()}
    more = sorted(v for v in kept.keys() - expected.get("vectors", {}).keys() - {RESIDUAL} if kept[v])
    if more:  # their residual need not be one of gradients
        keeps = " and ".join(sorted({RESIDUAL, *expected.get("vectors", {})}))
        text = f"the checkpoint has {' and '.join(more)} of parameters, and this state keeps {keeps} alone"
        if strict:
            raise ValueError(f"{text}; load_state_dict(..., strict=False) begins without what was kept")
        _warn(f"{text}; it begins without what was kept")
        kept = {}
    return saved, _without(kept, idle or {}, strict)


def _of_this_model(
    vectors: dict[str, Mapping[str, Tensor]], parameters: Mapping[str, Tensor], strict: bool
) -> dict[str, Mapping[str, Tensor]]:
    """Less what is of parameters that the model has not, has frozen, or has in another shape, if not `strict`."""
    foreign: dict[str, str] = {}
    for name, x in (item for found in vectors.values() for item in found.items()):
        mine = parameters.get(name)
        if mine is None or mine.shape != x.shape:
            has = "no such parameter that requires gradients" if mine is None else f"shape {tuple(mine.shape)}"
            foreign.setdefault(name, f"it has {name!r} of shape {tuple(x.shape)}, this model {has}")
    if not foreign:
        return vectors
    text = f"the checkpoint is of another model: {min(foreign.items())[1]}"
    if strict:
        raise ValueError(f"{text}; load_state_dict(..., strict=False) goes on without what was kept of such")
    _warn(f"{text}; what was kept of {len(foreign)} such is dropped")
    return {vector: {n: x for n, x in found.items() if n not in foreign} for vector, found in vectors.items()}


def _without(
    vectors: dict[str, dict[str, Tensor]], idle: Mapping[str, str], strict: bool
) -> dict[str, dict[str, Tensor]]:
    late = sorted({name for found in vectors.values() for name in found} & idle.keys())
    if not late:
        return vectors
    text = f"the checkpoint has a residual of {late[0]!r}, {idle[late[0]]}, and goes without one"
    if strict:
        raise ValueError(f"{text}: undo that, or drop it by load_state_dict(..., strict=False)")
    _warn(f"{text}; it is dropped")
    return {vector: {n: x for n, x in found.items() if n not in idle} for vector, found in vectors.items()}


def _warn(text: str) -> None:
    """Names the line outside of the package that loads; states come here on ways of different lengths."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _mean_of_all(by_rank: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor] | None:
    """What all ranks kept, no matter which saved it: the mean, or each rank's own. None where some are missing."""
    size = len(by_rank)
    if MEAN in by_rank or set(by_rank) != {rank_key(rank, size) for rank in range(size)}:
        return by_rank.get(MEAN)
    parts = [by_rank[rank_key(rank, size)] for rank in range(size)]
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        tensors = [part[name].float() for part in parts if name in part]
        found[name] = torch.stack(tensors).sum(0).div_(size)
    return found


def idle_names(excluded: Iterable[str], sparse: Iterable[str] = ()) -> dict[str, str]:
    """`read`'s `idle`, of parameters that are left as they are and of those whose gradients are sparse."""
    return dict.fromkeys(excluded, "which is excluded now") | dict.fromkeys(sparse, "whose gradients are sparse now")


def means(
    session: Session, vectors: Mapping[str, Mapping[str, Tensor]], parameters: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The mean over the ranks of what each keeps of the parameters, by vector and name. A collective."""
    reported = session.control.all_gather_object({vector: sorted(mine) for vector, mine in vectors.items()})
    found: dict[str, dict[str, Tensor]] = {}
    for vector, mine in vectors.items():
        names = sorted({name for each in reported for name in each[vector]})
        found[vector] = {name: mine[name] if name in mine else _zeros(parameters[name]) for name in names}
    every = [mean for means in found.values() for mean in means.values()]
    if every:
        all_reduce(session.group, next(iter(parameters.values())).device, every)
    for mean in every:
        mean.div_(session.group.size)
    return found


def filled(residuals: dict[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Residuals with zeros for the parameters that have none: `torch.distributed.checkpoint` fills what it is shown."""
    zeros = {name: _zeros(p) for name, p in parameters.items() if name not in residuals}
    return {**residuals, **zeros}


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
