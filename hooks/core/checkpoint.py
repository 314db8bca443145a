"""Checkpoints of whatever keeps residuals: tensors, numbers and strings only.

Residuals differ between ranks, so each rank's are saved under a key that names the rank: `torch.distributed.checkpoint`
keeps one value for each key, from any rank. Their mean is the same on all ranks, and is saved under `MEAN`. Format 1
had one rank's residuals without such a key, and "rank" (-1 for the mean) and "world_size" beside them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Container, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.codecs.outliers import codec_of_today
from ...compress.feedback.base import RESIDUAL
from ...compress.feedback.store import FeedbackStore
from ..comm.pieces import all_reduce
from ..training.names import renamed
from .options import Options
from .session import Session

FORMAT = 2
#: The key of residuals that are the mean over the ranks.
MEAN = "mean"
#: The key of `FeedbackStore.owned`, by rank.
OWNED = "owned"

PACKAGE = Path(__file__).parents[2]
#: Remedy for a checkpoint that is refused.
SKIP = "; load_state_dict(..., strict=False)"

#: Tensors by vector of the feedback strategy and by name of the parameter.
Vectors = dict[str, dict[str, Tensor]]


def rank_key(rank: int, world_size: int) -> str:
    """The key of one rank's residuals."""
    return f"rank {rank} of {world_size}"


