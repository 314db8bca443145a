"""`compress_fsdp` where parameter groups differ, in the ranks of their shards or in an argument: a state for each kind,
and `GroupedState` around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from ...compress.codecs.outliers import codec_of_today
from ..comm.between_steps import between_steps
from ..core.options import excluded_names, named_by
from ..core.statistics import Statistics
from ..training.autograd_end import in_backward
from ..training.names import renamed
from .front import Part
from .torch_internals import Shards, every_shards

if TYPE_CHECKING:
    from .replicate import FSDPState
    from .shard import ScatterState


def divide(model: nn.Module, arguments: dict[str, Any]) -> list[Part]:
    """Divide a model's parameter groups by the values of those arguments that are mappings, from patterns of names;
    without `mesh` also by the ranks that have the shards. Parts are in the same order on all ranks."""
    by_name = {argument: value for argument, value in arguments.items() if isinstance(value, Mapping)}
    if not by_name and arguments["mesh"] is not None:
        return [Part(arguments)]
    try:
        return _divided(model, arguments, by_name)
    except Exception as error:
        first = {a: next((v for v in values.values() if v is not None), None) for a, values in by_name.items()}
        return [Part({**arguments, **first}, problem=error)]


def _divided(model: nn.Module, arguments: dict[str, Any], by_name: dict[str, Mapping[str, Any]]) -> list[Part]:
    every = every_shards(model, "set_all_reduce_hook" if by_name else "set_custom_reduce_scatter")
    parameters = {name: p.sharded_param for shards in every for name, p in shards.parameters.items()}
    names = [name for shards in every for name in shards.names]
    fits = {a: {pattern: named_by(a, pattern, names) for pattern in values} for a, values in by_name.items()}
    parts: dict[tuple[Any, ...], tuple[dict[str, Any], list[int]]] = {}
    for shards in filter(lambda shards: shards.parameters, every):
        chosen = {argument: _chosen(argument, patterns, shards) for argument, patterns in fits.items()}
        how = {**arguments, **{argument: by_name[argument][pattern] for argument, pattern in chosen.items()}}
        ranks = tuple(dist.get_process_group_ranks(shards.process_group)) if how["mesh"] is None else ()
        parts.setdefault((ranks, *chosen.values()), (how, []))[1].append(id(shards.group))
    frozen = [id(shards.group) for shards in every if not shards.parameters]
    between_replicas = [groups for how, groups in parts.values() if how["mesh"] is not None]
    for groups in between_replicas[:1]:  # if they are trained later on, nothing reduces them among the replicas
        groups += frozen
    if len(parts) > 1:  # a pattern need not fit in each
        excluded = excluded_names(arguments["exclude"], parameters)
        for how, _ in parts.values():
            how["exclude"] = lambda name, _: name in excluded
    return [Part(how, frozenset(groups)) for how, groups in parts.values()]


def _chosen(argument: str, fits: Mapping[str, set[str]], shards: Shards) -> str:
    """The first pattern that fits the names of a group's parameters."""
    chosen: dict[str, str] = {}  # and the first name that each fits
    for name in shards.names:
        pattern = next((pattern for pattern, names in fits.items() if name in names), None)
        if pattern is None:
            raise ValueError(f"{argument}: no pattern fits parameter {name!r}: add '*' for all others")
        chosen.setdefault(pattern, name)
    (pattern, name), *others = chosen.items()
    for another, other in others:
        raise ValueError(
            f"{argument}: {pattern!r} fits {name!r} and {another!r} fits {other!r}, and FSDP reduces both as one "
            f"group of module {shards.module!r}: let one pattern fit both, or call fully_shard on parts of it"
        )
    return pattern


class GroupedState:
    """The states of `compress_fsdp` where parameter groups differ, as one. A checkpoint is as of a single state, and
    loads into one where codecs are the same.

    Attributes:
        parts: a state for each kind of groups, in the order of the model.
    """

    _in_step = in_backward

    def __init__(self, parts: Sequence[FSDPState | ScatterState]) -> None:
        self.parts = tuple(parts)
        self._part_of = {name: number for number, part in enumerate(parts) for name in part.parameters}

    def __repr__(self) -> str:
        return f"<GroupedState of {', '.join(map(repr, self.parts))}>"

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.parts))

    @property
    def step(self) -> int:
        """Synchronised backward passes so far; of a part that not every pass uses fewer."""
        return max(part.step for part in self.parts)

    @property
    def tuning(self) -> bool:
        """True while "auto" times steps of any part with and without compression."""
        return any(part.tuning for part in self.parts)

    def statistics(self) -> Statistics:
        """This rank's counts so far, of all parts; `steps` and `nonfinite_steps` of the part with the most."""
        found = [part.statistics() for part in self.parts]
        total = Statistics(max(s.steps for s in found), nonfinite_steps=max(s.nonfinite_steps for s in found))
        for each in found:
            for count in ("elements", "dense_bytes", "bytes_sent", "bytes_received", "skipped_entries"):
                setattr(total, count, getattr(total, count) + getattr(each, count))
            total.decisions |= each.decisions
            total.seconds = {phase: total.seconds[phase] + time for phase, time in each.seconds.items()}
        return total

    @between_steps
    def state_dict(self) -> dict[str, Any]:
        """The residuals of all parts and a few numbers, as of `FSDPState` and `ScatterState`. A collective: every rank
        must call it, after the same step. Saving changes nothing.

        Raises:
            ValueError, RuntimeError: a part's.
        """
        saved, *others = [part.state_dict() for part in self.parts]
        for other in others:
            for kind, vectors in other.get("vectors", {}).items():
                for key, found in vectors.items():
                    saved.setdefault("vectors", {}).setdefault(kind, {}).setdefault(key, {}).update(found)
            for key, found in other["residuals"].items():
                saved["residuals"].setdefault(key, {}).update(found)
        return {**saved, "step": self.step, "codec": self._codecs}

    @between_steps
    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Go on from a checkpoint, of this state or of a single one. `FSDPState.load_state_dict` has the rest."""
        shares = [self._share(number, state_dict) for number in range(len(self.parts))]
        found = [part.read(share, strict) for part, share in zip(self.parts, shares, strict=True)]
        for part, read in zip(self.parts, found, strict=True):
            part.go_on(*read)

    @between_steps
    def close(self) -> None:
        """Close every part."""
        for part in self.parts:
            part.close()

    @property
    def _codecs(self) -> str:
        return "; ".join(dict.fromkeys(part.codec_text for part in self.parts))

    def _share(self, number: int, saved: Mapping[str, Any]) -> dict[str, Any]:
        """A part's share of a checkpoint; the first one has what no part knows, and refuses it."""

        def mine(by_key: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
            return {
                key: {n: x for n, x in renamed(found, self._part_of).items() if self._part_of.get(n, 0) == number}
                for key, found in by_key.items()
            }

        share = {**saved, "residuals": mine(saved.get("residuals", {}))}
        vectors = {kind: mine(by_key) for kind, by_key in saved.get("vectors", {}).items()}
        share["vectors"] = {kind: found for kind, found in vectors.items() if any(found.values())}
        if codec_of_today(str(saved.get("codec"))) == self._codecs:
            share["codec"] = self.parts[number].codec_text
        return share
