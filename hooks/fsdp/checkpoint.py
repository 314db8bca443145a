"""Checkpoints of sharded models: residuals are saved as shards like the model's, so that
`torch.distributed.checkpoint` can move them to other meshes.

That keeps one copy of tensors that several ranks have, from any of them. Replicas have different residuals, so their
mean is saved, and every replica goes on with it: the mean of the residuals is unchanged, for any number of replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...compress.feedback.store import FeedbackStore
from ..core.checkpoint import Checkpoint, Vectors, idle_names
from ..core.options import Options
from ..core.session import Session
from ..training.names import renamed
from .torch_internals import Shards


class ShardedCheckpoint(Checkpoint):
    """The checkpoints of one owner, as of now; `Checkpoint.parameters` are local shards.

    Args:
        options, feedback, step: `Checkpoint`'s; the feedback has padded shards.
        groups: the model's parameter groups.
        idle: names of parameters that have no residuals.
    """

    def __init__(
        self, options: Options, feedback: FeedbackStore, groups: Iterable[Shards], step: int, idle: frozenset[str]
    ) -> None:
        self.shards_of = {name: shards for shards in groups for name in shards.parameters}
        self.sharded = {name: shards.parameters[name].sharded_param for name, shards in self.shards_of.items()}
        local = {name: p.to_local() for name, p in self.sharded.items()}
        super().__init__("compress_fsdp", options, feedback, local, None, step, idle=idle_names(idle))
        self.saves = [name for name in local if options.may_keep() and name not in idle]

    def means(self, session: Session, vectors: Vectors) -> Vectors:
        """The mean over the replicas of each one's residuals, as DTensors sharded like their parameters, with zeros
        where no replica has one. A collective."""
        saved: Vectors = {}
        for vector, found in super().means(session, vectors).items():
            saved[vector] = {}
            for name in self.saves:
                local = self.shards_of[name].local(name, found[name] if name in found else self.zero(name))
                # A view would be saved with all of its memory.
                saved[vector][name] = self.as_sharded(name, local if name in found else local.clone())
        return saved

    def zero(self, name: str) -> Tensor:
        """A padded shard of zeros."""
        shards = self.shards_of[name]
        shape = shards.parameters[name].padded_sharded_param_size
        return torch.zeros(shape, dtype=torch.float32, device=shards.group.device)

    def read(
        self, saved: Mapping[str, Any], strict: bool, needs: Collection[str] = ()
    ) -> tuple[Mapping[str, Any], Vectors]:
        """`Checkpoint.read`, with padded shards."""
        saved = {**saved, "residuals": self._local(saved.get("residuals", {}))}
        if "vectors" in saved:
            saved["vectors"] = {vector: self._local(found) for vector, found in saved["vectors"].items()}
        facts, vectors = super().read(saved, strict, needs)
        return facts, {
            vector: {name: self.shards_of[name].padded(name, local.float()) for name, local in found.items()}
            for vector, found in vectors.items()
        }

    def as_sharded(self, name: str, local: Tensor) -> DTensor:
        """A local shard as a DTensor, sharded like a parameter."""
        like = self.sharded[name]
        return DTensor.from_local(
            local.contiguous(), like.device_mesh, like.placements, run_check=False,
            shape=like.shape, stride=like.stride(),
        )  # fmt: skip

    def _local(self, by_rank: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """The same tensors, each DTensor replaced by this rank's shard.

        Raises:
            ValueError: one is sharded otherwise than the model's parameter.
        """
        result: dict[str, Any] = {}
        for key, found in by_rank.items():
            result[key] = {}
            for name, x in renamed(found, self.sharded).items():
                p = self.sharded.get(name)
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