class Checkpoint:
    """The checkpoints of one owner, as of now.

    Args:
        owner: the class or function that the user calls, for messages.
        options: the owner's.
        feedback: the owner's residuals.
        parameters: the owner's, by name.
        group: the process group; None: only means are saved.
        step: the owner's step.
        zeros: names of parameters that are saved as zeros where they have no residual but may get one:
            `torch.distributed.checkpoint` fills only the tensors that it is shown.
        idle: parameters that have no residuals, by name, with the reason.
        facts: further values that are equal on all ranks.
    """

    def __init__(
        self,
        owner: str,
        options: Options,
        feedback: FeedbackStore,
        parameters: Mapping[str, Tensor],
        group: Any,
        step: int,
        *,
        zeros: Container[str] = (),
        idle: Mapping[str, str] = MappingProxyType({}),
        **facts: Any,
    ) -> None:
        self.owner, self.feedback, self.parameters, self.idle = owner, feedback, parameters, idle
        self.key = MEAN if group is None else rank_key(dist.get_rank(group), dist.get_world_size(group))
        self.facts = {"codec": options.codec_text, "step": step, "seed": options.seed, **facts}
        self._zeros = zeros if options.may_keep() else ()

    # -- saving --------------------------------------------------------------------------------------------------------

    def of_rank(self, vectors: Vectors | None = None) -> dict[str, Any]:
        """This rank's part; nothing changes. Besides residuals, in which all is folded, it has what owners of slices
        keep apart: not even a rounding differs where layouts are the same after loading.

        Args:
            vectors: in the place of the feedback's residuals.
        """
        saved = self.export(self.key, self.feedback.everything() if vectors is None else vectors)
        owned = self.feedback.owned() if self.key != MEAN else {}
        return {**saved, OWNED: {self.key: owned}} if owned else saved

    def load(self, saved: Mapping[str, Any], vectors: Vectors) -> None:
        """Let the owner's residuals be what `read` returned."""
        self.feedback.load(vectors, saved.get(OWNED, {}).get(self.key, {}) if any(vectors.values()) else {})

    def mean_over_ranks(self, session: Session) -> dict[str, Any]:
        """The mean of the residuals over the ranks, equal on all. A collective."""
        return self.export(MEAN, self.means(session, self.feedback.everything()))

    def means(self, session: Session, vectors: Vectors) -> Vectors:
        """The mean over the ranks of each residual that any of them has. A collective."""
        reported = session.control.all_gather_object({vector: sorted(mine) for vector, mine in vectors.items()})
        found: Vectors = {}
        for vector, mine in vectors.items():
            names = sorted({name for each in reported for name in each[vector]})
            found[vector] = {name: mine[name] if name in mine else self.zero(name) for name in names}
        every = [mean for means in found.values() for mean in means.values()]
        if every:
            all_reduce(session.group, every[0].device, every)
        for mean in every:
            mean.div_(session.group.size)
        return found

    def export(self, key: str, vectors: Vectors) -> dict[str, Any]:
        """A checkpoint with these residuals under `key`. A rank's bfloat16 is saved as such; int8 and means as float32,
        since int8's steps would be needed, too."""
        shown = [name for name in self.parameters if name in self._zeros]
        saved = {}
        for vector, found in vectors.items():
            found = {**found, **{name: self.zero(name) for name in shown if name not in found}}
            if key != MEAN and self.feedback.strategy.storage_dtype(vector) == torch.bfloat16:
                found = {n: x.bfloat16() for n, x in found.items()}
            saved[vector] = {key: found}
        residuals = saved.pop(RESIDUAL, {key: {}})
        return {"format": FORMAT, **self.facts, "residuals": residuals, **({"vectors": saved} if saved else {})}

    def zero(self, name: str) -> Tensor:
        """The residual of a parameter that has none."""
        like = self.parameters[name]
        return torch.zeros(like.shape, dtype=torch.float32, device=like.device)

    # -- loading -------------------------------------------------------------------------------------------------------

    def read(
        self, saved: Mapping[str, Any], strict: bool, needs: Collection[str] = ()
    ) -> tuple[Mapping[str, Any], Vectors]:
        """A checkpoint in today's format, and its residuals for this rank.

        Args:
            saved: from `of_rank` or `mean_over_ranks`, in this or another process.
            strict: refuse a checkpoint that has no residuals for this rank, or some that cannot be used; else drop
                these, with a warning.
            needs: further keys that it must have.

        Raises:
            ValueError: the checkpoint does not fit.
        """
        saved = _upgraded(saved)
        missing = {"format", *self.facts, "residuals", *needs} - saved.keys()
        if missing:
            raise ValueError(f"this is not a checkpoint of {self.owner}: it lacks {', '.join(sorted(missing))}")
        remedies = {
            "format": "load it with the version of gradwire that saved it",
            "codec": f"make this one with the checkpoint's codec, or begin without the checkpoint of {self.owner}",
        }
        for fact, remedy in remedies.items():
            mine = {"format": FORMAT, **self.facts}[fact]
            if saved[fact] != mine:
                raise ValueError(f"the checkpoint has {fact} {saved[fact]}, this state {mine}: {remedy}")
        vectors = self._of_this_model(self._of_this_rank(saved, strict), strict)
        # A checkpoint has zeros where nothing was kept.
        kept = {v: {name: x for name, x in found.items() if bool(x.any())} for v, found in vectors.items()}
        more = sorted(v for v in kept.keys() - {RESIDUAL, *self.feedback.strategy.state_names} if kept[v])
        if more:  # their residual need not be one of gradients
            keeps = " and ".join(sorted({RESIDUAL, *self.feedback.strategy.state_names}))
            text = f"the checkpoint has {' and '.join(more)} of parameters, and this state keeps {keeps} alone"
            _refuse(strict, text, f"{SKIP} begins without saved residuals", "it begins without saved residuals")
            kept = {}
        return saved, self._without_idle(kept, strict)

    def _of_this_rank(self, saved: Mapping[str, Any], strict: bool) -> Vectors:
        """The tensors for this rank, by this model's names."""
        by_rank = {RESIDUAL: saved["residuals"], **saved.get("vectors", {})}
        vectors: dict[str, Any] = {
            vector: found[self.key] if self.key in found else _mean_of_all(found) for vector, found in by_rank.items()
        }
        absent = sorted({*self.feedback.strategy.state_names} - {RESIDUAL} - vectors.keys())
        if absent:  # a residual alone would stay in what is added up
            lacks = " and no ".join(absent)
            text = f"the checkpoint has no {lacks} of parameters, which this state keeps besides residuals"
            _refuse(strict, text, f"{SKIP} begins without saved residuals", "it begins without saved residuals")
            return {}
        if None in vectors.values():
            text = (
                f"the checkpoint has the residuals of {', '.join(saved['residuals']) or 'no rank'}, and this is "
                f"{self.key}: save state_dict() on every rank, each to a file of its own, or on every rank "
                "consolidated_state_dict(), which loads on any rank and any number of ranks"
            )
            _refuse(strict, text, f"{SKIP} goes on without residuals", "this rank goes on without residuals")
            return {}
        return {vector: renamed(found, self.parameters) for vector, found in vectors.items()}

    def _of_this_model(self, vectors: Vectors, strict: bool) -> Vectors:
        """Without parameters that the model has not, has frozen, or has in another shape."""
        foreign: dict[str, str] = {}
        for name, x in (item for found in vectors.values() for item in found.items()):
            mine = self.parameters.get(name)
            if mine is None or mine.shape != x.shape:
                has = "no such parameter that requires gradients" if mine is None else f"shape {tuple(mine.shape)}"
                foreign.setdefault(name, f"it has {name!r} of shape {tuple(x.shape)}, this model {has}")
        if foreign:
            text = f"the checkpoint is of another model: {min(foreign.items())[1]}"
            outcome = f"residuals of {len(foreign)} such parameters are dropped"
            _refuse(strict, text, f"{SKIP} goes on without residuals of such parameters", outcome)
        return {vector: {n: x for n, x in found.items() if n not in foreign} for vector, found in vectors.items()}

    def _without_idle(self, vectors: Vectors, strict: bool) -> Vectors:
        """Without parameters whose residuals would never be sent."""
        late = sorted({name for found in vectors.values() for name in found} & self.idle.keys())
        if late:
            text = f"the checkpoint has a residual of {late[0]!r}, {self.idle[late[0]]}, and goes without one"
            _refuse(strict, text, ": undo that, or drop it by load_state_dict(..., strict=False)", "it is dropped")
        return {vector: {n: x for n, x in found.items() if n not in self.idle} for vector, found in vectors.items()}


