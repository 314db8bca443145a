"""The common part of both states of `compress_fsdp`: gradients between shards, and between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..comm import handshake
from ..core.front import BackwardFront
from ..core.options import Exclude, excluded_names
from ..training.optimizer_checks import expect_optimizer
from .checkpoint import ShardedCheckpoint
from .torch_internals import ByHand, Shards


class ShardedFront(BackwardFront):
    """A state of a model whose parameters FSDP shards; a step may also be a pass that is finalized by hand."""

    _owner = "compress_fsdp"
    _by_hand: ByHand

    def __init__(self) -> None:
        self._shards: Sequence[Shards] = []
        self._parameters: dict[str, nn.Parameter] = {}
        self._excluded: frozenset[str] = frozenset()

    def _found(self, shards: Sequence[Shards]) -> None:
        """Reduce these gradients."""
        self._shards, self._device = shards, shards[0].group.device
        self._parameters = {n: p.sharded_param for each in shards for n, p in each.parameters.items()}

    def _exclude(self, exclude: Exclude | None) -> None:
        """Send these parameters uncompressed, and those that must stay equal on ranks with other messages."""
        copied = (shards.copied for shards in self._shards)
        self._excluded = excluded_names(exclude, self._parameters).union(*copied)

    def _observe(self, model: nn.Module) -> None:
        """Follow passes that are finalized by hand, and optimizers."""
        self._by_hand = ByHand(model, self._finalized, self._given_up)
        expect_optimizer(self, self._parameters.values(), type(self)._check_optimizer)

    def _finalized(self) -> None:
        if self._open is not None:
            self._ended(self._open)

    def _given_up(self) -> None:
        if self._open is not None:
            self._discard(self._open)

    @property
    def _checkpoint(self) -> ShardedCheckpoint:
        idle = frozenset[str]() if self._options.keeps_all else self._excluded
        return ShardedCheckpoint(self._options, self._feedback, self._shards, self._step, idle)

    def _reductions(self) -> list[str]:
        """A line for each of FSDP's reductions, equal on all ranks."""
        return [f"{shards.module}: {shards.dtype}" for shards in self._shards]

    def _description(self) -> dict[str, Any]:
        return {
            **super()._description(),
            "the model's parameters": handshake.describe_model(self._parameters, self._excluded),
            "FSDP's reductions": self._reductions(),
        }