def idle_names(excluded: Iterable[str], sparse: Iterable[str] = ()) -> dict[str, str]:
    """`Checkpoint`'s `idle`, of excluded parameters and of those with sparse gradients."""
    return dict.fromkeys(excluded, "which is excluded now") | dict.fromkeys(sparse, "whose gradients are sparse now")


def _upgraded(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint of any format in today's, its codec too."""
    if isinstance(saved.get("codec"), str):
        saved = {**saved, "codec": codec_of_today(saved["codec"])}
    if saved.get("format") != 1 or not {"rank", "world_size", "residuals"} <= saved.keys():
        return saved
    rest = {key: value for key, value in saved.items() if key not in ("rank", "world_size")}
    key = MEAN if saved["rank"] == -1 else rank_key(saved["rank"], saved["world_size"])
    return {**rest, "format": FORMAT, "residuals": {key: saved["residuals"]}}


def _mean_of_all(by_rank: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor] | None:
    """The mean over the ranks that saved: itself, or of each rank's own. None where some are missing."""
    size = len(by_rank)
    if MEAN in by_rank or set(by_rank) != {rank_key(rank, size) for rank in range(size)}:
        return by_rank.get(MEAN)
    parts = [by_rank[rank_key(rank, size)] for rank in range(size)]
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        tensors = [part[name].float() for part in parts if name in part]
        found[name] = torch.stack(tensors).sum(0).div_(size)
    return found


def _refuse(strict: bool, text: str, remedy: str, outcome: str) -> None:
    """Raise ValueError with the remedy if `strict`, else warn of the outcome.

    The warning names the line outside of the package that loads: the depth of calls differs between owners.
    """
    if strict:
        raise ValueError(text + remedy)
    frame, level = sys._getframe(1), 2
    while frame.f_back and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{text}; {outcome}", stacklevel=level)
